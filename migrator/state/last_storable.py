"""Replaces entries that cannot be stored by their last value that could be stored.

Objects are checked when they are registered, but a dict may change: if a script puts
a `Path` into its metrics, every later save would fail, including the last one. So the
rest of such an object is saved, the entry is logged once, and its newest storable
value is used instead: from the last save, from the loaded ckpt, or from the
registration.

The price: the last trees of these objects stay in memory. Large tensors and arrays
are not kept; an entry that contained one is left out of the ckpt.
"""

from __future__ import annotations

import logging
from typing import Any

from migrator.ckpt import codec
from migrator.errors import RegistrationError
from migrator.events import log

_INLINE_BYTES = 256
"""Maximum size of a tensor that is kept, in bytes."""


class Storable:
    """The last storable trees of registered objects, by name."""

    def __init__(self) -> None:
        self._trees: dict[str, Any] = {}
        self._named: set[str] = set()

    def begin(self, name: str, value: Any) -> None:
        """Keep the value at registration, which can be stored completely."""
        self._trees[name] = codec.encode(
            value, put=lambda tensor, path: None if tensor.nbytes <= _INLINE_BYTES else "", path=name
        )

    def remember(self, name: str, node: Any) -> None:
        """Keep the tree of a loaded ckpt."""
        self._trees[name] = node

    def encode(self, name: str, value: Any, put: codec.Put) -> Any:
        """As `codec.encode`, but an entry of a dict that cannot be stored is replaced instead of refused."""

        def refused(path: str, keys: tuple[Any, ...], error: RegistrationError) -> Any:
            node = _found(self._trees.get(name, codec.OMITTED), keys)
            if path not in self._named:
                self._named.add(path)
                is_kept = node is not codec.OMITTED
                log(
                    "unstorable",
                    level=logging.WARNING,
                    object=name,
                    path=path,
                    why=error,
                    instead="the last value that could be stored is saved" if is_kept else "it is left out of the ckpt",
                )
            return node

        node = self._trees[name] = codec.encode(value, put=put, path=name, on_refused=refused)
        return node


def _found(node: Any, keys: tuple[Any, ...]) -> Any:
    """The node of a tree under these keys; `OMITTED` if there is none, or if its bytes are not in the tree."""
    for key in keys:
        node = codec.entry(node, key)
        if node is codec.OMITTED:
            return node
    return codec.OMITTED if _has_outside_bytes(node) else node


def _has_outside_bytes(node: Any) -> bool:
    if isinstance(node, dict):
        return ("!" in node and "stored" in node) or any(map(_has_outside_bytes, node.values()))
    return isinstance(node, list) and any(map(_has_outside_bytes, node))
