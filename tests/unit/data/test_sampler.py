"""The sampler: no sample missed, none repeated, whoever takes over wherever."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed

from migrator.data.permutation import permutation
from migrator.data.sampler import CHUNK, ElasticSampler
from migrator.errors import UsageError


@dataclass(frozen=True)
class Life:
    """One life of a job: so many ranks, this batch size, stopped after so many steps or at the end."""

    ranks: int
    batch: int
    steps: int | None = None


@dataclass
class Job:
    """Trains one epoch on ranks in step with one another, and hands its state from life to life."""

    length: int
    seed: int = 0
    epoch: int = 0
    shuffle: bool = True
    drop_last: bool = False
    state: dict[str, int] | None = None
    trained: list[int] = field(default_factory=list)
    padded: int = 0
    ended: bool = False

    def live(self, life: Life) -> None:
        ranks = [self.sampler(rank, life.ranks) for rank in range(life.ranks)]
        for sampler in ranks:
            if self.state is not None:
                sampler.load_state_dict(self.state)
            sampler.set_epoch(self.epoch)
            sampler.begin()
        self.padded = max(0, ranks[0].padding())
        steps = zip(*(batches(sampler, life.batch) for sampler in ranks), strict=True)
        for shares in itertools.islice(steps, life.steps):
            # Sample by sample around the ranks: the order of the positions.
            self.trained += [sample for turn in zip(*shares, strict=True) for sample in turn]
            for sampler in ranks:
                sampler.advance(sum(len(share) for share in shares))
        states = [sampler.state_dict() for sampler in ranks]
        assert all(states[0] == state for state in states)
        self.state = states[0]
        self.ended = next(steps, None) is None

    def sampler(self, rank: int, size: int) -> ElasticSampler:
        return ElasticSampler(
            self.length, shuffle=self.shuffle, seed=self.seed, drop_last=self.drop_last, rank=rank, size=size
        )

    def order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.length))
        return [permutation(self.seed, self.epoch, at, self.length) for at in range(self.length)]


def batches(samples: Any, size: int) -> Iterator[list[int]]:
    samples = iter(samples)
    while batch := list(itertools.islice(samples, size)):
        yield batch


lengths = st.one_of(st.sampled_from([1, 2, 3, 7, 31, 127, 32, 33, 64, 65, 128, 129]), st.integers(1, 200))
jobs = st.builds(Job, lengths, st.integers(), st.integers(0, 50), st.booleans(), st.booleans())
stopped_lives = st.builds(Life, st.integers(1, 9), st.integers(1, 12), st.integers(0, 6))
last_lives = st.builds(Life, st.integers(1, 9), st.integers(1, 12))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(job=jobs, stopped=st.lists(stopped_lives, max_size=5), last=last_lives)
def test_each_sample_of_the_epoch_is_trained_once(job: Job, stopped: list[Life], last: Life) -> None:
    """Whatever ranks and batches the lives have, they train the epoch's order once, but for its very end.

    What was trained is the order itself, so each global batch was a contiguous run of it.
    """
    for life in [*stopped, last]:
        job.live(life)
        if job.ended:
            break

    assert job.ended
    order, length = job.order(), job.length
    repeated = job.trained[length:]
    assert job.trained[:length] == order[: len(job.trained)]
    assert length - len(job.trained) < (life.ranks if job.drop_last else 1)
    assert len(repeated) == job.padded < life.ranks
    assert repeated == list(itertools.islice(itertools.cycle(order), len(repeated)))
    cursor = min(length, len(job.trained))
    assert job.state == {"seed": job.seed, "epoch": job.epoch, "cursor": cursor, "length": length}


def test_chunks_join_without_a_seam() -> None:
    """An epoch longer than several chunks is read across them, from a cursor within one of them."""
    length = 3 * CHUNK + 17
    sampler = ElasticSampler(length, seed=3, rank=1, size=2)
    sampler.load_state_dict(sampler.state_dict() | {"cursor": 5})

    assert list(sampler) == [permutation(3, 0, at % length, length) for at in range(6, length + 1, 2)]


def test_an_epoch_of_2_to_the_62_begins_at_once() -> None:
    """Nothing is listed: a rank in the middle of the longest epoch yields its next sample directly."""
    sampler = ElasticSampler(2**62, rank=7, size=8)
    sampler.load_state_dict(sampler.state_dict() | {"cursor": 2**61})

    assert permutation(0, 0, 2**61 + 7, 2**62) == next(iter(sampler))
    assert len(sampler) == 2**59


def test_samples_are_plain_integers() -> None:
    """A dataset that indexes a list or a file by what it is given gets int, shuffled or not."""
    for shuffle in (True, False):
        assert {type(sample) for sample in ElasticSampler(10, shuffle=shuffle)} == {int}


def test_without_shuffle_samples_come_in_their_own_order() -> None:
    """The order of the data, shared out in turns."""
    assert list(ElasticSampler(8, shuffle=False, rank=1, size=2)) == [1, 3, 5, 7]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    """Neither two epochs nor two seeds share an order; the same pair has it again."""
    first, other = ElasticSampler(50, seed=1), ElasticSampler(50, seed=2)
    orders = [list(first), list(other)]
    first.set_epoch(1)
    orders.append(list(first))

    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert orders[0] == list(ElasticSampler(range(50), seed=1))


def test_iterating_leaves_the_cursor_where_it_is() -> None:
    """What was handed out is not yet trained: only `advance` moves the cursor."""
    sampler = ElasticSampler(10)

    assert list(sampler) == list(sampler)
    assert sampler.cursor == 0


def test_an_iteration_under_way_keeps_its_order() -> None:
    """An iterator belongs to the epoch and the cursor it was made in, even before its first sample."""
    sampler = ElasticSampler(10)
    expected, under_way = list(sampler), iter(sampler)
    sampler.advance(3)
    sampler.set_epoch(5)

    assert list(under_way) == expected


@pytest.mark.parametrize(
    ("length", "ranks", "drop_last", "each", "padding"),
    [
        (10, 1, False, 10, 0),
        (10, 4, False, 3, 2),
        (10, 4, True, 2, -2),
        (3, 8, False, 1, 5),
        (3, 8, True, 0, -3),
    ],
)
def test_all_ranks_take_equally_many(length: int, ranks: int, drop_last: bool, each: int, padding: int) -> None:
    """What does not divide by the ranks is padded from the beginning or left out, and counted."""
    samplers = [ElasticSampler(length, drop_last=drop_last, rank=rank, size=ranks) for rank in range(ranks)]

    assert [len(list(sampler)) for sampler in samplers] == [each] * ranks
    assert samplers[0].padding() == padding
    assert ElasticSampler(length, drop_last=drop_last).padding(size=ranks, cursor=0) == padding


def test_an_epoch_shorter_than_its_ranks_wraps_repeatedly() -> None:
    """Eight ranks share two samples without one going short."""
    ranks = [ElasticSampler(2, shuffle=False, rank=rank, size=8) for rank in range(8)]

    assert [list(sampler) for sampler in ranks] == [[0], [1]] * 4


def test_its_len_is_that_of_the_whole_epoch() -> None:
    """A progress bar or a scheduler made after a resume counts the epoch as before it."""
    sampler = ElasticSampler(10, rank=0, size=4)
    sampler.load_state_dict(sampler.state_dict() | {"cursor": 7})

    assert len(sampler) == 3
    assert len(list(sampler)) == sampler.left() == 1
    assert sampler.padding() == 1


def test_the_cursor_ends_at_the_length() -> None:
    """Padded samples are trained but are no progress in the epoch."""
    sampler = ElasticSampler(10)
    sampler.advance(8)
    sampler.advance(8)

    assert sampler.cursor == 10
    assert sampler.left() == 0


def test_whoever_only_looks_at_the_data_sees_all_of_it() -> None:
    """A look at the first batch, or statistics over the epoch, in its middle and behind its end: not training."""
    sampler = ElasticSampler(10, seed=1, rank=0, size=1)
    whole = list(sampler)
    for trained in (4, 6):
        sampler.advance(trained)
        assert list(sampler) == whole

    sampler.set_epoch(1)
    assert sampler.begin() == 0
    training = iter(sampler)
    sampler.advance(3)
    assert len(list(sampler)) == 10
    assert len(list(training)) == 10
    assert sampler.cursor == 3


def test_a_resumed_epoch_goes_on_at_its_cursor_once() -> None:
    """The first iteration after a load starts at the cursor, the next one at the start."""
    sampler = resumed(epoch=3, cursor=6)
    sampler.set_epoch(3)

    assert sampler.begin() == 6
    assert list(sampler) == order(epoch=3)[6:]
    assert sampler.begin() == 0
    assert list(sampler) == order(epoch=3)


def test_another_epoch_starts_at_its_beginning() -> None:
    """A cursor belongs to its epoch; going on to another one forgets it."""
    sampler = resumed(epoch=3, cursor=6)
    sampler.set_epoch(4)

    assert (sampler.epoch, sampler.cursor) == (4, 0)
    sampler.advance(10)
    assert sampler.begin() == 0
    assert sampler.epoch == 5


def test_going_back_right_after_a_load_is_refused() -> None:
    """A loop that begins at epoch 0 again after a resume would train finished epochs a second time."""
    sampler = resumed(epoch=3, cursor=6)

    with pytest.raises(UsageError, match=r"set_epoch\(0\).*range\(sampler\.epoch, epochs\)"):
        sampler.set_epoch(0)
    assert (sampler.epoch, sampler.cursor) == (3, 6)


def test_naming_the_epoch_in_the_midst_of_it_changes_nothing() -> None:
    """`set_epoch` with the epoch that is being trained keeps the cursor."""
    sampler = ElasticSampler(10)
    sampler.advance(4)
    sampler.set_epoch(0)

    assert sampler.cursor == 4


def test_an_epoch_left_by_break_starts_over() -> None:
    """A loop that is entered again without a load trains the whole epoch, as with any sampler."""
    sampler = ElasticSampler(10)
    sampler.begin()
    sampler.advance(4)

    assert sampler.begin() == 0
    assert (sampler.epoch, sampler.advanced_by_itself) == (0, False)


def test_a_finished_epoch_is_followed_by_the_next_by_itself() -> None:
    """Without `set_epoch` the same order is not trained again and again, and the caller can tell."""
    sampler = ElasticSampler(10)
    sampler.advance(10)

    assert sampler.begin() == 0
    assert (sampler.epoch, sampler.advanced_by_itself) == (1, True)
    sampler.advance(10)
    sampler.set_epoch(2)
    assert sampler.begin() == 0
    assert (sampler.epoch, sampler.advanced_by_itself) == (2, False)


def test_a_finished_epoch_that_is_asked_for_again_is_trained_again() -> None:
    """An explicit `set_epoch` is obeyed: the epoch does not move on under the caller."""
    sampler = ElasticSampler(10)
    sampler.advance(10)
    sampler.set_epoch(0)

    assert sampler.begin() == 0
    assert (sampler.epoch, sampler.advanced_by_itself) == (0, False)


def test_a_resume_at_the_end_of_an_epoch_yields_nothing_and_stays() -> None:
    """What follows the loop, the evaluation, runs again; the epoch goes on only after that."""
    sampler = resumed(epoch=3, cursor=10)
    sampler.set_epoch(3)

    assert sampler.begin() == 10
    assert list(sampler) == []
    assert (sampler.epoch, sampler.advanced_by_itself) == (3, False)
    assert sampler.begin() == 0
    assert (sampler.epoch, sampler.advanced_by_itself) == (4, True)


def test_an_epoch_whose_rest_was_dropped_is_finished() -> None:
    """With `drop_last` the cursor stops short of the length; the epoch is over all the same."""
    sampler = ElasticSampler(10, drop_last=True, rank=0, size=4)
    sampler.advance(8)
    sampler.begin()

    assert (sampler.epoch, sampler.cursor, sampler.advanced_by_itself) == (1, 0, True)


def test_an_epoch_of_which_nothing_was_trained_is_not_finished() -> None:
    """Fewer samples than ranks and all dropped: the epoch is empty, but not over before it began."""
    sampler = ElasticSampler(3, drop_last=True, rank=0, size=4)

    assert sampler.begin() == 0
    assert (sampler.epoch, sampler.advanced_by_itself) == (0, False)


def test_a_loader_that_drops_its_last_batch_can_finish_the_epoch() -> None:
    """Only the loader knows that it ended; `finish` says so to the sampler."""
    sampler = ElasticSampler(10)
    sampler.advance(8)
    sampler.finish()

    assert sampler.cursor == 10
    sampler.begin()
    assert sampler.epoch == 1


def test_the_order_of_the_ckpt_goes_on_under_another_seed() -> None:
    """A changed seed would mix two orders in one epoch, so the seed of the state is taken over."""
    sampler = ElasticSampler(10, seed=99)
    sampler.load_state_dict({"seed": 5, "epoch": 1, "cursor": 4, "length": 10})

    assert sampler.seed == 5
    assert list(sampler) == [permutation(5, 1, at, 10) for at in range(4, 10)]


@pytest.mark.parametrize(
    ("changes", "complaints"),
    [
        ({"length": 11}, ["length is 11 there, 10 here: the data changed", "MIGRATOR_RESUME=never"]),
        ({"length": "10"}, ["length is '10', expected a whole number"]),
        ({"length": 10.0}, ["length is 10.0, expected a whole number"]),
        ({"cursor": 11}, ["cursor is 11, expected 0 to 10"]),
        ({"cursor": -1}, ["cursor is -1, expected 0 to 10"]),
        (
            {"cursor": 2.5, "epoch": -1},
            ["cursor is 2.5, expected a whole number", "epoch is -1, expected at least 0"],
        ),
        ({"epoch": True}, ["epoch is True, expected a whole number"]),
        ({"seed": None}, ["seed is None, expected a whole number"]),
        ({"rank": 0}, ["its keys are 'cursor', 'epoch', 'length', 'rank', 'seed', expected 'cursor'"]),
    ],
)
def test_a_state_that_does_not_fit_is_refused_whole(changes: dict[str, Any], complaints: list[str]) -> None:
    """Everything that is wrong is listed at once, and the sampler stays as it was."""
    sampler = ElasticSampler(10, seed=2)
    sampler.advance(3)
    before = sampler.state_dict()

    with pytest.raises(ValueError) as refused:
        sampler.load_state_dict(before | {"seed": 8} | changes)

    for complaint in complaints:
        assert complaint in str(refused.value)
    assert sampler.state_dict() == before
    assert sampler.begin() == 0


def test_a_state_with_a_missing_key_or_of_another_kind_is_refused() -> None:
    """An empty state is no fresh start, and a list is no state."""
    with pytest.raises(ValueError, match="its keys are none, expected"):
        ElasticSampler(10).load_state_dict({})
    with pytest.raises(TypeError, match="the state is a list"):
        ElasticSampler(10).load_state_dict([1])  # type: ignore[arg-type]


def test_the_state_is_four_plain_integers() -> None:
    """Ready for JSON whatever kind of integers the arguments were."""
    state = ElasticSampler(torch.arange(5), seed=torch.tensor(3)).state_dict()  # type: ignore[arg-type]

    assert state == {"seed": 3, "epoch": 0, "cursor": 0, "length": 5}
    assert {type(value) for value in state.values()} == {int}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"data_or_length": 0}, ValueError, "length is 0, expected 1 to"),
        ({"data_or_length": []}, ValueError, "length is 0, expected 1 to"),
        ({"data_or_length": -1}, ValueError, "length is -1"),
        ({"data_or_length": 2**62 + 1}, ValueError, "length is"),
        ({"data_or_length": True}, TypeError, "length is True, expected a whole number"),
        ({"data_or_length": iter([1])}, TypeError, r"pass data that has a len\(\)"),
        ({"seed": 0.5}, TypeError, "seed is 0.5"),
        ({"rank": 0}, UsageError, "rank=0 and size=None: expected both or neither"),
        ({"size": 2}, UsageError, "rank=None and size=2: expected both or neither"),
        ({"rank": 2, "size": 2}, ValueError, "rank is 2, expected 0 to 1: count ranks from 0"),
        ({"rank": 0, "size": 0}, ValueError, "size is 0, expected at least 1"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """The error says what was found, what was expected and what to do."""
    with pytest.raises(error, match=message):
        ElasticSampler(**{"data_or_length": 10} | arguments)


def test_calls_with_wrong_numbers_are_refused() -> None:
    """A negative step or epoch would take training back without a word."""
    sampler = ElasticSampler(10)
    for call in (sampler.advance, sampler.set_epoch):
        with pytest.raises(ValueError, match="is -1, expected at least 0"):
            call(-1)
        with pytest.raises(TypeError, match="expected a whole number"):
            call(1.5)  # type: ignore[arg-type]


def test_its_repr_says_where_it_is() -> None:
    """One look in a debugger or log tells the place in training."""
    sampler = ElasticSampler(10, seed=4, rank=1, size=2)
    sampler.advance(6)

    assert repr(sampler) == (
        "ElasticSampler(length=10, shuffle=True, seed=4, drop_last=False, rank=1, size=2, epoch=0, cursor=6)"
    )


def test_the_process_group_is_asked_when_it_is_there() -> None:
    """A sampler made before `init_process_group` serves its rank, and one rank again after the end."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    sampler = ElasticSampler(10, shuffle=False)
    assert len(sampler) == 10

    distributed.init_process_group("fake", store=fake.FakeStore(), rank=1, world_size=3)
    try:
        assert list(sampler) == [1, 4, 7, 0]
        assert (len(sampler), sampler.size) == (4, 3)
        assert list(ElasticSampler(10, shuffle=False, rank=0, size=1)) == list(range(10))
    finally:
        distributed.destroy_process_group()
    assert list(sampler) == list(range(10))


def resumed(*, epoch: int, cursor: int) -> ElasticSampler:
    sampler = ElasticSampler(10)
    sampler.load_state_dict({"seed": 0, "epoch": epoch, "cursor": cursor, "length": 10})
    return sampler


def order(*, epoch: int) -> list[int]:
    return [permutation(0, epoch, at, 10) for at in range(10)]
