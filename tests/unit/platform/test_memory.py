"""What a container's memory is: from the files of cgroup v2, of v1, from none, and from what this kernel shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from migrator.platform import memory
from migrator.platform.memory import Memory

MI = 1 << 20


class Machine:
    """The files of a kernel, as far as they are read."""

    def __init__(self, directory: Path) -> None:
        self.proc, self.cgroups = directory / "proc", directory / "cgroup"
        self.write(self.proc / "meminfo", f"MemTotal: 1 kB\nMemAvailable:   {900 * 1024} kB\n")

    @staticmethod
    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def own(self, *lines: str) -> None:
        """The cgroups of this process."""
        self.write(self.proc / "self/cgroup", "".join(f"{line}\n" for line in lines))

    def v2(self, place: str, *, used: int, limit: Any = "max", cache: int = 0, kills: int = 0) -> None:
        group = self.cgroups / place
        self.write(group / "memory.current", f"{used * MI}\n")
        self.write(group / "memory.max", f"{limit if limit == 'max' else limit * MI}\n")
        stat = f"anon {7 * MI}\nfile {cache * MI}\nactive_file {cache * MI - 5}\ninactive_file 4\nslab_reclaimable 1\n"
        self.write(group / "memory.stat", stat if cache else "anon 5\n")
        self.write(group / "memory.events", f"low 0\nhigh 9\nmax 8\noom 7\noom_kill {kills}\noom_group_kill 6\n")

    def v1(self, place: str, *, used: int, limit: int | None = None, cache: int = 0, kills: int = 0) -> None:
        group = self.cgroups / "memory" / place
        self.write(group / "memory.usage_in_bytes", f"{used * MI}\n")
        self.write(group / "memory.limit_in_bytes", f"{9223372036854771712 if limit is None else limit * MI}\n")
        half = cache * MI // 2
        stat = f"active_file 1\ninactive_file 1\ntotal_active_file {half}\ntotal_inactive_file {half}\n"
        self.write(group / "memory.stat", stat)
        self.write(group / "memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")

    @property
    def found(self) -> Memory | None:
        return memory.of_container(self.proc, self.cgroups)

    @property
    def free(self) -> int:
        return memory.free(self.proc, self.cgroups)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_container_of_v2(machine: Machine) -> None:
    """Its own cgroup is all it sees, as the root. What the page cache holds is not in use."""
    machine.own("0::/")
    machine.v2("", used=500, limit=512, cache=200, kills=3)

    assert machine.found == Memory(used=300 * MI, limit=512 * MI, kills=3)
    assert machine.free == 212 * MI


def test_a_container_of_v1(machine: Machine) -> None:
    """It is told its path on the node, where it finds nothing."""
    machine.own("9:cpu,cpuacct:/kubepods/pod-1/abc", "4:memory:/kubepods/pod-1/abc", "0::/")
    machine.v1("", used=500, limit=512, cache=200, kills=2)

    assert machine.found == Memory(used=300 * MI, limit=512 * MI, kills=2)
    assert machine.free == 212 * MI


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_no_limit_is_none(machine: Machine, version: str) -> None:
    """Then only the machine sets one, and of that only what is free is known."""
    machine.own("4:memory:/" if version == "v1" else "0::/")
    getattr(machine, version)("", used=500)

    assert machine.found is not None
    assert (machine.found.used, machine.found.limit) == (500 * MI, None)
    assert machine.free == 900 * MI


def test_outside_of_a_container_the_limit_that_comes_first_counts(machine: Machine) -> None:
    """That of a slice above may be lower than that of the process's own cgroup, and others use of it."""
    machine.own("0::/user.slice/job.scope")
    machine.v2("user.slice/job.scope", used=100, limit=400, kills=1)
    machine.v2("user.slice", used=700, limit=800)

    assert machine.found == Memory(used=700 * MI, limit=800 * MI, kills=0)
    machine.v2("user.slice", used=100, limit=800)
    assert machine.found == Memory(used=100 * MI, limit=400 * MI, kills=1)


def test_a_path_that_leads_out_of_the_container_is_not_followed(machine: Machine) -> None:
    """The kernel shows a cgroup outside of the namespace as `/../other`."""
    machine.own("0::/../../other")
    machine.v2("", used=10, limit=20)
    machine.v2("../../other", used=1, limit=2)

    assert machine.found == Memory(used=10 * MI, limit=20 * MI, kills=0)


@pytest.mark.parametrize("text", ["", "many\n", "-5\n", "1e9\n", "٣\n", "\0\xff\n"])
def test_a_file_of_another_form_is_not_known(machine: Machine, text: str) -> None:
    """Nothing raises, and nothing is guessed."""
    machine.own("0::/", "nonsense", ":::", "")
    machine.v2("", used=300, limit=512, cache=200, kills=3)
    for name in ("memory.stat", "memory.events", "memory.max"):
        (machine.cgroups / name).write_text(text)
    assert machine.found == Memory(used=300 * MI, limit=None, kills=None)

    (machine.cgroups / "memory.current").write_text(text)
    assert machine.found is None
    assert machine.free == 900 * MI


def test_a_machine_that_shows_nothing_is_no_error(tmp_path: Path) -> None:
    """Then a copy is tried, and what is not there cannot be had."""
    nowhere = tmp_path / "nowhere"
    assert memory.of_container(nowhere, nowhere) is None
    assert memory.peak_of_process(nowhere) == 0
    assert memory.free(nowhere, nowhere) == 1 << 62


def test_the_peak_of_this_process_stays_when_the_memory_is_given_back() -> None:
    """The kernel has noted it, however short it was."""
    before = memory.peak_of_process()
    if not before:
        pytest.skip("LOUD: this kernel notes no peak of a process: /proc/self/status has no VmHWM")
    taken = bytearray(b"\1") * (before + 64 * MI)
    size = len(taken)
    del taken

    assert memory.peak_of_process() >= size
