"""Where this process runs: pod, container, memory. Reads, decides nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

TERMINATION_LOG = Path("/dev/termination-log")
"""What kubelet shows as the container's last message; exists in a pod only."""


def in_kubernetes(environ: Mapping[str, str]) -> bool:
    return "KUBERNETES_SERVICE_HOST" in environ


def pod_name() -> str:
    return os.environ.get("HOSTNAME") or socket.gethostname()


def is_alive(pid: int) -> bool:
    """A process of this pid exists here and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in ("Z", "X")


def is_on_container_filesystem(path: Path) -> bool:
    """`path` lies on the root file system of a container, which dies with the container."""
    best, kind = "", ""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    for line in mounts:
        head, _, tail = line.partition(" - ")
        point = head.split()[4].encode().decode("unicode_escape")
        if (path == Path(point) or Path(point) in path.parents) and len(point) >= len(best):
            best, kind = point, tail.split()[0]
    return best == "/" and kind == "overlay"


def free_memory() -> int:
    """Bytes this process may still take: the machine's available memory, cut to the cgroup's limit."""
    free = 1 << 62
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # "max" is no number: no limit
            continue
    return max(0, free)


def tell_kubelet(message: str) -> None:
    """Leave the last word where kubelet looks for it, if there is such a place."""
    try:
        if TERMINATION_LOG.exists():
            TERMINATION_LOG.write_text(message[:4000] + "\n")
    except OSError:
        # The log and the signal file say the same; this is a third way.
        return
