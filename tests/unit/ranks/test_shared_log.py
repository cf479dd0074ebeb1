"""The shared log: all read the same lines in the same order, each of them once, whoever dies in the middle."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from migrator.ranks import bell, shared_log
from migrator.ranks.shared_log import SharedLog
from tests.support import rank_threads


class Store:
    """What SharedLog needs of a TCPStore, without the network; `before` runs between a writer's two calls."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}
        self.calls = 0
        self.fetched = 0
        self.before: Callable[[], None] | None = None

    def add(self, key: str, by: int) -> int:
        self.calls += 1
        self.keys[key] = str(int(self.keys.get(key, b"0")) + by).encode()
        return int(self.keys[key])

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self.calls += 1
        if self.before is not None:
            before, self.before = self.before, None
            before()
        if self.keys.get(key, b"") == expected.encode():
            self.keys[key] = value.encode()
        return self.keys[key]

    def check(self, keys: list[str]) -> bool:
        self.calls += 1
        return all(key in self.keys for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.calls += 1
        self.fetched += len(keys)
        return [self.keys[key] for key in keys]

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def set(self, key: str, value: str) -> None:
        self.calls += 1
        self.keys[key] = value.encode()

    def delete_key(self, key: str) -> bool:
        self.calls += 1
        return self.keys.pop(key, None) is not None


@pytest.fixture
def store() -> Store:
    return Store()


def test_each_line_is_fetched_once(store: Store) -> None:
    writer, reader = SharedLog(store, "log"), SharedLog(store, "log")
    for i in range(600):
        writer.post(f"line {i}")
    assert reader.read() == [f"line {i}" for i in range(600)]
    assert (store.fetched, reader.read(), store.fetched) == (600, [], 600)

    writer.post("one more")
    assert (reader.read(), store.fetched) == (["one more"], 601)


def test_an_idle_look_is_one_call(store: Store) -> None:
    reader = SharedLog(store, "log")
    SharedLog(store, "log").post("a")
    reader.read()
    before = store.calls
    reader.read()

    assert store.calls == before + 1


def test_a_writer_that_died_between_number_and_line_holds_up_nobody(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(shared_log.time, "monotonic", lambda: now[0])
    readers = [SharedLog(store, "log") for _ in range(2)]
    SharedLog(store, "log").post("before")
    store.add("log/count", 1)  # and it died
    SharedLog(store, "log").post("behind")

    assert [reader.read() for reader in readers] == [["before"], ["before"]]
    now[0] += shared_log.HOLE_S
    assert [reader.read() for reader in readers] == [["behind"], ["behind"]]


def test_a_writer_that_comes_late_takes_another_number(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first one was closed, and whoever closed it has read on: there nobody may find a line any more."""
    monkeypatch.setattr(shared_log, "HOLE_S", 0.0)
    early, late = SharedLog(store, "log"), SharedLog(store, "log")
    seen: list[list[str]] = []
    store.before = lambda: seen.append(early.read())
    late.post("late")

    assert seen == [[]]
    assert early.read() == SharedLog(store, "log").read() == ["late"]


def test_a_hole_among_many_costs_few_calls(store: Store) -> None:
    """While a thousand ranks report there always is one that has its number and not yet its line."""
    writer, reader = SharedLog(store, "log"), SharedLog(store, "log")
    for i in range(200):
        writer.post(str(i))
    store.add("log/count", 1)
    for i in range(50):
        writer.post(str(i))
    before = store.calls
    read = []
    while fresh := reader.read():
        read += fresh

    assert len(read) == 200
    assert store.calls - before < 60


def test_old_lines_go_and_a_late_reader_goes_on_behind_them(store: Store) -> None:
    writer, late = SharedLog(store, "log"), SharedLog(store, "log")
    writer.post("first")
    late.read()
    sizes = []
    for i in range(500):
        writer.post(str(i))
        writer.read()
        writer.trim(10)
        sizes.append(len(store.keys))

    assert max(sizes) < 16
    assert late.read() == [str(i) for i in range(490, 500)]


actions = st.lists(st.tuples(st.sampled_from(["post", "die", "late", "read", "trim"]), st.integers(0, 2)), max_size=60)


@settings(max_examples=200, deadline=None)
@given(actions=actions)
def test_all_read_the_same_in_the_same_order(actions: list[tuple[str, int]]) -> None:
    """Whoever writes, dies, is late or reads, in any order."""
    store, written = Store(), 0
    logs = [SharedLog(store, "log") for _ in range(3)]
    read: list[list[str]] = [[], [], []]
    posted: set[str] = set()

    def look(i: int) -> None:
        read[i] += logs[i].read()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_log, "HOLE_S", 0.0)
        for what, i in actions:
            written += 1
            if what == "read":
                look(i)
            elif what == "die":
                store.add("log/count", 1)
            elif what == "trim":
                # Only what all have read: that is what whoever calls it has to know.
                for j in range(3):
                    look(j)
                logs[i].trim(5)
            else:
                if what == "late":
                    store.before = lambda i=i: look((i + 1) % 3)  # type: ignore[misc]
                logs[i].post(f"{i} {written}")
                posted.add(f"{i} {written}")
        for i in range(3):
            look(i)

    assert read[0] == read[1] == read[2]
    assert set(read[0]) == posted
    assert len(read[0]) == len(posted)


def test_many_writers_at_once_in_a_real_store() -> None:
    server = rank_threads.served()
    logs = [SharedLog(rank_threads.connected(server.port), "log") for _ in range(6)]
    read: list[list[str]] = [[] for _ in logs]
    done = threading.Barrier(len(logs))

    def work(i: int) -> None:
        for k in range(40):
            logs[i].post(f"{i} {k}")
            read[i] += logs[i].read()
        done.wait()
        while fresh := logs[i].read():
            read[i] += fresh

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(logs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert all(one == read[0] for one in read)
    assert sorted(read[0]) == sorted(f"{i} {k}" for i in range(6) for k in range(40))


# The bell.


class Rings:
    """A bell, and how often it was heard."""

    def __init__(self, store: Any, rank: int) -> None:
        self.count = 0
        self._cond = threading.Condition()
        self.bell = bell.Bell(store, "bell", rank, self._heard)
        self.bell.start()

    def _heard(self) -> None:
        with self._cond:
            self.count += 1
            self._cond.notify_all()

    def wait(self, count: int) -> bool:
        with self._cond:
            return self._cond.wait_for(lambda: self.count >= count, 10)


def test_a_ring_is_heard_by_all_and_leaves_nothing_behind() -> None:
    server = rank_threads.served()
    caller = rank_threads.connected(server.port)
    all_of_them = [Rings(rank_threads.connected(server.port), rank) for rank in range(3)]
    for _ in range(5):
        bell.ring(caller, "bell", 3)

    assert all(one.wait(5) for one in all_of_them)
    for one in all_of_them:
        one.bell.close(caller, 10.0)
    assert not any(one.bell.is_alive() for one in all_of_them)
    assert [one.count for one in all_of_them] == [5, 5, 5]
    assert [key for key in caller.list_keys() if key.startswith("/bell/") and key.count("/") > 2] == []  # type: ignore[attr-defined]


def test_a_number_whose_ring_never_comes_is_passed_over() -> None:
    server = rank_threads.served()
    caller = rank_threads.connected(server.port)
    one = Rings(rank_threads.connected(server.port), 0)
    caller.add("bell/count", 1)  # and whoever was about to ring died
    bell.ring(caller, "bell", 1)
    one.bell.nudge(caller)

    assert one.wait(2)
    one.bell.close(caller, 10.0)
