"""The interface of an adapter: one for each kind of object that can be registered.

An adapter is used at three times. At a safe point, `capture` copies in the main
thread what may change before the next optimizer step; this must be fast. During a
save, `frozen` makes one value for the ckpt from the capture; its large tensors are
still the live ones. After a load, `restore` writes such a value into the object, in
place, so that all references of the script stay valid.

Large tensors that only `optimizer.step()` changes are never copied at a safe point.
They are `watched`: the change detector reports if they change at another time.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from migrator.ckpt.codec import Stored, StoredArray

LARGE_BYTES = 16 * 1024
"""Maximum size, in bytes, of a tensor in a container that is copied at each safe point. Larger ones are read live."""

SCALARS = {type(None), bool, int, float, str, bytes}
"""Types whose values cannot change, so a capture may hold them without a copy."""


class LayoutChanged(Exception):  # noqa: N818 - internal, never seen by a user
    """The registered object has other tensors than at the safe point: a new capture is needed."""


class Placement(enum.Enum):
    """Who holds a tensor, of the ranks of a job.

    A sharded tensor, of which each rank holds a slice, will be a third member: its adapter then says for it which
    slice of which whole this rank holds, and a part stores that beside the bytes.
    """

    REPLICATED = "replicated"
    """All ranks hold the same, so any of them may write it."""
    PER_RANK = "per rank"
    """Each rank has one of its own, and writes it."""


class Adapter(ABC):
    """How a registered object is captured, saved and restored."""

    kind: ClassVar[str]
    may_lack: ClassVar[bool] = False
    """If an entry cannot be stored any more, the rest of the object is saved."""
    may_inline: ClassVar[bool] = True
    """Its smallest tensors may stay in the manifest."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.is_own = False
        """Registered with own=True: each rank has the whole object for itself."""

    @abstractmethod
    def capture(self) -> Any:
        """Main thread, at a safe point: a copy of everything that may change before the next step."""

    def watched(self, captured: Any) -> list[Tensor]:
        """The present tensors that must not change until the next step."""
        return large_tensors(captured)

    def frozen(self, captured: Any) -> Any:
        """The value for the ckpt: the captured state and the live large tensors."""
        return captured

    def standing(self, frozen: Any) -> list[Tensor]:
        """The tensors of `frozen` that were not in the capture and must be those of the safe point."""
        return []

    def placement(self, tensor: Tensor, *, is_live: bool) -> Placement:
        """Who holds a tensor of `frozen`. `is_live`: it is one of those watched, not a copy made at the safe point."""
        return Placement.REPLICATED if is_live and not self.is_own else Placement.PER_RANK

    def release(self, captured: Any) -> None:  # noqa: B027 - most kinds keep nothing to reuse
        """The capture is not needed any more; its memory may be reused."""

    def homes(self, value: Any) -> dict[str, Tensor]:
        """The live tensors into which the stored tensors of a ckpt are read, by name. Others are read into new
        memory."""
        return dict(_pairs(value, self.live()))

    def live(self) -> Any:
        """The present value, with the same structure as `frozen`."""
        return self.target

    def found(self) -> Any:
        """The present state without copies, for the check at registration."""
        return self.live()

    def differences(self, value: Any) -> list[str]:
        """Reasons why a ckpt's value does not fit, one line each; paths are relative to the registered name."""
        return []

    @abstractmethod
    def restore(self, value: Any) -> None:
        """Write the value into the object, in place."""

    def first_step(self, name: str) -> None:  # noqa: B027 - most kinds have nothing to look at
        """Called before the first optimizer step after a load, when the script has finished its changes to the
        object."""


def large_tensors(value: Any) -> list[Tensor]:
    """All tensors larger than `LARGE_BYTES` in a captured value."""
    if isinstance(value, Tensor):
        return [value] if is_large(value) else []
    if isinstance(value, dict):
        return [t for v in value.values() if type(v) not in SCALARS for t in large_tensors(v)]
    if isinstance(value, (list, tuple, deque)):
        return [t for v in value if type(v) not in SCALARS for t in large_tensors(v)]
    return []


def is_large(tensor: Tensor) -> bool:
    # A sparse tensor has no size in bytes. A save refuses it with its path; an error here would end the training.
    return tensor.layout is torch.strided and tensor.nbytes > LARGE_BYTES


def _pairs(saved: Any, live: Any) -> Iterable[tuple[str, Tensor]]:
    """Pairs of a stored tensor's name and the live tensor at the same position."""
    if isinstance(saved, Stored):
        if isinstance(live, Tensor):
            yield saved.name, live
    elif isinstance(saved, StoredArray):
        home = saved.home(live)
        if home is not None:
            yield saved.part.name, home
    elif isinstance(saved, dict) and isinstance(live, dict):
        for key in saved:
            if key in live:
                yield from _pairs(saved[key], live[key])
    elif isinstance(saved, (list, tuple)) and isinstance(live, (list, tuple)):
        for one, other in zip(saved, live, strict=False):
            yield from _pairs(one, other)


def shape_of(value: Any) -> tuple[int, ...]:
    return tuple(value.shape)
