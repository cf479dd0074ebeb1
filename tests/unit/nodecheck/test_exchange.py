"""The exchange over a real store, with ranks that are threads: stale keys, silent ranks, one answer for all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from migrator.nodecheck.exchange import Exchange, NotInTime, Place, StoodStill, StoreLost
from migrator.nodecheck.waiting import Waiter
from migrator.testing.gangs import free_port

SIZE = 3
ARRIVE_S = 20.0


@pytest.fixture
def store() -> Iterator[TCPStore]:
    """A store that outlives the checks, as that of an agent does."""
    made = TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=20), wait_for_workers=False)
    yield made
    del made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(SIZE) as made:
        yield made


def exchanges(store: TCPStore, size: int = SIZE) -> list[Exchange]:
    made = [Exchange(Place(rank, size, store.host, store.port), Waiter(), answer_s=5) for rank in range(size)]
    for exchange in made:
        exchange.connect(5)
    return made


def meet(pool: ThreadPoolExecutor, made: list[Exchange], life: str) -> list[Any]:
    """All of these arrive; what each has learned of the others."""
    calls = [pool.submit(exchange.arrive, {"host": f"{life}-{rank}"}, ARRIVE_S) for rank, exchange in enumerate(made)]
    return [call.result(ARRIVE_S + 10) for call in calls]


def test_all_learn_of_all(store: TCPStore, pool: ThreadPoolExecutor) -> None:
    """The same, on each rank."""
    expected = {rank: {"host": f"a-{rank}"} for rank in range(SIZE)}

    assert meet(pool, exchanges(store), "a") == [expected] * SIZE


def test_keys_of_an_earlier_life_mislead_nobody(store: TCPStore, pool: ThreadPoolExecutor) -> None:
    """An agent's store keeps them. Rank 0 comes last here, so the others first find what the old one has left."""
    before = exchanges(store)
    meet(pool, before, "old")
    for exchange in before:
        exchange.gather("round 1", {"failed": "old"}, 5)

    made = exchanges(store)
    others = [
        pool.submit(exchange.arrive, {"host": f"new-{rank}"}, ARRIVE_S) for rank, exchange in enumerate(made[1:], 1)
    ]
    store.wait([f"{before[0]._name}/hello/{rank}" for rank in (1, 2)])
    found = made[0].arrive({"host": "new-0"}, ARRIVE_S)

    assert found == {rank: {"host": f"new-{rank}"} for rank in range(SIZE)}
    assert [other.result(ARRIVE_S) for other in others] == [found] * 2
    assert not made[1].has_minutes("round 1")


def test_who_does_not_come_is_missing(store: TCPStore, pool: ThreadPoolExecutor) -> None:
    """Rank 0 begins without it at the deadline."""
    present = exchanges(store)[:2]
    calls = [pool.submit(exchange.arrive, {}, 1.0) for exchange in present]

    assert calls[0].result(10) == {0: {}, 1: {}}
    with pytest.raises(NotInTime, match="rank 0 did not begin the check with this rank in time"):
        exchanges(store)[2].arrive({}, 0.5)


def test_the_minutes_are_the_same_for_all(store: TCPStore, pool: ThreadPoolExecutor) -> None:
    """Whoever reports last writes them; nobody waits for the deadline."""
    made = exchanges(store)
    meet(pool, made, "a")

    calls = [pool.submit(exchange.gather, "round 1", {"n": rank}, 60.0) for rank, exchange in enumerate(made)]

    assert [call.result(20) for call in calls] == [{rank: {"n": rank} for rank in range(SIZE)}] * SIZE


def test_the_minutes_are_written_without_a_silent_rank(store: TCPStore, pool: ThreadPoolExecutor) -> None:
    """At the deadline. The report that comes later changes nothing, and its rank reads the same minutes."""
    made = exchanges(store)
    meet(pool, made, "a")

    calls = [pool.submit(made[rank].gather, "round 1", {"n": rank}, 0.5) for rank in (0, 2)]
    expected = {0: {"n": 0}, 2: {"n": 2}}

    assert [call.result(20) for call in calls] == [expected] * 2
    assert made[1].has_minutes("round 1")
    assert made[1].gather("round 1", {"n": 1}, 60.0) == expected


def test_a_rank_that_stood_still_does_not_judge_the_others(store: TCPStore, pool: ThreadPoolExecutor) -> None:
    """It finds no reports because the others have given it up, and not because they are dead."""
    made = exchanges(store)
    meet(pool, made, "a")
    made[1]._waiter.stood_still_s = 60.0

    with pytest.raises(StoodStill, match="it stood still for 60"):
        made[1].gather("round 1", {"n": 1}, 0.1)
    for rank in (0, 2):
        pool.submit(made[rank].gather, "round 2", {"n": rank}, 20.0)
    store.wait([f"{made[0]._name}/round 2/{rank}" for rank in (0, 2)])
    assert made[1].gather("round 2", {"n": 1}, 20.0).keys() == {0, 1, 2}  # nobody was missed


def test_the_host_of_the_store_that_stood_still_does_not_judge_either(
    store: TCPStore, pool: ThreadPoolExecutor
) -> None:
    """The reports of the others were on their way, and arrive now. Those who sent them have given up the store."""
    made = exchanges(store)
    meet(pool, made, "a")
    others = [pool.submit(made[rank].gather, "round 1", {"n": rank}, 20.0) for rank in (1, 2)]
    store.wait([f"{made[0]._name}/round 1/{rank}" for rank in (1, 2)])
    made[0]._waiter.stood_still_s = 60.0

    with pytest.raises(StoodStill, match="it stood still for 60"):
        made[0].gather("round 1", {"n": 0}, 20.0)
    store.set(made[0]._minutes("round 1"), "{}")  # so that the others need not wait
    for other in others:
        other.result(5)


def test_a_rank_leaves_when_the_server_of_the_check_has_ended(pool: ThreadPoolExecutor) -> None:
    """What runs then may look for a server of its own at the same port."""
    place = Place(0, 2, "127.0.0.1", free_port(), serves=True, ends_with_check=True)
    made = [Exchange(place, Waiter()), Exchange(replace(place, rank=1, serves=False), Waiter())]
    for exchange in made:
        exchange.connect(10)
    meet(pool, made, "a")

    other = pool.submit(made[1].leave, (0, 1), is_end=False)
    made[0].leave((0, 1), is_end=False)
    with pytest.raises(TimeoutError):
        other.result(0.5)
    made[0].close()

    other.result(2)


def test_a_store_that_is_not_there_is_lost() -> None:
    """At once, or when the time for it is over; the message names the address and who should serve it."""
    served = TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=5), wait_for_workers=False)
    place = Place(1, 2, "127.0.0.1", served.port)
    exchange = Exchange(place, Waiter(), answer_s=5)
    exchange.connect(5)
    del served

    begin_s = time.monotonic()
    with pytest.raises(OSError, match="refused"):
        exchange.store_for_group("round 1")
    assert time.monotonic() - begin_s < 2
    with pytest.raises(StoreLost, match=f"the job's store at 127.0.0.1:{place.port}, which rank 0 serves, is lost"):
        exchange.gather("round 1", {}, 5)
    with pytest.raises(StoreLost):
        Exchange(replace(place, rank=0), Waiter(), answer_s=5).connect(0.5)
