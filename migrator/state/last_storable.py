"""The last value that could be stored of what cannot be stored any more.

What is registered is checked, but a dict goes on: a script puts a `Path` into its
metrics, and every later save would fail for it, the last one too. So in such
objects the rest is saved, the entry is named once, and its last storable value
stands for it: that of the last save, of the ckpt that was loaded, or of the
registration, whichever is the newest.

The price: the last trees of these objects stay in memory. Large tensors and arrays
do not; an entry that held one is left out.
"""

from __future__ import annotations

import logging
from typing import Any

from migrator.ckpt import codec as tree
from migrator.errors import RegistrationError
from migrator.events import log

_INLINE_BYTES = 256


class Storable:
    """The last trees of registered objects, by name."""

    def __init__(self) -> None:
        self._trees: dict[str, Any] = {}
        self._named: set[str] = set()

    def begin(self, name: str, value: Any) -> None:
        """The value at registration, all of which can be stored."""
        self._trees[name] = tree.encode(
            value, put=lambda tensor, path: None if tensor.nbytes <= _INLINE_BYTES else "", path=name
        )

    def remember(self, name: str, node: Any) -> None:
        """The tree of a ckpt."""
        self._trees[name] = node

    def encode(self, name: str, value: Any, put: tree.Put) -> Any:
        """As `tree.encode`, but for an entry of a dict that cannot be stored."""

        def refused(path: str, keys: tuple[Any, ...], error: RegistrationError) -> Any:
            node = _found(self._trees.get(name, tree.OMITTED), keys)
            if path not in self._named:
                self._named.add(path)
                is_kept = node is not tree.OMITTED
                log(
                    "unstorable",
                    level=logging.WARNING,
                    object=name,
                    path=path,
                    why=error,
                    instead="the last value that could be stored is saved" if is_kept else "it is left out of the ckpt",
                )
            return node

        node = self._trees[name] = tree.encode(value, put=put, path=name, on_refused=refused)
        return node


def _found(node: Any, keys: tuple[Any, ...]) -> Any:
    """What a tree holds under these keys; `OMITTED` if nothing, or something whose bytes are elsewhere."""
    for key in keys:
        node = tree.entry(node, key)
        if node is tree.OMITTED:
            return node
    return tree.OMITTED if _is_elsewhere(node) else node


def _is_elsewhere(node: Any) -> bool:
    if isinstance(node, dict):
        return ("!" in node and "stored" in node) or any(map(_is_elsewhere, node.values()))
    return isinstance(node, list) and any(map(_is_elsewhere, node))
