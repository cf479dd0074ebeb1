"""One round, with ranks that are threads: what is measured, and how it fails."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from migrator.nodecheck import measurement
from migrator.nodecheck.measurement import Failed, Measurement, Times, named


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of a round, made small."""
    monkeypatch.setitem(measurement._SIDE, "cpu", 64)
    monkeypatch.setitem(measurement._ELEMENTS, "cpu", 1000)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def one(store: Any, rank: int, group: tuple[int, ...], timeout_s: float = 20.0) -> Measurement:
    return Measurement(lambda: PrefixStore("g", store), rank, group, repeat=2, end_s=time.monotonic() + timeout_s)


def test_two_ranks_measure_both_parts() -> None:
    """Ranks of any numbers."""
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(one(store, rank, (3, 8)).run) for rank in (3, 8)]
        found = [call.result(30) for call in calls]

    assert all(times.matmul_s > 0 and times.allreduce_s > 0 for times in found)


def test_the_wait_for_a_slow_rank_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 3 takes a second for its matmul here. The all-reduce of both begins only then."""
    done = measurement._done

    def late(data: Any, left_s: Any) -> None:
        done(data, left_s)
        if left_s.__self__.doing == "matmul" and left_s.__self__._rank == 3:
            time.sleep(0.5)

    monkeypatch.setattr(measurement, "_done", late)
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        slow, fast = (call.result(30) for call in [pool.submit(one(store, rank, (3, 8)).run) for rank in (3, 8)])

    assert slow.matmul_s > 0.9
    assert fast.matmul_s + fast.allreduce_s + slow.allreduce_s < 0.5


def test_a_rank_alone_measures_the_matmul() -> None:
    """It needs no store."""

    def none() -> Any:
        raise AssertionError

    times = Measurement(none, 4, (4,), repeat=2, end_s=time.monotonic() + 20).run()

    assert times == Times(times.matmul_s, 0.0)
    assert times.matmul_s > 0


def test_who_does_not_come_is_waited_for_until_the_deadline() -> None:
    """The message says who it was, and in which part."""
    with pytest.raises(Failed, match="connect to rank 1: "):
        one(HashStore(), 0, (0, 1), timeout_s=0.5).run()


def test_a_wrong_sum_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that computes or sends wrong numbers is no good node. Rank 0 adds one too many here."""
    reduce = Measurement._reduce

    def wrong(self: Measurement, group: Any, data: Any) -> None:
        if self._rank == 0:
            data[-1] += 1
        reduce(self, group, data)

    monkeypatch.setattr(Measurement, "_reduce", wrong)
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        for call in [pool.submit(one(store, rank, (0, 1)).run) for rank in (0, 1)]:
            with pytest.raises(Failed, match=r"all-reduce with rank \d: the sum is wrong"):
                call.result(30)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [([3], "rank 3"), ([1, 0], "ranks 0-1"), ([5, 0, 2, 1], "ranks 0-2,5"), ([8, 1], "ranks 1,8")],
)
def test_ranks_are_named_in_short(ranks: list[int], expected: str) -> None:
    """A node may have many."""
    assert named(ranks) == expected
