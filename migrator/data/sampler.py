"""The samples that a rank trains, chosen so that a stop in mid-epoch loses and repeats none.

The epoch has one order for the whole job. The cursor is the number of samples that
all ranks together have trained. Rank r of w takes the positions cursor + r,
cursor + r + w and so on, so a global batch is a contiguous range of positions, and
the state is valid for any number of ranks and loader workers and any batch size.

The cursor counts samples that were trained, not samples that were yielded: iterating
does not change it, because loader workers fetch ahead. `migrator.batches()` advances
it; a loop without `batches()` calls `advance()` itself.

The price: all ranks must take the same number of samples. So at the end of an epoch
up to (number of ranks - 1) samples are yielded twice, or left out (`drop_last`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sized
from typing import Any, SupportsIndex

import numpy as np
from torch.utils.data import Sampler

from migrator.data.permutation import LARGEST, permutation
from migrator.errors import UsageError

CHUNK = 1024
"""Number of samples whose order is computed at a time."""

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
    """A sampler for any number of ranks whose epoch can be left at any position and resumed there.

    `rank` and `size` are for scripts that place ranks themselves. Without them the sampler asks
    `torch.distributed` each time it needs them, so it may be made before the process group.
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
        # One attribute for both, so that another thread never sees a new epoch with an old cursor.
        self._at = (0, 0)
        self._resumed = False
        self._begun = False
        """`begin()` was called: the next iteration is the one that trains."""
        self.advanced_by_itself = False
        """Whether the last `begin()` went on to the next epoch because the script did not call `set_epoch()`."""

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
        """The seed. Together with the epoch it determines the order."""
        return self._seed

    @property
    def length(self) -> int:
        """Number of samples in an epoch."""
        return self._length

    @property
    def size(self) -> int:
        """Number of ranks that share the epoch now."""
        return self._place()[1]

    def __len__(self) -> int:
        """Samples per rank in the whole epoch, no matter where the cursor is."""
        return self._per_rank(self._length, self.size)

    def left(self) -> int:
        """Samples per rank from the cursor to the end of the epoch."""
        return self._per_rank(self._length - self.cursor, self.size)

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's samples from the cursor to the end of the epoch, after `begin()` or a load.

        Otherwise yield all samples of the epoch: the script only looks at the data, so the cursor does not apply.
        """
        # Read here and not at the first `next()`: changes in between belong to the next iteration.
        rank, size = self._place()
        epoch, cursor = self._at
        if not self._begun and not self._resumed:
            cursor = 0
        self._begun = False
        return self._samples(self._seed, epoch, range(cursor + rank, self._end(cursor, size), size))

    def _samples(self, seed: int, epoch: int, positions: range) -> Iterator[int]:
        for start in range(0, len(positions), CHUNK):
            run = positions[start : start + CHUNK]
            # Padding: positions after the end start again at the beginning of the same order.
            chunk = np.arange(run.start, run.stop, run.step, dtype=np.int64) % self._length
            if self._shuffle:
                chunk = permutation(seed, epoch, chunk, self._length)
            yield from chunk.tolist()

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`. If it is the epoch that was resumed or is partly trained, the cursor stays."""
        epoch = _whole("epoch", epoch, 0)
        if self._resumed and epoch < self.epoch:
            raise UsageError(
                f"set_epoch({epoch}) right after a load in epoch {self.epoch}: epochs that were already trained "
                "would be trained again. Start the loop there: for epoch in range(sampler.epoch, epochs)."
            )
        if epoch == self.epoch and (self._resumed or not self._finished()):
            return
        self._resumed = False
        self._at = (epoch, 0)

    def begin(self) -> int:
        """Set the cursor for an iteration that starts now, and return it.

        Only the first iteration after a load continues in mid-epoch. After a finished epoch the next one begins, even
        if the script never calls `set_epoch()`: repeating the same order would train less well.
        """
        self.advanced_by_itself = not self._resumed and self._finished()
        if not self._resumed:
            self._at = (self.epoch + self.advanced_by_itself, 0)
        self._resumed = False
        self._begun = True
        return self.cursor

    @property
    def is_resumed(self) -> bool:
        """The next iteration continues the loaded epoch at its cursor."""
        return self._resumed

    def resume_again(self) -> None:
        """The iteration after the load only looked at the data, so the next one continues in mid-epoch."""
        self._resumed = True

    def advance(self, samples: int) -> None:
        """Note that all ranks together have trained `samples` more samples, padding included."""
        epoch, cursor = self._at
        self._at = (epoch, min(self._length, cursor + _whole("samples", samples, 0)))

    def finish(self) -> None:
        """Note that the loader has ended: the samples that its `drop_last` left out will not come."""
        self._at = (self.epoch, self._length)

    def padding(self, size: int | None = None, cursor: int | None = None) -> int:
        """Number of samples that are yielded twice in the rest of the epoch; negative: number of samples left out."""
        size = self.size if size is None else _whole("size", size, 1)
        cursor = self.cursor if cursor is None else _whole("cursor", cursor, 0, self._length)
        return self._end(cursor, size) - self._length

    def state_dict(self) -> dict[str, int]:
        """The state: equal on all ranks, valid for any number of ranks and workers and any batch size."""
        epoch, cursor = self._at
        return {"seed": self._seed, "epoch": epoch, "cursor": cursor, "length": self._length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, in the same order: its seed replaces the seed of this sampler."""
        if not isinstance(state, Mapping):
            raise TypeError(f"the state is a {type(state).__name__}, expected what state_dict() returned")
        if problems := self.problems(state):
            raise ValueError("this state does not fit this sampler:\n  " + "\n  ".join(problems))
        self._seed = operator.index(state["seed"])
        self._at = (operator.index(state["epoch"]), operator.index(state["cursor"]))
        self._resumed = True

    def problems(self, state: Mapping[str, Any]) -> list[str]:
        """Reasons why a state does not fit this sampler; empty if it fits."""
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
                f"length is {state['length']!r} there, {self._length} here: the data changed, so the "
                "rest of the epoch is unknown; use the old data, or start anew: MIGRATOR_RESUME=never"
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
        """Whether the epoch was begun and has no samples left for this number of ranks."""
        return self.cursor > 0 and self.left() == 0

    def _end(self, cursor: int, size: int) -> int:
        """The position at which the ranks stop. It may differ from the length, because all ranks take the same
        number."""
        return cursor + size * self._per_rank(self._length - cursor, size)

    def _per_rank(self, samples: int, size: int) -> int:
        return samples // size if self._drop_last else -(-samples // size)


def _whole(name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """Return `value` if it is a whole number within its bounds, else raise an error that says what is wrong."""
    # In Python True is a whole number; here it is a mistake.
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} is {value!r}, expected a whole number: {_ADVICE[name]}")
    number = operator.index(value)
    if (least is not None and number < least) or (most is not None and number > most):
        expected = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name} is {number}, expected {expected}: {_ADVICE[name]}")
    return number
