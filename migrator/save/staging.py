"""Memory for copies of what a save has not written yet, so that the training loop can go on.

The memory is taken and touched before it is needed, because filling fresh memory takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor

from migrator.platform import memory

ROOM_LEFT = 256 << 20
"""Bytes of free memory that copies never take."""


class StagingBuffer:
    """Memory for copies, touched before it is needed."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self.most = 0
        """Bytes that copies have taken at most."""
        self.is_off = False
        """No copies are made in this save: the writing is over sooner than fresh memory would be filled."""

    def prepare(self, tensors: Iterable[Tensor]) -> None:
        """Take memory for copies of these tensors, if the cgroup has it to spare."""
        self._take(needed_for(tensors))

    def _take(self, size: int) -> None:
        self._memory = None
        if size > 0 and size + ROOM_LEFT < memory.free():
            with suppress(RuntimeError, MemoryError):  # a limit on the address space: the loop waits instead
                self._memory = torch.zeros(size, dtype=torch.uint8)
                self.most = max(self.most, size)

    def copies(self, tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Copies of all tensors, or None if there is no memory for them."""
        if not tensors:
            return {}
        if self.is_off:
            return None
        needed = needed_for(tensors.values())
        if self._memory is None or self._memory.numel() < needed:
            # The state has grown since: the first step makes most of an optimizer's.
            self._take(needed)
        if self._memory is None:
            return None
        made, at = {}, 0
        for name, tensor in tensors.items():
            place = self._memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            made[name] = place.copy_(tensor)
            at += _room_for(tensor)
        return made

    def free(self) -> None:
        self._memory, self.is_off = None, False


def needed_for(tensors: Iterable[Tensor]) -> int:
    """Bytes that copies of these tensors take."""
    return sum(map(_room_for, tensors))


def _room_for(tensor: Tensor) -> int:
    """Bytes that a copy takes, rounded up so that the next one is aligned."""
    return (tensor.nbytes + 63) // 64 * 64
