"""The last save: tried again while storage may come back, left to other ranks where this one cannot write."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from migrator.errors import SaveFailed, StorageError, StorageReadOnlyError, StorageTransientError
from migrator.leaving.leaving import Outcome
from migrator.loop.gate import Phase
from migrator.save import engine
from migrator.save.engine import Saver
from migrator.save.results import NothingToSave, Saved

SAVED = Saved("000001-000000000007", 7, 100, 0.1)
PASSES = StorageTransientError("it hangs", errno=errno.EIO)
STAYS = StorageReadOnlyError("the volume cannot be written", errno=errno.EROFS)
NOTHING = Outcome(False, "nothing to save")


class Strategy:
    """Gives what the test says, one after the other."""

    def __init__(self, *results: Saved | Exception, has_others: bool = False) -> None:
        self._results = list(results)
        self._has_others = has_others
        self.failures: list[StorageError | None] = []
        self.left: list[StorageError] = []

    def save_last(self, failure: StorageError | None) -> Saved:
        self.failures.append(failure)
        result = self._results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    def leave_to_others(self, failure: StorageError) -> bool:
        self.left.append(failure)
        return self._has_others


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long it slept, which takes no time here."""
    found: list[float] = []
    monkeypatch.setattr(engine, "time", SimpleNamespace(sleep=found.append))
    return found


def saver(strategy: Strategy, **leaving: Any) -> Saver:
    ckpts = SimpleNamespace(newest=None, name_of_newest="none", look_for_later=lambda saved: None)
    shared: Any = SimpleNamespace(
        context=None,
        leaving=SimpleNamespace(**leaving),
        cond=None,
        schedule=None,
        ckpts=ckpts,
        speed=None,
        cost=None,
        attempts=SimpleNamespace(end=lambda: None),
        memory=None,
        reply=SimpleNamespace(for_hook=None),
        measure=None,
    )
    return Saver(shared, strategy, lambda: NOTHING)  # type: ignore[arg-type]


def last_save(strategy: Strategy, *, left_s: float = 30.0) -> Outcome:
    return saver(strategy, left_s=left_s)._last_save()


def test_the_errors_of_these_tests_are_of_both_kinds() -> None:
    """One may pass, the other one stays."""
    assert (PASSES.transient, STAYS.transient) == (True, False)


def test_storage_that_comes_back_is_tried_again(pauses: list[float]) -> None:
    """Each pause is twice as long as the one before, up to four seconds."""
    outcome = last_save(Strategy(*[PASSES] * 6, SAVED))

    assert (outcome.is_safe, outcome.ckpt) == (True, SAVED.ckpt)
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 4.0]


def test_what_does_not_pass_is_not_tried_again(pauses: list[float]) -> None:
    """A job of one process says at once why nothing was saved."""
    strategy = Strategy(STAYS)
    outcome = last_save(strategy)

    assert (outcome.is_safe, pauses, strategy.failures) == (False, [], [None])
    assert "the volume cannot be written" in outcome.why


def test_no_try_begins_for_which_no_time_is_left(pauses: list[float]) -> None:
    assert not last_save(Strategy(PASSES), left_s=0.1).is_safe
    assert pauses == []


def test_a_rank_that_cannot_write_waits_for_the_others(pauses: list[float]) -> None:
    """They may still commit; the strategy is asked again, and knows that this rank writes no more."""
    strategy = Strategy(STAYS, SAVED, has_others=True)
    outcome = last_save(strategy)

    assert outcome.is_safe
    assert (strategy.failures, strategy.left, pauses) == ([None, STAYS], [STAYS], [])


@pytest.mark.parametrize("second", [STAYS, PASSES])
def test_where_the_others_cannot_either_it_ends(pauses: list[float], second: StorageError) -> None:
    """Whatever the second error is, there is no third try."""
    strategy = Strategy(STAYS, second, has_others=True)

    assert not last_save(strategy).is_safe
    assert (len(strategy.failures), pauses) == (2, [])


def test_any_other_error_reaches_the_hook(pauses: list[float]) -> None:
    """A bug of ours too: the answer has to name it."""
    assert last_save(Strategy(SaveFailed("no safe point"))).why.startswith("no safe point (the ckpt before")
    assert "ZeroDivisionError" in last_save(Strategy(ZeroDivisionError())).why


def test_nothing_trained_is_explained(pauses: list[float]) -> None:
    assert last_save(Strategy(NothingToSave())) is NOTHING


def test_what_goes_wrong_after_a_commit_is_no_failed_save(caplog: pytest.LogCaptureFixture) -> None:
    """The ckpt exists, and the caller that asked for it gets it."""
    ends: list[tuple[Saved | None, Exception | None]] = []

    def fails(saved: Saved) -> None:
        raise ValueError("a bug behind the commit")

    strategy: Any = SimpleNamespace(
        begin=lambda: True, save=lambda: SAVED, retire=lambda: None, end=lambda *how: ends.append(how)
    )
    shared: Any = SimpleNamespace(
        context=SimpleNamespace(rank=0),
        leaving=None,
        cond=None,
        schedule=None,
        ckpts=SimpleNamespace(newest=None, look_for_later=lambda saved: None),
        speed=SimpleNamespace(note=fails, warn_if_too_long=lambda saved: None),
        cost=SimpleNamespace(begin=lambda: None),
        attempts=SimpleNamespace(prepare=lambda: None, end=lambda: None),
        memory=None,
        reply=SimpleNamespace(for_hook=None),
        measure=None,
    )
    Saver(shared, strategy, lambda: NOTHING)._save_and_go_on()

    assert ends == [(SAVED, None)]
    assert "storage_warning" in caplog.text
    assert "a bug behind the commit" in caplog.text


@pytest.fixture
def usual_s() -> Iterator[float]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(0.004)  # read back as it was set
    yield sys.getswitchinterval()
    sys.setswitchinterval(before_s)


@pytest.mark.parametrize(("notice", "at_most_s"), [(None, 0.0006), ("it must leave", 0.00006)])
def test_a_busy_thread_gives_way_while_a_save_works(usual_s: float, notice: str | None, at_most_s: float) -> None:
    """And behind it everything is as before, also if the script has set another interval meanwhile."""
    works = saver(Strategy(), notice=notice)
    for before_s in (usual_s, 0.002):
        sys.setswitchinterval(before_s)
        with works._working():
            assert sys.getswitchinterval() < at_most_s
        assert sys.getswitchinterval() == pytest.approx(before_s)


def test_a_script_that_switches_sooner_may_do_so(usual_s: float) -> None:
    """It is only ever made shorter."""
    sys.setswitchinterval(0.00001)
    with saver(Strategy(), notice=None)._working():
        assert sys.getswitchinterval() == pytest.approx(0.00001)


def test_a_notice_in_the_midst_of_a_save_is_not_slowed_down_by_its_end(usual_s: float) -> None:
    """What follows is the last save, which ends the hurry."""
    works = saver(Strategy(), notice=None)
    with works._working():
        works._leaving.notice = "it must leave"  # type: ignore[assignment]
        works._switch_interval.shorten(engine._LEAVING_SWITCH_S)
    assert sys.getswitchinterval() < 0.00006
    with works._working():
        pass
    assert sys.getswitchinterval() == usual_s


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("is_periodic", [False, True])
def test_what_is_prepared_can_not_end_the_saving_thread(
    caplog: pytest.LogCaptureFixture, fails: bool, writes: bool, is_periodic: bool
) -> None:
    """It makes the first save quicker, and says what periodic ones copy. It is done once, behind the first step."""
    expected: list[int] = []
    copied: list[int] = []

    def expect(size: int) -> None:
        expected.append(size)
        if fails:
            raise ValueError("a bug")

    gate = SimpleNamespace(capture=None, phase=Phase.FRESH)
    works = saver(Strategy())
    context: Any = SimpleNamespace(
        gate=gate,
        writes=writes,
        storage=SimpleNamespace(expect=expect),
        capturer=SimpleNamespace(live=lambda capture: [SimpleNamespace(nbytes=3), SimpleNamespace(nbytes=4)]),
    )
    works._context = context
    attempts: Any = SimpleNamespace(expect_copies=lambda tensors: copied.append(len(tensors)))
    schedule: Any = SimpleNamespace(is_on=is_periodic)
    works._attempts, works._schedule = attempts, schedule
    assert not works._is_unprepared
    gate.capture, gate.phase = object(), Phase.CLEAN
    assert works._is_unprepared
    works._prepare()
    assert not works._is_unprepared
    assert expected == [7] * writes
    assert copied == [2] * is_periodic
    assert ("a bug" in caplog.text) is (fails and writes)
