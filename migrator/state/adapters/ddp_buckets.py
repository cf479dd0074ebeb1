"""How DDP packs gradients into buckets, and how PowerSGD's memory is moved to other buckets.

Each life of a job starts with buckets in the order of the parameters. After the first
step DDP rebuilds them, in the order in which gradients were ready. PowerSGD's memory
is one flat tensor per bucket. So it is split by parameter and concatenated again in
the order of the present buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Packing = list[list[int]]
"""For each bucket the numbers of its parameters, in the order of the bucket."""
Memories = dict[str, dict[int, Tensor]]


def packing(module: Any) -> Packing:
    """How a DDP module packs its gradients now."""
    number = {id(param): place for place, param in enumerate(module.parameters())}
    buckets = sorted(module.reducer._get_zeros_like_grad_buckets(), key=lambda bucket: bucket.index())
    return [[number[id(param)] for param in bucket.parameters()] for bucket in buckets]


def has_packed_anew(module: Any) -> bool:
    return bool(module._get_ddp_logging_data().get("has_rebuilt_buckets"))


def packs_anew(module: Any) -> bool:
    """Whether the module rebuilds its buckets after the first step, or has done so."""
    return bool(getattr(module, "static_graph", False) or not module.find_unused_parameters)


def moved(state: Any, module: Any, memories: Memories, before: Packing, after: Packing) -> Memories | None:
    """PowerSGD's memories of the buckets `before`, arranged for the buckets `after`; None if they do not fit
    `before`."""
    shapes = [tuple(param.shape) for param in module.parameters()]
    found: Memories = {}
    for name, memory in memories.items():
        pieces: dict[int, Tensor] = {}
        for index, tensor in memory.items():
            if not 0 <= index < len(before) or any(not 0 <= number < len(shapes) for number in before[index]):
                return None
            sizes = _sizes(state, name, before[index], shapes)
            if sum(sizes.values()) != tensor.numel():
                return None
            pieces.update(zip(sizes, torch.split(tensor, list(sizes.values())), strict=True))
        there = {index: list(_sizes(state, name, numbers, shapes)) for index, numbers in enumerate(after)}
        if memory and {number for numbers in there.values() for number in numbers} != pieces.keys():
            return None
        like = next(iter(memory.values()), torch.empty(0))
        found[name] = {
            index: torch.cat([pieces[number] for number in numbers]) if numbers else like.new_empty(0)
            for index, numbers in (there if memory else {}).items()
        }
    return found


def _sizes(state: Any, name: str, numbers: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> dict[int, int]:
    """The parameters in a bucket's memory, in their order there, with the number of elements of each."""
    if name == "error_dict":
        return {number: torch.Size(shapes[number]).numel() for number in numbers}
    by_shape: dict[tuple[int, int], dict[int, int]] = {}
    for number in numbers:
        rows = shapes[number][0] if shapes[number] else 1
        columns = torch.Size(shapes[number]).numel() // max(1, rows)
        rank = min(rows, columns, state.matrix_approximation_rank)
        # The same condition as in the hook, for compressed gradients. Gradients of one shape are stored together.
        if (rows + columns) * rank * state.min_compression_rate < rows * columns:
            size = (rows if name == "p_memory_dict" else columns) * rank
            by_shape.setdefault((rows, columns), {})[number] = size
    return {number: size for group in by_shape.values() for number, size in group.items()}
