"""Writes a part, straight from tensor memory.

Each tensor is fetched only when its turn comes, and a large one again for each slice: in
between the caller may have copied it and let the training loop change the live one.

The digest of a piece is taken *before* the piece is written. So if a tensor still has
that digest at the end, the file holds what the digest says: every change in between is
seen, unless it was undone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import xxhash

from migrator.ckpt.digests import Digest, block_digest
from migrator.ckpt.manifest import PartRecord
from migrator.ckpt.names import manifest_name
from migrator.ckpt.tensor_file import Layout, Place, memory, on_cpu
from migrator.errors import SaveFailed
from migrator.storage.base import Storage

GROUP = 64 << 20
"""Bytes that one call writes at least, if there are so many."""
SLICE = 256 << 20
"""Bytes of a tensor that one call writes at most."""


def write_part(
    storage: Storage,
    name: str,
    tensors: Mapping[str, torch.Tensor] | Mapping[str, Callable[[], torch.Tensor]],
    *,
    after_block: Callable[[int, int], None] | None = None,
    hold: Callable[[], bool] = lambda: False,
) -> PartRecord:
    """Write `<ckpt>/<part>`; when this returns, its bytes and its name are durable.

    `after_block` is called with the number of bytes written so far, and of all bytes. `hold` says, before each write,
    whether the tensors that it writes stay as they are until this returns: then some storages need no copy.
    """
    ckpt, _, part = name.rpartition("/")
    layout = Layout.of({key: _fetched(source) for key, source in tensors.items()})
    digest, tensor_digests = Digest(), _TensorDigests()
    with storage.upload(name, size=layout.size) as file:
        front = [memoryview(layout.header)]
        for group in _groups(layout.places) or [[]]:
            buffers = front + [tensor_digests.piece(tensors[p.name], p, a, b) for p, a, b in group]
            for buffer in buffers:
                digest.update(buffer)
            file.write(buffers, hold=hold())
            front = []
            if after_block is not None:
                after_block(file.bytes, layout.size)
        if storage.size(manifest_name(ckpt)) is not None:
            raise SaveFailed(f"the ckpt {ckpt} is committed; its part {part} cannot be written again")
        file.finish()
    whole, blocks = digest.finish()
    header = (len(layout.header), block_digest([memoryview(layout.header)]))
    return PartRecord(part, layout.size, whole, blocks, header, tensor_digests.done())


class _TensorDigests:
    """The pieces of tensors in the order of writing, and the digests of the tensors."""

    def __init__(self) -> None:
        self._digests: dict[str, Any] = {}
        self._copies: dict[str, torch.Tensor] = {}

    def piece(self, source: Any, place: Place, start: int, end: int) -> memoryview:
        tensor = self._copies.get(place.name)
        if tensor is None:
            live = _fetched(source)
            if live.dtype != place.dtype or tuple(live.shape) != place.shape:
                raise SaveFailed(
                    f"{place.name} was {place.dtype} of shape {place.shape} when its save began "
                    f"and is {live.dtype} of shape {tuple(live.shape)} now; the attempt is of no use"
                )
            tensor = on_cpu(live)
            # A tensor that has to be copied is copied once, not for each slice.
            if tensor.data_ptr() != live.data_ptr() and end - start < place.end - place.start:
                self._copies = {place.name: tensor}
        piece = memory(tensor)[start:end]
        self._digests.setdefault(place.name, xxhash.xxh3_64()).update(piece)
        return piece

    def done(self) -> dict[str, bytes]:
        return {name: digest.digest() for name, digest in self._digests.items()}


def _groups(places: tuple[Place, ...]) -> list[list[tuple[Place, int, int]]]:
    """What each write call writes: (tensor, first byte, last byte + 1), together at least GROUP bytes."""
    groups: list[list[tuple[Place, int, int]]] = []
    room = 0
    for place in places:
        size = place.end - place.start
        for start in range(0, max(size, 1), SLICE):
            end = min(size, start + SLICE)
            if room <= 0:
                groups.append([])
                room = GROUP
            groups[-1].append((place, start, end))
            room -= end - start
    return groups


def _fetched(source: Any) -> torch.Tensor:
    tensor = source if isinstance(source, torch.Tensor) else source()
    return tensor.detach()
