"""The memory of this container: what is in use, what it may use, and whether the kernel killed because it ran out.

In use is only what the kernel cannot take back. The page cache counts as free, as it does in the kernel's own
`MemAvailable`: a job that reads its data from files fills its limit with page cache, and loses nothing by it. The
cgroup's own high-water mark (`memory.peak`) counts the page cache, so it says nothing and is not read.

Read are cgroup v2 and v1, in a container and outside of one. Where there is no cgroup, nothing is known but what this
process uses. Nothing here raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")

_NO_LIMIT = 1 << 60
"""Bytes. A limit above it is how cgroup v1 says that there is none."""


@dataclass(frozen=True)
class _Files:
    """What one version of cgroups calls its files, and the fields in them."""

    used: str
    limit: str
    reclaimable: tuple[str, ...]
    """Fields of `memory.stat` which are in `used` and can be taken back."""
    kills: str


_V2 = _Files("memory.current", "memory.max", ("active_file", "inactive_file", "slab_reclaimable"), "memory.events")
_V1 = _Files(
    "memory.usage_in_bytes",
    "memory.limit_in_bytes",
    ("total_active_file", "total_inactive_file"),
    "memory.oom_control",
)


@dataclass(frozen=True)
class Memory:
    """The memory of all processes of a cgroup."""

    used: int
    """Bytes in use that the kernel cannot take back."""
    limit: int | None
    """Bytes that may be in use; None: there is no limit."""
    kills: int | None
    """How many processes the kernel has killed here because memory ran out; None: unknown."""


def of_container(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> Memory | None:
    """That of the cgroup whose limit is the next to be reached; None if no cgroup can be read."""
    found = list(_levels(proc, cgroups))
    limited = [(level.limit - level.used, level) for level in found if level.limit is not None]
    if limited:
        return min(limited, key=lambda left: left[0])[1]
    return found[0] if found else None


def peak_of_process(proc: Path = _PROC) -> int:
    """Bytes that this process has had in use at most, without mapped files; 0 if that is unknown.

    The kernel notes every page, so a short rise is in it that no look at the cgroup has met.
    """
    status = _table(proc / "self/status")
    return 1024 * max(0, status.get("VmHWM:", 0) - status.get("RssFile:", 0))


def free(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Bytes that this process can still allocate: the available memory of the machine, at most the cgroup's limit."""
    left = [1 << 62]
    machine = _table(proc / "meminfo").get("MemAvailable:")
    if machine is not None:
        left.append(1024 * machine)
    container = of_container(proc, cgroups)
    if container is not None and container.limit is not None:
        left.append(container.limit - container.used)
    return max(0, min(left))


def _levels(proc: Path, cgroups: Path) -> Iterator[Memory]:
    """The cgroup of this process, and those above it which can be seen."""
    for root, place, files in _places(proc, cgroups):
        # A container may be told its path on the node and see only its own cgroup, as the root.
        for group in (place, *place.parents):
            level = _read(root / group, files)
            if level is not None:
                yield level


def _places(proc: Path, cgroups: Path) -> Iterator[tuple[Path, Path, _Files]]:
    """Where the memory controller is mounted, and the path of this process below that."""
    for line in _text(proc / "self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        place = Path(path.lstrip("/"))
        if ".." in place.parts:  # outside of what this container sees
            place = Path()
        if not controllers:
            yield cgroups, place, _V2
        elif "memory" in controllers.split(","):
            yield cgroups / "memory", place, _V1


def _read(group: Path, files: _Files) -> Memory | None:
    used = _number(_text(group / files.used))
    if used is None:
        return None
    stat = _table(group / "memory.stat")
    used = max(0, used - sum(stat.get(field, 0) for field in files.reclaimable))
    limit = _number(_text(group / files.limit))  # "max" is no number
    return Memory(
        used,
        None if limit is None or limit >= _NO_LIMIT else limit,
        _table(group / files.kills).get("oom_kill"),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _table(path: Path) -> Mapping[str, int]:
    """The numbers of a file of lines `name number ...`."""
    words = (line.split() for line in _text(path).splitlines())
    found = {row[0]: _number(row[1]) for row in words if len(row) > 1}
    return {name: number for name, number in found.items() if number is not None}
