"""The next forward pass of a registered module: where an unmarked loop begins its next iteration.

A global hook of torch is there only from an optimizer's step to that forward pass. A hook on the
script's own module would be copied and pickled with it, and `torch.jit.script` would compile it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from migrator.state.registry import Registry


class NextForward:
    """Calls back once, in the thread that made it, before a registered module trains its next batch."""

    def __init__(self, registry: Registry, on_forward: Callable[[], None]) -> None:
        self._on_forward = on_forward
        self._roots = {id(module) for module in registry.modules()}
        self._thread = threading.get_ident()
        self._hook: Any = None
        self.is_off = False
        """Nothing is called back any more."""

    def wait(self) -> None:
        """Call back at the next forward pass."""
        if self._hook is None and self._roots:
            # torch warns of global hooks whenever a compiled module is called. This hook looks for just that call,
            # and does nothing if it is called twice.
            warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
            self._hook = register_module_forward_pre_hook(self._before_forward)

    def stop(self) -> None:
        """Do not wait any more."""
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self.is_off:
            return
        root = getattr(module, "_orig_mod", module)
        if root.training and id(root) in self._roots and threading.get_ident() == self._thread:
            # Before anything else: code that was compiled without a hook would be compiled again.
            self.stop()
            self._on_forward()
