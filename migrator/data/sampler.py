"""Which samples a rank trains, so that a stop in mid-epoch loses and repeats none.

The epoch has one order for the whole job, and one number says how far all ranks
together have come in it: the cursor. Rank r of w takes the positions cursor + r,
cursor + r + w and so on, so a global batch is a contiguous run of positions on
any number of ranks, and the state fits any number of ranks, loader workers and
any batch size.

The cursor says what was trained, not what was handed out: iterating leaves it
alone, since loader workers fetch ahead. `migrator.batches()` moves it; a loop
without that calls `advance()` itself.

The price: ranks must take equally many samples, so at an epoch's very end up to
one less than the number of ranks are handed out twice, or left out (`drop_last`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sized
from typing import Any, SupportsIndex

import numpy as np
from torch.utils.data import Sampler

from migrator.errors import UsageError
from migrator.data.permutation import LARGEST, permutation

CHUNK = 1024

_ADVICE = {
    "length": "pass data that has a len(), or the number of its samples",
    "size": "pass how many ranks train together",
    "rank": "count ranks from 0",
    "seed": "pass any integer",
    "epoch": "count epochs from 0",
    "cursor": "it counts the samples of one epoch that all ranks together have trained",
    "samples": "pass how many samples all ranks together have trained since the last time",
}


class ElasticSampler(Sampler[int]):
    """A sampler for any number of ranks whose epoch can be left and entered again anywhere.

    `rank` and `size` are for those who place ranks themselves; without them they are asked of
    `torch.distributed` whenever they are needed, so the sampler may be made before the process group.
    """

    def __init__(
        self,
        data_or_length: Sized | SupportsIndex,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        if (rank is None) != (size is None):
            raise UsageError(
                f"rank={rank} and size={size}: expected both or neither; "
                "give both, or leave both out to take them from torch.distributed"
            )
        if rank is not None and size is not None:
            size = _whole("size", size, 1)
            rank = _whole("rank", rank, 0, size - 1)
        self._fixed_place = None if rank is None or size is None else (rank, size)
        length = len(data_or_length) if isinstance(data_or_length, Sized) else data_or_length
        self._length = _whole("length", length, 1, LARGEST)
        self._seed = _whole("seed", seed)
        self._shuffle = shuffle
        self._drop_last = drop_last
        # One attribute for both: a thread that asks for the state never sees a new epoch with an old cursor.
        self._at = (0, 0)
        self._resumed = False
        self._begun = False
        """The next iteration is the one that trains."""
        self.advanced_by_itself = False
        """Whether the last `begin()` went on to the next epoch because nobody called `set_epoch()`."""

    @property
    def epoch(self) -> int:
        """The epoch being trained."""
        return self._at[0]

    @property
    def cursor(self) -> int:
        """How many samples of this epoch all ranks together have trained."""
        return self._at[1]

    @property
    def seed(self) -> int:
        """What, with the epoch, decides the order."""
        return self._seed

    @property
    def length(self) -> int:
        """How many samples an epoch has."""
        return self._length

    @property
    def size(self) -> int:
        """How many ranks share the epoch now."""
        return self._place()[1]

    def __len__(self) -> int:
        """Samples per rank of the whole epoch, wherever the cursor is."""
        return self._per_rank(self._length, self.size)

    def left(self) -> int:
        """Samples per rank from the cursor to the end of the epoch: what an iteration would yield."""
        return self._per_rank(self._length - self.cursor, self.size)

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's samples from the cursor to the end of the epoch, if `begin()` or a load came before.

        Else all of the epoch: somebody looks at the data, and the cursor is not his.
        """
        # Read here, not at the first `next()`: what happens in between belongs to the next iteration.
        rank, size = self._place()
        epoch, cursor = self._at
        if not self._begun and not self._resumed:
            cursor = 0
        self._begun = False
        return self._samples(self._seed, epoch, range(cursor + rank, self._end(cursor, size), size))

    def _samples(self, seed: int, epoch: int, positions: range) -> Iterator[int]:
        for start in range(0, len(positions), CHUNK):
            run = positions[start : start + CHUNK]
            # Padding: a position past the end is one from the beginning of the same order.
            chunk = np.arange(run.start, run.stop, run.step, dtype=np.int64) % self._length
            if self._shuffle:
                chunk = permutation(seed, epoch, chunk, self._length)
            yield from chunk.tolist()

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`; in the epoch that was resumed or is half trained the cursor stays."""
        epoch = _whole("epoch", epoch, 0)
        if self._resumed and epoch < self.epoch:
            raise UsageError(
                f"set_epoch({epoch}) right after a load that stands in epoch {self.epoch}: epochs already trained "
                "would be trained again. Begin the loop there: for epoch in range(sampler.epoch, epochs)."
            )
        if epoch == self.epoch and (self._resumed or not self._finished()):
            return
        self._resumed = False
        self._at = (epoch, 0)

    def begin(self) -> int:
        """Set the cursor for an iteration that starts now, and return it.

        Only the first iteration after a load goes on in mid-epoch. A finished epoch is followed by
        the next one even where `set_epoch()` is never called: the same order again would teach less.
        """
        self.advanced_by_itself = not self._resumed and self._finished()
        if not self._resumed:
            self._at = (self.epoch + self.advanced_by_itself, 0)
        self._resumed = False
        self._begun = True
        return self.cursor

    @property
    def is_resumed(self) -> bool:
        """The next iteration goes on in the middle of the epoch that was loaded."""
        return self._resumed

    def resume_again(self) -> None:
        """The iteration after a load was only a look at the data: the next one goes on in mid-epoch."""
        self._resumed = True

    def advance(self, samples: int) -> None:
        """Note that all ranks together have trained so many more samples, padding included."""
        epoch, cursor = self._at
        self._at = (epoch, min(self._length, cursor + _whole("samples", samples, 0)))

    def finish(self) -> None:
        """Note that the loader came to its end: what its own `drop_last` left out will not come."""
        self._at = (self.epoch, self._length)

    def padding(self, size: int | None = None, cursor: int | None = None) -> int:
        """How many samples the rest of the epoch hands out twice; below zero: how many it leaves out."""
        size = self.size if size is None else _whole("size", size, 1)
        cursor = self.cursor if cursor is None else _whole("cursor", cursor, 0, self._length)
        return self._end(cursor, size) - self._length

    def state_dict(self) -> dict[str, int]:
        """The same on all ranks; fits any number of ranks and workers and any batch size."""
        epoch, cursor = self._at
        return {"seed": self._seed, "epoch": epoch, "cursor": cursor, "length": self._length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, in its order: its seed takes the place of this one's."""
        if not isinstance(state, Mapping):
            raise TypeError(f"the state is a {type(state).__name__}, expected what state_dict() returned")
        if problems := self.problems(state):
            raise ValueError("this state does not fit this sampler:\n  " + "\n  ".join(problems))
        self._seed = operator.index(state["seed"])
        self._at = (operator.index(state["epoch"]), operator.index(state["cursor"]))
        self._resumed = True

    def problems(self, state: Mapping[str, Any]) -> list[str]:
        """Why a state does not fit this sampler; nothing if it does."""
        expected = set(self.state_dict())
        if set(state) != expected:
            found = ", ".join(sorted(map(repr, state))) or "none"
            return [f"its keys are {found}, expected {', '.join(sorted(map(repr, expected)))}"]
        problems = []
        bounds = {"seed": (), "epoch": (0,), "cursor": (0, self._length), "length": (1, LARGEST)}
        for name, least_and_most in bounds.items():
            try:
                _whole(name, state[name], *least_and_most)
            except (TypeError, ValueError) as problem:
                problems.append(str(problem))
        if state["length"] != self._length:
            problems.append(
                f"length is {state['length']!r} there, {self._length} here: the data changed, so what is "
                "left of the epoch is unknown; give back the old data, or start anew: MIGRATOR_RESUME=never"
            )
        return problems

    def __repr__(self) -> str:
        rank, size = self._fixed_place or (None, None)
        return (
            f"ElasticSampler(length={self._length}, shuffle={self._shuffle}, seed={self._seed}, "
            f"drop_last={self._drop_last}, rank={rank}, size={size}, "
            f"epoch={self.epoch}, cursor={self.cursor})"
        )

    def _place(self) -> tuple[int, int]:
        if self._fixed_place is not None:
            return self._fixed_place
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        return 0, 1

    def _finished(self) -> bool:
        """Whether the epoch was begun and this number of ranks finds nothing left in it."""
        return self.cursor > 0 and self.left() == 0

    def _end(self, cursor: int, size: int) -> int:
        """The position before which the ranks stop: not always the length, as all take equally many."""
        return cursor + size * self._per_rank(self._length - cursor, size)

    def _per_rank(self, samples: int, size: int) -> int:
        return samples // size if self._drop_last else -(-samples // size)


def _whole(name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """Return `value` if it is a whole number within its bounds; say what is wrong with it if not."""
    # True is a whole number to Python; here it is an argument in the wrong place.
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} is {value!r}, expected a whole number: {_ADVICE[name]}")
    number = operator.index(value)
    if (least is not None and number < least) or (most is not None and number > most):
        expected = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name} is {number}, expected {expected}: {_ADVICE[name]}")
    return number
