"""Where this process runs: pod and container."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path


def in_kubernetes(environ: Mapping[str, str]) -> bool:
    return "KUBERNETES_SERVICE_HOST" in environ


def pod_name() -> str:
    return os.environ.get("HOSTNAME") or socket.gethostname()


def container_life(proc: Path = Path("/proc")) -> str:
    """An id of this container from its start to its end: the boot of the node, and when process 1 started.

    The hooks use the same id. A container that is started again in place gets another one, although its emptyDirs
    stay. Empty if `/proc` cannot be read. In a pod with a shared PID namespace it is the id of the pod.
    """
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        # The program's name, in parentheses, may contain any character. Field 22 is the 20th after it.
        started = (proc / "1/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
    return f"{boot}/{started}"


def container(proc: Path = Path("/proc")) -> str:
    """An id that is equal in all processes of one container, and in no other container.

    The host name is not enough: pods with `hostNetwork` have the name of their node. The numbers of namespaces differ
    between the containers of a node, but may be equal on two nodes; the boot id tells nodes apart.
    """
    found = [socket.gethostname(), container_life(proc)]
    for name in ("mnt", "pid"):
        try:
            found.append((proc / "self/ns" / name).readlink().name)
        except OSError:
            found.append("")
    return " ".join(found)


def is_alive(pid: int) -> bool:
    """A process with this pid exists here and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in ("Z", "X")


def is_on_container_filesystem(path: Path) -> bool:
    """`path` is on the root file system of a container, which is deleted with the container."""
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
