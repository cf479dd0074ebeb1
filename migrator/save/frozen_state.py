"""A capture as it goes into a ckpt: small trees for the manifest, and large tensors for parts.

The large tensors are the live ones. Who holds them is the adapters' answer (`Placement`): what is
replicated is shared out among the ranks, what is per rank each rank writes for itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor

from migrator.ckpt import codec
from migrator.save.context import SaveContext
from migrator.save.results import Unclean
from migrator.state.adapters.base import Adapter, LayoutChanged, Placement
from migrator.state.capture import Capture

INLINE_BYTES = 256
"""Maximum size in bytes of a tensor that stays in the manifest, if its adapter allows it."""
OWN_INLINE_BYTES = 64 << 10
"""With several ranks, maximum size in bytes of all per-rank tensors of a rank that need no file of their own."""


class FrozenState:
    """What one save writes. Raises `Unclean` if the state is not that of the safe point any more."""

    def __init__(self, context: SaveContext, capture: Capture) -> None:
        self._context = context
        self._capture = capture
        self._build(own_inline=False)
        size = sum(self.tensors[key].nbytes for key in self.own)
        if context.size > 1 and (size <= OWN_INLINE_BYTES or not context.writes):
            self._build(own_inline=True)
            self.own.clear()

    def _build(self, *, own_inline: bool) -> None:
        """Make the trees; large tensors stay out of them, those of this rank too unless `own_inline`."""
        self.tensors: dict[str, Tensor] = {}
        """All large tensors, by the name under which a part stores them."""
        self.live: set[str] = set()
        """Those that are read from the script's memory."""
        self.same: dict[str, list[str]] = {}
        """Of each object the replicated tensors."""
        self.own: list[str] = []
        """The tensors that are this rank's own and go to a part."""
        self.objects: dict[str, Any] = {}
        """The trees of everything registered."""
        self.extra: dict[str, Any] = {}
        """The trees of random states and of the place in the loop."""
        self._known: dict[tuple[Any, ...], str | None] = {}
        for name, adapter in self._context.registry:
            self.objects[name] = {"kind": adapter.kind, "tree": self._tree(name, adapter, own_inline)}
        for key, value in (("random", self._capture.random), ("loop", self._capture.loop)):
            put = self._putter(key, None, frozenset(), own_inline)
            self.extra[key] = codec.encode(value, put=put, path=key)

    def _tree(self, name: str, adapter: Adapter, own_inline: bool) -> Any:
        try:
            value = adapter.frozen(self._capture.values[name])
        except (LayoutChanged, RuntimeError, KeyError) as error:
            # The script is changing the object's structure at this moment.
            raise Unclean([name], f"it has not the tensors of the safe point: {error}") from error
        marked = self._capture.marks[name].addresses
        # What is looked up while other weights are swapped in would be written in their stead,
        # though the marks find the right ones back in place a moment later.
        if any(tensor.data_ptr() not in marked for tensor in adapter.standing(value)):
            raise Unclean([name])
        put = self._putter(name, adapter, marked, own_inline)
        if adapter.may_lack:
            return self._context.registry.storable.encode(name, value, put)
        return codec.encode(value, put=put, path=name)

    def _putter(
        self, name: str, adapter: Adapter | None, marked: frozenset[int], own_inline: bool
    ) -> Callable[[Tensor, str], str | None]:
        def put(tensor: Tensor, path: str) -> str | None:
            if tensor.nbytes <= INLINE_BYTES and (adapter is None or adapter.may_inline):
                return None
            # Tied weights are one tensor under two names: stored once.
            kind_of = (tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg())
            same = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), *kind_of)
            if tensor.data_ptr() and same in self._known:
                return self._known[same]
            is_live = tensor.data_ptr() in marked
            placement = Placement.PER_RANK if adapter is None else adapter.placement(tensor, is_live=is_live)
            is_own = placement is Placement.PER_RANK
            if is_own and own_inline:
                return None
            stored = _stored_name(name, path)
            if is_own and self._context.rank:
                stored = f"!{self._context.rank}/{stored}"
            while stored in self.tensors:
                stored += "'"
            # A second handle: the script may exchange `.data` while this one is being written.
            self.tensors[stored] = tensor.detach()
            self._known[same] = stored
            if is_live:
                self.live.add(stored)
            if is_own:
                self.own.append(stored)
            else:
                self.same.setdefault(name, []).append(stored)
            return stored

        return put


def owners(stored: list[str]) -> list[str]:
    """The registered names that these tensors belong to. What is rank 1's own is stored as `!1/...`."""
    return sorted({key.split("/")[1 if key.startswith("!") else 0] for key in stored})


def _stored_name(name: str, path: str) -> str:
    """`model['fc.weight']` is stored as `model/fc.weight`, `optimizer.state[0]` as `optimizer/state[0]`."""
    rest = path.removeprefix(name)
    match = re.fullmatch(r"\['([^']*)'\]", rest)
    return f"{name}/{match.group(1) if match else rest.removeprefix('.')}"
