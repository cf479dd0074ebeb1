"""Writes a part, straight from tensor memory; `piece_digests` proves meanwhile that the tensors stand still."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from migrator.ckpt.digests import block_digest, digest_of_blocks
from migrator.ckpt.manifest import PartRecord
from migrator.ckpt.names import manifest_name
from migrator.ckpt.piece_digests import PieceDigests, StandStill, fetched
from migrator.ckpt.tensor_file import Layout
from migrator.errors import SaveFailed
from migrator.storage.base import Storage


def write_part(
    storage: Storage,
    name: str,
    tensors: Mapping[str, torch.Tensor] | Mapping[str, Callable[[], torch.Tensor]],
    *,
    after_block: Callable[[int, int], None] | None = None,
    hold: Callable[[], bool] = lambda: False,
    still: StandStill | None = None,
    of_tensors: bool = False,
) -> PartRecord:
    """Write `<ckpt>/<part>`; when this returns, its bytes and its name are durable.

    `after_block` is called with the number of bytes written so far, and of all bytes. `hold` says, before each write,
    whether the tensors that it writes stay as they are until this returns: then some storages need no copy. Without
    `still` no digest is computed a second time. `of_tensors`: the record gets the digest of each tensor.
    """
    ckpt, _, part = name.rpartition("/")
    layout = Layout.of({key: fetched(source) for key, source in tensors.items()})
    with (
        storage.upload(name, size=layout.size) as file,
        PieceDigests(layout, tensors, still or StandStill(), of_tensors=of_tensors) as pieces,
    ):
        for group in pieces.groups():
            is_held = hold() and file.takes_later
            file.write(group, hold=is_held)
            pieces.written(is_held=is_held)
            if after_block is not None:
                after_block(file.bytes, layout.size)
        pieces.prove()
        if storage.size(manifest_name(ckpt)) is not None:
            raise SaveFailed(f"the ckpt {ckpt} is committed; its part {part} cannot be written again")
        file.finish()
        pieces.prove(is_finished=True)
    header = (len(layout.header), block_digest([memoryview(layout.header)]))
    return PartRecord(part, layout.size, digest_of_blocks(pieces.blocks), pieces.blocks, header, pieces.of_tensors)
