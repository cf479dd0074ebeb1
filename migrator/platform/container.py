"""Where this process runs: pod, container, memory. Reads, decides nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

_LAST_WORD_BYTES = 4096
"""Of a longer message kubelet shows the end only."""


def in_kubernetes(environ: Mapping[str, str]) -> bool:
    return "KUBERNETES_SERVICE_HOST" in environ


def pod_name() -> str:
    return os.environ.get("HOSTNAME") or socket.gethostname()


def container_life(proc: Path = Path("/proc")) -> str:
    """What the hooks call this container between its start and its end: the node's boot, and when process 1 started.

    A container that is started again in place gets another one, though its emptyDirs stay. Empty where `/proc` does
    not say. In a pod whose containers share their process ids it is the pod's.
    """
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        # The name of the program, in parentheses, may hold anything; the 22nd field is the 20th behind it.
        started = (proc / "1/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
    return f"{boot}/{started}"


def container(proc: Path = Path("/proc")) -> str:
    """Equal in processes of one container, and only there.

    The host's name does not tell: pods with `hostNetwork` have that of their node. The numbers of namespaces differ
    between containers of one node, and mean nothing on another node, hence the boot.
    """
    found = [socket.gethostname(), container_life(proc)]
    for name in ("mnt", "pid"):
        try:
            found.append((proc / "self/ns" / name).readlink().name)
        except OSError:
            found.append("")
    return " ".join(found)


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


def tell_kubelet(message: str, place: Path) -> None:
    """Leave the last word where kubelet looks for it, if there is such a place: kubelet makes the file, not we."""
    line = " ".join(message.split()).encode(errors="backslashreplace")
    # A character that is cut in two would not be shown.
    data = line[: _LAST_WORD_BYTES - 1].decode(errors="ignore").encode() + b"\n"
    try:
        # Not to wait for ever if the name is that of a pipe.
        fd = os.open(place, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)
    except OSError:
        # The log and the signal file say the same; this is a third way.
        return
