"""Whatever a crash leaves on a volume, a new life finds what was promised.

`tests.support.crashes` searches, `tests.support.disk` forgets.

Here is a sample of each search, and what makes the whole of it worth believing: that the disk behaves as a real one
until it crashes, that it then forgets all that it may, and that protocols which lose something are found out.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from migrator.ckpt import leaving_mark, retention
from migrator.ckpt.digests import BLOCK
from migrator.ckpt.manifest import PartRecord
from migrator.ckpt.names import MANIFEST
from migrator.errors import MigratorError, StorageExistsError, StorageTransientError
from migrator.storage import posix_calls
from migrator.storage.base import Reader
from migrator.storage.object_storage import ObjectStorage
from migrator.storage.posix import PosixStorage
from tests.support import chance, disk
from tests.support.crashes import (
    SETTINGS,
    Broken,
    Search,
    Setting,
    Told,
    begun_twice,
    ignores_conditions,
    killed_while_leaving,
    object_store,
    one_after_the_other,
    overlapping,
    refuses_conditions,
    replaced_while_leaving,
    saved_once,
    that_does_not_sync,
    together,
    visit,
)
from tests.support.disk import SECTOR, Directory, Disk, Kernel
from tests.support.object_store import Fault, ObjectStore, Outcome, faults

O_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


@pytest.mark.parametrize("setting", chance.some("stories", SETTINGS, 0.2), ids=lambda setting: setting.name)
def test_every_promise_is_kept_behind_a_crash_and_one_more(setting: Setting) -> None:
    """Some states of each search; `make crashes` looks at 100,000."""
    seed = chance.dice(setting.name).randrange(1 << 30)
    seen = Search(setting, states=120, at_most=150, seed=seed).run()

    assert seen.states >= 120
    assert seen.levels[1] > 0


def test_where_there_are_too_few_states_there_is_one_more_crash() -> None:
    """So many distinct states as were asked for, however short the story."""
    seen = visit(Setting(saved_once), 240, 1)

    assert seen.states >= 240
    assert [level for level, states in seen.levels.items() if states] == [0, 1]


def test_what_rots_is_walked_back_from() -> None:
    """Every state of one story, each also with a changed bit in its newest ckpt."""
    seen = Search(Setting(one_after_the_other, rots=True), states=0, depth=1).run()

    assert seen.walked_back > 50


# The search finds what is lost.


@pytest.mark.slow
def test_a_disk_that_ignores_syncs_loses_what_was_promised() -> None:
    """The search's own test: without syncs no protocol can keep its promises."""
    with patch.object(disk, "PRODUCT", 4), pytest.raises((Broken, MigratorError)):
        Search(Setting(one_after_the_other, machine=that_does_not_sync), states=0).run()


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _renamed(aside: Path, target: Path) -> None:
    disk.KERNEL.rename(aside, target)


def _parts_first(of: PosixStorage, name: str) -> None:
    for part in of.list(name):
        if part != MANIFEST:
            of.delete(f"{name}/{part}")
    of.delete_all(name)


def _directories_only(kernel: Kernel, fd: int) -> None:
    node, _ = kernel._node(fd)
    if isinstance(node, Directory):
        node.before = {}


def _put_and_hope(of: ObjectStorage, key: str, data: bytes) -> None:
    """Another writer may have the name, and the answer may be lost."""
    with suppress(StorageTransientError):
        of.client.put(key, data)


def _put_once_or_be_glad(of: ObjectStorage, key: str, data: bytes) -> None:
    """A name that is taken is taken for one's own."""
    with suppress(StorageExistsError):
        of.client.put(key, data, absent=True)


def _acknowledged_unseen(of: ObjectStorage, key: str, data: bytes) -> None:
    """No answer counts as a good one."""
    with suppress(StorageTransientError):
        of.client.put(key, data, absent=True)


def _looks_only_before(of: ObjectStorage, name: str, data: bytes, *, exclusive: bool, check: Any = _nothing) -> None:
    check()
    _REAL_PUT(of, name, data, exclusive=exclusive)


@contextmanager
def _no_claim(of: ObjectStorage, key: str) -> Iterator[None]:
    """It looks for the name, and for no other writer."""
    if of.client.head(key) is not None:
        raise StorageExistsError(key)
    of.client.put(f"{key}.unused", b"")
    of.client.delete(f"{key}.unused")
    yield


@contextmanager
def _claim_that_does_not_look(of: ObjectStorage, key: str) -> Iterator[None]:
    """It writes its claim, and yields to nobody."""
    directory, _, name = key.rpartition("/")
    claim = f"{directory}/.{name}.0123456789ab.claim"
    of.client.put(claim, b"")
    try:
        yield
    finally:
        of.client.delete(claim)


_REAL_PUT = ObjectStorage.put


def _fails(story: Callable[..., None], machine: Callable[[], Any], seeds: int = 1) -> Setting:
    return Setting(story, machine=machine, seeds=seeds, fails=True)


ONE, OVERLAP = Setting(one_after_the_other), Setting(overlapping, keep=1, seeds=8)


def _unverified(file: Reader, record: PartRecord, index: int, buffers: list[memoryview]) -> bool:
    file.read(buffers, index * BLOCK)
    return True


BREAKAGES: dict[str, tuple[Setting, Callable[[], Any]]] = {
    "names are not synced": (ONE, lambda: patch.object(PosixStorage, "_sync", _nothing)),
    "bytes are not synced": (ONE, lambda: patch.object(Kernel, "fsync", _directories_only)),
    "a commit replaces": (Setting(begun_twice, seeds=8), lambda: patch.object(posix_calls, "link", _renamed)),
    "parts are deleted before the manifest": (ONE, lambda: patch.object(retention, "_delete", _parts_first)),
    "digests are not compared": (
        Setting(one_after_the_other, rots=True),
        lambda: patch("migrator.ckpt.tensor_file._read_block", _unverified),
    ),
    "nothing is swept": (ONE, lambda: patch.object(retention, "_sweep", _nothing)),
    "nobody is fenced": (OVERLAP, lambda: patch.object(retention, "_is_fenced", lambda of, generation: False)),
    "where the job lies is not made durable": (
        Setting(saved_once),
        lambda: patch.object(PosixStorage, "_sync_above", _nothing),
    ),
    "what was loaded is not made durable": (
        Setting(saved_once),
        lambda: patch("migrator.session.restore.make_durable", _nothing),
    ),
    "uploads of dead writers are not swept": (
        Setting(killed_while_leaving, machine=object_store),
        lambda: patch.object(ObjectStorage, "leftovers", lambda of, directory="": []),
    ),
    "an unanswered commit counts as one": (
        _fails(saved_once, object_store),
        lambda: patch.object(ObjectStorage, "_put_once", _acknowledged_unseen),
    ),
    "a name that is taken is taken for one's own": (
        _fails(begun_twice, object_store, 8),
        lambda: patch.object(ObjectStorage, "_put_once", _put_once_or_be_glad),
    ),
    "a name is taken over": (
        _fails(begun_twice, object_store, 8),
        lambda: patch.object(ObjectStorage, "_put_once", _put_and_hope),
    ),
    "conditions are not honoured, and nobody claims": (
        _fails(begun_twice, ignores_conditions, 8),
        lambda: patch.object(ObjectStorage, "_claimed", _no_claim),
    ),
    "conditions are refused, and nobody looks for other claims": (
        _fails(begun_twice, refuses_conditions, 8),
        lambda: patch.object(ObjectStorage, "_claimed", _claim_that_does_not_look),
    ),
    "conditions are ignored, and nobody finds out": (
        _fails(begun_twice, ignores_conditions, 8),
        lambda: patch.object(ObjectStorage, "_honours_conditions", lambda of: True),
    ),
    "a commit looks for its parts only before": (
        _fails(overlapping, object_store, 8),
        lambda: patch.object(ObjectStorage, "put", _looks_only_before),
    ),
    "nobody waits for who is leaving": (
        Setting(replaced_while_leaving, seeds=8),
        lambda: patch.object(leaving_mark, "wait_for_leaving", _nothing),
    ),
}


@pytest.mark.parametrize("what", chance.some("breakages", BREAKAGES, 0.5))
def test_the_search_finds_a_protocol_that(what: str) -> None:
    """The search's own tests: with a rule of the protocol left out it says what is lost."""
    setting, broken = BREAKAGES[what]
    with broken(), patch.object(disk, "PRODUCT", 64), pytest.raises((Broken, MigratorError)):
        Search(setting, states=5000).run()


def test_a_story_is_told_with_each_request_failing_in_each_way() -> None:
    """All of the shortest story: what is not done, done without an answer, or done late."""
    setting = Setting(saved_once, machine=object_store, fails=True)
    alone = Search(replace(setting, fails=False), states=0, depth=1).run()
    seen = Search(setting, states=10_000, depth=1).run()

    assert seen.untold == 0
    assert seen.told == 1 + len(faults(alone.calls, chance.dice("faults")))
    assert seen.states > 4 * alone.states


@pytest.mark.parametrize("machine", [object_store, ignores_conditions, refuses_conditions])
def test_what_was_given_up_acts_later_also_behind_a_crash(machine: Callable[[], ObjectStore]) -> None:
    """Before the request that it was to act before, or at the end."""
    for after in (2, None):
        store = machine()
        store.fault = Fault(0, Outcome.LATE, after)
        store.mount(lambda call, path: None)
        with pytest.raises(StorageTransientError):
            store.request("put", "job/late", b"1")
        left = store.killed()
        left.mount(lambda call, path: None)
        left.request("put", "job/first", b"2")
        assert "job/late" not in left.files()
        left.request("put", "job/second", b"3")
        assert ("job/late" in left.files()) is (after == 2)
        assert left.settle()
        assert left.files().keys() == {"job/late", "job/first", "job/second"}
        assert store.files() == {}


@pytest.mark.parametrize("setting", [ONE, Setting(killed_while_leaving), Setting(together, ranks=2), OVERLAP])
def test_no_state_is_missed_by_looking_before_syncs_only(setting: Setting) -> None:
    """What recoveries look at is the same as if images were taken before each single call."""
    few = {image.visible() for image in Search(setting, states=0).images()}
    with patch.object(Told, "takes_all", True):
        all_of_them = {image.visible() for image in Search(setting, states=0).images()}

    assert few == all_of_them
    assert len(few) > 10


# The disk, until it crashes.

_NAMES = ["a", "b", "d", "d/a", "d/b", "a/x"]
_CALLS = st.one_of(
    st.tuples(st.sampled_from(["create", "unlink", "mkdir", "rmdir", "listdir", "read"]), st.sampled_from(_NAMES)),
    st.tuples(st.just("link"), st.sampled_from(_NAMES), st.sampled_from(_NAMES)),
    # A file, onto a file or nothing: nothing else is ever renamed.
    st.tuples(st.just("rename"), st.sampled_from(["b", "d/b"]), st.sampled_from(["a", "d/a", "a/x"])),
)


def _answer(system: Any, root: str, call: tuple[str, ...]) -> Any:
    """What a call answers: a value, or the number of its error."""
    what, *paths = call[0], *(Path(f"{root}/{name}") for name in call[1:])
    try:
        if what == "create":
            fd = system.open(paths[0], O_NEW)
            system.pwritev(fd, [memoryview(call[1].encode())], 0)
            system.fsync(fd)
            system.close(fd)
        elif what == "read":
            fd = system.open(paths[0], os.O_RDONLY)
            is_file = stat.S_ISREG(system.fstat(fd).st_mode)
            data = system.read(fd, 100) if is_file else None
            system.close(fd)
            return data
        elif what == "listdir":
            return sorted(system.listdir(paths[0]))
        else:
            getattr(system, what)(*paths)
    except OSError as error:
        return error.errno
    return None


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.lists(_CALLS, max_size=12))
def test_until_it_crashes_the_disk_answers_as_a_real_one(calls: list[tuple[str, ...]]) -> None:
    """The same calls on both, the same answers: values, errors, names and bytes."""
    kernel = Kernel()
    kernel.mount(Disk(), lambda call, path: None)
    with tempfile.TemporaryDirectory() as real:
        for call in [("mkdir", "d"), *calls, ("listdir", "d")]:
            assert _answer(kernel, "", call) == _answer(os, real, call), call


# The disk, when it crashes.


class Machine:
    """A disk, and a process on it."""

    def __init__(self) -> None:
        self.disk = Disk()
        self.kernel = Kernel()
        self.kernel.mount(self.disk, lambda call, path: None)

    def create(self, name: str, data: bytes = b"", *, syncs: bool = True) -> None:
        fd = self.kernel.open(Path(name), O_NEW)
        self.kernel.pwritev(fd, [memoryview(data)], 0)
        if syncs:
            self.kernel.fsync(fd)

    def sync(self, directory: str = "") -> None:
        self.kernel.fsync(self.kernel.open(Path(f"/{directory}"), os.O_RDONLY | os.O_DIRECTORY))

    def left(self) -> set[tuple[tuple[str, bytes], ...]]:
        """What a crash may leave."""
        return {tuple(sorted(image.files().items())) for image in self.disk.images()}


def _of(*names: str) -> tuple[tuple[str, bytes], ...]:
    return tuple((name, b"") for name in names)


def test_names_that_were_not_synced_are_there_or_not_each_for_itself() -> None:
    """Of two new files all four combinations; after a sync of the directory only one."""
    machine = Machine()
    machine.create("/a")
    machine.create("/b")
    assert machine.left() == {_of(), _of("a"), _of("b"), _of("a", "b")}
    machine.sync()
    assert machine.left() == {_of("a", "b")}


def test_a_rename_that_was_not_synced_may_leave_both_names_or_none() -> None:
    """No order is kept, not even that of one call."""
    machine = Machine()
    machine.create("/a")
    machine.sync()
    machine.kernel.rename(Path("/a"), Path("/b"))
    assert machine.left() == {_of("a"), _of("b"), _of("a", "b"), _of()}


def test_what_was_replaced_or_removed_may_come_back() -> None:
    """A rename over a file, and an unlink, are undone as long as nobody synced."""
    machine = Machine()
    machine.create("/a", b"old")
    machine.create("/b", b"new")
    machine.sync()
    machine.kernel.rename(Path("/b"), Path("/a"))
    assert (("a", b"old"), ("b", b"new")) in machine.left()
    assert (("a", b"old"),) in machine.left()
    machine.sync()
    machine.kernel.unlink(Path("/a"))
    assert machine.left() == {(), (("a", b"new"),)}


def test_what_lies_in_a_directory_that_is_lost_is_lost() -> None:
    """A synced directory whose own name was not."""
    machine = Machine()
    machine.kernel.mkdir(Path("/d"))
    machine.create("/d/a")
    machine.sync("d")
    assert machine.left() == {(), _of("d/a")}


def test_bytes_that_were_not_synced_are_there_sector_by_sector() -> None:
    """Two sectors: each alone, both, none, nothing at all, half, all but the last byte."""
    machine = Machine()
    data = b"x" * SECTOR + b"y" * SECTOR
    machine.create("/a", data, syncs=False)
    machine.sync()
    zeros = bytes(SECTOR)
    expected = [data, b"", data[:SECTOR], data[:-1], bytes(2 * SECTOR), data[:SECTOR] + zeros, zeros + data[SECTOR:]]
    assert machine.left() == {(("a", found),) for found in expected}


def test_a_kill_without_a_power_cut_is_one_of_the_images() -> None:
    """Nothing is lost, in one of them, whatever was done before."""
    machine = Machine()
    machine.kernel.mkdir(Path("/d"))
    machine.create("/d/a", b"1", syncs=False)
    machine.create("/d/b", b"2")
    machine.kernel.rename(Path("/d/a"), Path("/d/c"))
    machine.kernel.unlink(Path("/d/b"))
    assert tuple(sorted(machine.disk.files().items())) in machine.left()
