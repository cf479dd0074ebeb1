"""More ranks than fit here, as threads: who says what, who reads it, and who does what one has to do for all."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from migrator.ranks import peers as peers_module
from migrator.ranks.peers import Peers
from migrator.ranks.protocol import Line
from migrator.ranks.timing import Timing
from migrator.save.group import last_save, view
from migrator.save.group.joint_save import JointSave
from migrator.save.group.orders import order
from migrator.save.group.view import GroupView
from migrator.save.results import GivenUp
from tests.support import rank_threads
from tests.support.harness import until
from tests.support.rank_threads import OneRank


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks are many."""
    monkeypatch.setattr(peers_module, "FEW", 2)
    monkeypatch.setattr(view, "FEW", 2)
    monkeypatch.setattr(last_save, "LOOK_S", 0.1)


Make = Callable[[int], list[Peers]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Ranks that do nothing by themselves."""
    server, made = rank_threads.served(), []

    def some(size: int) -> list[Peers]:
        for rank in range(size):
            waiting = rank_threads.connected(server.port)
            made.append(Peers(rank, size, "n", rank_threads.connected(server.port), waiting=waiting))
            made[-1].start()
        return made

    yield some
    for one in reversed(made):
        one.close()


Start = Callable[[int], list[OneRank]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Ranks that leave when one of them has a notice."""
    server, made = rank_threads.served(), []

    def some(size: int) -> list[OneRank]:
        made.extend(OneRank(rank, size, server.port, tmp_path) for rank in range(size))
        return made

    yield some
    for one in reversed(made):
        one.close()


def test_a_topic_that_is_followed_again_has_to_be_read_again(start: Start) -> None:
    """Reports may have come in between, and a rank that decides without them leaves others behind."""
    server = rank_threads.served()
    one = Peers(0, 1, "n", rank_threads.connected(server.port), waiting=rank_threads.connected(server.port))

    def exchange() -> None:  # as its thread does, which is not started here
        one._take_in([], [], [], read=one._exchange([], [], []))

    one.follow("leave")
    assert not one.has_read("leave")
    exchange()
    assert one.has_read("leave")
    one.unfollow("leave")
    one.follow("leave")
    assert not one.has_read("leave")
    exchange()
    assert one.has_read("leave")


def test_what_was_read_with_a_line_is_there_when_the_line_counts_as_sent(make: Make) -> None:
    """Likewise for a call: what it was asked for may have been said by another rank a moment before."""
    sender, other = make(2)
    for number in range(200):
        other.post(Line("heard", 1, ballot=number))
        sender.call(lambda _: True)
        assert sender.known.lines[-1].ballot == number
        other.post(Line("heard", 1, ballot=-number))
        sender.post(Line("own", 0))
        assert any(line.ballot == -number for line in sender.known.lines[-2:])


def test_a_crowd_leaves_together(start: Start, tmp_path: Path, many: None) -> None:
    """The notice of the last one reaches all, one decides, one commits."""
    crew = start(40)
    crew[-1].peers.tell_notice(time.monotonic() + 30)
    until(lambda: all(one.done_s for one in crew), "all have left")

    assert [one.failure for one in crew] == [""] * 40
    assert (tmp_path / "manifest").read_text() == "0"
    readers = [one.peers.rank for one in crew if len(one.peers.known.reaches(0)) > 1]
    assert readers == [0], "only who decides reads what the others report"
    decisions = [one.peers.known.decision(0) for one in crew]
    assert all(decision is not None and decision.members == tuple(range(40)) for decision in decisions)


@pytest.mark.slow
def test_where_the_first_is_gone_the_next_stands_in(start: Start, tmp_path: Path, many: None) -> None:
    """Nobody hears a word from rank 0."""
    crew = start(6)
    crew[0].close()
    for one in crew[1:]:
        one.tell(10.0)
    crew[3].peers.tell_notice(time.monotonic() + 10)
    until(lambda: all(one.done_s for one in crew[1:]), "the others have left")

    assert [one.failure for one in crew[1:]] == [""] * 5
    assert (tmp_path / "manifest").read_text() == "1"


def test_one_says_it_for_all(make: Make) -> None:
    """A node pool is drained: every rank has the notice in the same second, and one line is enough."""
    crew = make(8)
    deadline_s = time.monotonic() + 30
    for one in crew:
        one.tell_notice(deadline_s)
    until(lambda: all(one.lines("notice") for one in crew), "all have the notice")
    for one in crew:
        one.call(lambda store: True)

    assert max(len(one.lines("notice")) for one in crew) <= 2  # 29.99 and 30.00 s are not the same second


def test_an_earlier_deadline_is_notice_again(make: Make) -> None:
    crew = make(3)
    crew[0].tell_notice(time.monotonic() + 120)
    until(lambda: crew[2].lines("notice"), "the first notice")
    crew[1].tell_notice(time.monotonic() + 6)
    until(lambda: len(crew[2].lines("notice")) == 2, "the second notice")

    assert json.loads(crew[2].lines("notice")[1].info)["grace_left_s"] < 7


def test_what_was_claimed_and_never_said_is_said(make: Make) -> None:
    """The rank that was to say it for all died before."""
    crew = make(2)
    crew[0].call(lambda store: store.add(crew[0].key("said/order/5.0"), 1))
    crew[1].post(order((5, 0), 1))

    until(lambda: crew[0].lines("order"), "the order")
    assert crew[0].lines("order")[0].rank == 1


def test_a_line_without_its_ring_is_found(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writer died before it rang; and the next ring is heard all the same."""
    crew = make(2)
    crew[0].call(lambda store: crew[0]._log_of("").post(Line("order", 0, point=(3, 0)).to_text()))
    crew[0].call(lambda store: store.add(crew[0].key("bell/count"), 1))

    until(lambda: crew[1].lines("order"), "the look without a ring")
    monkeypatch.setattr(peers_module, "_UNHEARD_S", 0.0)
    until(lambda: crew[1]._bell is not None and crew[1]._bell.number > 1, "the bell goes on")
    monkeypatch.setattr(type(crew[1].timing), "idle_look_s", property(lambda timing: 60.0))
    crew[0].post(order((4, 0), 0))
    until(lambda: len(crew[1].lines("order")) == 2, "the ring")


@pytest.mark.slow
def test_a_store_that_does_not_answer_says_nothing_of_the_ranks(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the store is silent, a rank that shows no sign of life is not called lost."""
    crew = make(3)
    for one in crew:
        one.hurry()
    assert crew[0].is_alive_there(1)
    monkeypatch.setattr(type(crew[0].timing), "stale_s", property(lambda timing: 0.8))
    until(lambda: crew[0].advanced_there(1) == 0 and crew[0]._liveness._beating == {1}, "a beat of rank 1")
    crew[0].call(lambda store: time.sleep(1.5))

    assert crew[0].is_alive_there(1)
    crew[1].close()
    until(lambda: not crew[0].is_alive_there(1), "rank 1 shows no sign of life")


def test_whoever_goes_on_shows_it(make: Make) -> None:
    crew = make(2)
    for one in crew:
        one.hurry()
    before = crew[0].advanced_there(1)
    crew[1].advanced += 3

    until(lambda: crew[0].advanced_there(1) == before + 3, "it is seen")


def joint_save(ranks: Peers, leaving: Any) -> JointSave:
    context: Any = SimpleNamespace(gate=rank_threads.Gate())
    others: Any = dict.fromkeys(("orders", "commits", "warnings", "changed_objects"))
    return JointSave(context, ranks, leaving, **others)


def test_a_store_that_hangs_at_a_commit_holds_up_no_leaving(make: Make) -> None:
    """Rank 0 asks how a periodic save ends, gets no answer, and then has to leave."""
    (rank,) = make(1)
    leaving = SimpleNamespace(notice=None)
    side = joint_save(rank, leaving)
    rank.later(lambda store: time.sleep(3.0))
    threading.Timer(0.2, lambda: setattr(leaving, "notice", object())).start()
    start_s = time.monotonic()
    with pytest.raises(GivenUp):
        side.decide_end((9, 0), "commit")

    assert time.monotonic() - start_s < 2.0


def test_how_a_save_ends_is_said_once(make: Make) -> None:
    """Rank 1 gives it up in the moment in which rank 0 commits it: one of the two is told that it is too late."""
    sides = [joint_save(one, SimpleNamespace(notice=None)) for one in make(2)]

    assert [sides[0].decide_end((9, 0), "commit"), sides[1].decide_end((9, 0), "missed")] == ["commit", "commit"]
    assert [sides[1].decide_end((10, 0), "missed"), sides[0].decide_end((10, 0), "commit")] == ["missed", "missed"]


class Between:
    """A connection that calls a function after the shared log was read, and before anything else is read."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.then: Callable[[], object] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def add(self, key: str, number: int) -> Any:
        found = self._store.add(key, number)
        if key.endswith("/log/count") and number == 0 and self.then is not None:
            then, self.then = self.then, None
            then()
        return found


def test_an_answer_that_arrives_with_the_end_of_its_rank_is_not_missed() -> None:
    """Rank 1 answers and ends while rank 0 is between reading the shared log and reading the reports."""
    server = rank_threads.served()
    wire = Between(rank_threads.connected(server.port))
    first = Peers(0, 2, "n", wire)
    second = Peers(1, 2, "n", rank_threads.connected(server.port))
    has_ended = threading.Event()

    def answer_and_end() -> None:
        second.post(Line("hello", 1, info="7"), timeout_s=5.0)
        second.post(Line("bye", 1), timeout_s=5.0)
        has_ended.set()

    for one in (first, second):
        one.start()
    try:
        wire.then = answer_and_end
        first.call(lambda store: True)
        assert has_ended.is_set()
        assert first.gather("hello", "each rank has to answer", of={1}) == {1: 7}
    finally:
        for one in (first, second):
            one.close()


class Breaks:
    """A connection that breaks behind the next call of one kind."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.behind = ""

    def __getattr__(self, name: str) -> Any:
        if self._store is None:
            raise RuntimeError("Connection reset by peer")
        method = getattr(self._store, name)

        def call(*args: Any) -> Any:
            found = method(*args)
            if name == self.behind:
                self.behind = ""
                self._store = None
            return found

        return call


class EndsLate:
    """A connection whose errors take their time, as the stack trace in them does on a busy machine."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*args: Any) -> Any:
            try:
                return method(*args)
            except RuntimeError:
                time.sleep(0.3)
                raise

        return call


@pytest.mark.parametrize("is_noticed", [True, False])
def test_no_thread_is_left_in_a_call_to_a_store_that_has_ended(is_noticed: bool) -> None:
    """It would come back while the interpreter ends, and that crashes: the exit code would be 134."""
    server = rank_threads.served()
    waiting = EndsLate(rank_threads.connected(server.port))
    one = Peers(1, 2, "n", rank_threads.connected(server.port), waiting=waiting)
    one.start()
    bell = one._bell
    assert bell is not None
    until(lambda: one.has_read("leave"), "the first look")
    del server
    if is_noticed:
        one.post(Line("hello", 1), timeout_s=0)
        until(lambda: one.is_disconnected, "the end of the store")

    one.close()

    assert not one.is_alive()
    assert not bell.is_alive()


@pytest.fixture
def broken() -> Iterator[tuple[Peers, Peers, Breaks]]:
    """Two ranks; the second one's connection can break, and is made again."""
    server = rank_threads.served()
    first = Peers(0, 2, "n", rank_threads.connected(server.port), waiting=rank_threads.connected(server.port))
    wire = Breaks(rank_threads.connected(server.port))

    def connect(timeout_s: float) -> tuple[Any, Any]:
        return rank_threads.connected(server.port), rank_threads.connected(server.port)

    second = Peers(1, 2, "n", wire, waiting=rank_threads.connected(server.port), connect=connect)
    for one in (first, second):
        one.start()
    yield first, second, wire
    for one in (second, first):
        one.close()


def test_a_line_that_was_fetched_as_the_connection_broke_is_not_lost(
    broken: tuple[Peers, Peers, Breaks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notice above all: nothing is fetched twice."""
    first, second, wire = broken
    # A beat after each look: the exchange that fetches the line fails before it ends.
    monkeypatch.setattr(type(second.timing), "beat_s", property(lambda timing: 0.0))
    second.hurry()
    heard: list[Line] = []
    second.listen(heard.extend)
    wire.behind = "multi_get"
    first.tell_notice(time.monotonic() + 30)

    until(lambda: [line.what for line in heard] == ["notice"], "the notice")
    assert second.lines("notice")


def test_the_bell_is_heard_where_only_the_other_connection_broke(broken: tuple[Peers, Peers, Breaks]) -> None:
    """Its number is not passed over, and its ring is heard."""
    first, second, wire = broken
    wire.behind = "add"
    first.post(order((1, 0), 0))
    until(lambda: second.lines("order"), "the first line")
    until(lambda: not second.is_disconnected, "the new connection")
    rung: list[float] = []
    bell_rung = second._rung
    assert second._bell is not None
    second._bell._on_ring = lambda: (rung.append(time.monotonic()), bell_rung())[1]
    for step in range(2, 5):
        first.post(order((step, 0), 0))
        until(lambda step=step: len(second.lines("order")) == step, "the next line")

    until(lambda: len(rung) == 3, "a ring for each line")


def test_where_the_store_is_gone_others_than_the_first_collect(many: None) -> None:
    """What was shared is on storage, and no report will ever be read."""
    side: Any = object.__new__(GroupView)
    ranks = SimpleNamespace(rank=3, size=20, timing=Timing(20), store_is_unreachable=True)
    ranks.follow, ranks.has_read = (lambda _: None), (lambda _: False)
    side.__dict__.update(_ranks=ranks, _attempt=SimpleNamespace(position=3), _since={"shared": time.monotonic() - 5})

    assert side._collects()
    ranks.store_is_unreachable = False
    assert not side._collects()
