"""Tells that a tensor changed where only `optimizer.step()` should change it.

A save reads large tensors while the script goes on, because between a safe point
and the next step they do not change. Some loops break that: EMA weights swapped
in for an evaluation, a target network, a momentum encoder. So a safe point leaves
a mark of every tensor, its version counter and its address, and for a spread of
them a few sampled bytes: writing through `.data` moves neither counter nor address.

The price is about 0.1 us a tensor, and 0.2 us a sample.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

SAMPLED_TENSORS = 32
SAMPLE_BYTES = 8


class Mark:
    """What the tensors of one object looked like at a safe point."""

    __slots__ = ("_addresses", "_places", "_samples", "_versions")

    def __init__(self, tensors: Sequence[Tensor], before: Mark | None = None) -> None:
        self._versions = _versions(tensors)
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        # Where to look does not change while the addresses do not: most of the price is saved.
        self._places: _Places
        if before is not None and before._addresses == self._addresses and before._places.fit(tensors):
            self._places = before._places
        else:
            self._places = _Places(tensors)
        self._samples = self._places.samples(tensors)

    def differs(self, tensors: Sequence[Tensor]) -> bool:
        """Any of them was exchanged, written to or resized since."""
        # Second handles keep the memory alive: the main thread may swap a `.data` meanwhile.
        held = [tensor.detach() for tensor in tensors]
        if [tensor.data_ptr() for tensor in held] != self._addresses or not self._places.fit(held):
            return True
        if _versions(tensors) != self._versions:
            return True
        return not _are_equal(self._places.samples(held), self._samples)

    @property
    def addresses(self) -> frozenset[int]:
        """Where the tensors began."""
        return frozenset(self._addresses)


class Contents:
    """What tensors hold, for those that are written to by other means than an optimizer.

    Small ones byte for byte, since one cell of a table may be all that changes in a step.
    """

    SMALL_BYTES = 64 * 1024

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._mark = Mark(tensors)
        self._small = self._digests(tensors)

    def differ(self, tensors: Sequence[Tensor]) -> bool:
        return self._mark.differs(tensors) or self._digests(tensors) != self._small

    def _digests(self, tensors: Sequence[Tensor]) -> list[int]:
        return [
            xxhash.xxh3_64_intdigest(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
            for tensor in tensors
            if tensor.device.type == "cpu" and tensor.is_contiguous() and 0 < tensor.nbytes <= self.SMALL_BYTES
        ]


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # those made under inference_mode() keep none
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


class _Places:
    """Where samples are taken: bytes of CPU memory, by address, and some elements of device tensors.

    Only to be read while the tensors are known to lie at these addresses still, and to fit.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._memory: list[Any] = []
        self._devices: list[int] = []
        self._sizes: list[int] = []
        self._strides: list[tuple[int, tuple[int, ...]]] = []
        count = len(tensors)
        chosen = range(count)
        if count > SAMPLED_TENSORS:
            chosen = [i * count // SAMPLED_TENSORS for i in range(SAMPLED_TENSORS)]  # type: ignore[assignment]
        self._chosen = chosen
        for i in chosen:
            tensor = tensors[i]
            self._sizes.append(tensor.nbytes)
            if not tensor.is_contiguous():
                self._strides.append((i, tensor.stride()))
            if tensor.numel() == 0 or tensor.data_ptr() == 0:
                continue
            if tensor.device.type != "cpu":
                self._devices.append(i)
                continue
            size = tensor.element_size()
            # The first: an operation that is under way has begun there, and has not counted its version yet.
            middle, last = (_offset(tensor, share) for share in (0.5, 1.0))
            # Several elements at once where memory goes on behind the middle; never behind the last one.
            at_middle = min(SAMPLE_BYTES, last + size - middle) if tensor.is_contiguous() else size
            for offset, length in ((0, size), (middle, at_middle), (last, size)):
                self._memory.append((ctypes.c_char * length).from_address(tensor.data_ptr() + offset))

    def fit(self, tensors: Sequence[Tensor]) -> bool:
        """A smaller tensor may have taken the address of a freed one: behind its end nothing may be read."""
        is_as_large = [tensors[i].nbytes for i in self._chosen] == self._sizes
        return is_as_large and all(tensors[i].stride() == stride for i, stride in self._strides)

    def samples(self, tensors: Sequence[Tensor]) -> tuple[list[bytes], list[Tensor]]:
        return list(map(bytes, self._memory)), [_picked(tensors[i]) for i in self._devices]


def _offset(tensor: Tensor, share: float) -> int:
    position = sum(int((n - 1) * share) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return position * tensor.element_size()


def _picked(tensor: Tensor) -> Tensor:
    # Not exercised without a GPU. Stays on the device: only a comparison may wait for it.
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // 4)][:4].clone()


def _are_equal(one: tuple[list[bytes], list[Tensor]], other: tuple[list[bytes], list[Tensor]]) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))
