"""Detects that a tensor has changed outside `optimizer.step()`.

A save reads large tensors while the script goes on, because they do not change
between a safe point and the next step. Some loops do change them: EMA weights that
are swapped in for an evaluation, a target network, a momentum encoder. So a safe
point records the version counter and the address of each tensor, and a few bytes of
some tensors: writing through `.data` changes neither counter nor address.

The price is about 0.1 us per tensor, and 0.2 us per sample.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

SAMPLED_TENSORS = 32
"""Maximum number of tensors of an object of which bytes are sampled."""
SAMPLE_BYTES = 8
"""Maximum size of a sample in the middle of a tensor, in bytes."""


class Mark:
    """Versions, addresses and samples of the tensors of one object at a safe point."""

    __slots__ = ("_addresses", "_places", "_samples", "_versions")

    def __init__(self, tensors: Sequence[Tensor], before: Mark | None = None) -> None:
        self._versions = _versions(tensors)
        self._addresses = list(map(Tensor.data_ptr, tensors))
        # The places of the samples are the same while the addresses are, and finding them is most of the cost.
        self._places: _Places
        if before is not None and before._addresses == self._addresses and before._places.fit(tensors):
            self._places = before._places
        else:
            self._places = _Places(tensors)
        self._samples = self._places.samples(tensors)

    def differs(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a tensor was replaced, written to or resized since."""
        # These references keep the memory alive, because the main thread may replace a `.data` meanwhile.
        held = [tensor.detach() for tensor in tensors]
        if list(map(Tensor.data_ptr, held)) != self._addresses or not self._places.fit(held):
            return True
        if _versions(tensors) != self._versions:
            return True
        return not _are_equal(self._places.samples(held), self._samples)

    def has_only_moved(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors were put in the places of others, and the others hold what they held.

        Somebody has to keep the memory of the others alive.
        """
        if len(tensors) != len(self._addresses) or any(tensor.device.type != "cpu" for tensor in tensors):
            return False
        stayed = [i for i, tensor in enumerate(tensors) if tensor.data_ptr() == self._addresses[i]]
        if _versions([tensors[i] for i in stayed]) != [self._versions[i] for i in stayed]:
            return False
        return self._places.samples([])[0] == self._samples[0]

    @property
    def addresses(self) -> frozenset[int]:
        """The addresses of the tensors."""
        return frozenset(self._addresses)


class Contents:
    """The contents of tensors that the script changes without an optimizer.

    Small tensors are compared completely, because a step may change a single element of a table.
    """

    SMALL_BYTES = 64 * 1024
    """Maximum size of a tensor that is compared completely, in bytes."""

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
    except RuntimeError:  # tensors made under inference_mode() have no counter
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


class _Places:
    """The places of the samples: addresses in CPU memory, and elements of device tensors.

    Read them only after checking that the tensors still have these addresses and sizes.
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
            # Also the first element: an operation under way has begun there and has not counted the version yet.
            middle, last = (_offset(tensor, share) for share in (0.5, 1.0))
            # In the middle of a contiguous tensor several elements in one sample, but never beyond the last one.
            at_middle = min(SAMPLE_BYTES, last + size - middle) if tensor.is_contiguous() else size
            for offset, length in ((0, size), (middle, at_middle), (last, size)):
                self._memory.append((ctypes.c_char * length).from_address(tensor.data_ptr() + offset))

    def fit(self, tensors: Sequence[Tensor]) -> bool:
        """Whether sizes and strides are the same: a smaller tensor may have got the address of a freed one."""
        is_as_large = [tensors[i].nbytes for i in self._chosen] == self._sizes
        return is_as_large and all(tensors[i].stride() == stride for i, stride in self._strides)

    def samples(self, tensors: Sequence[Tensor]) -> tuple[list[bytes], list[Tensor]]:
        return list(map(bytes, self._memory)), [_picked(tensors[i]) for i in self._devices]


def _offset(tensor: Tensor, share: float) -> int:
    position = sum(int((n - 1) * share) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return position * tensor.element_size()


def _picked(tensor: Tensor) -> Tensor:
    # Not tested without a GPU. The samples stay on the device, so that only a comparison waits for it.
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // 4)][:4].clone()


def _are_equal(one: tuple[list[bytes], list[Tensor]], other: tuple[list[bytes], list[Tensor]]) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))
