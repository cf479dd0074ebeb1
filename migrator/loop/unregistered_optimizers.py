"""Optimizers that step although they are not registered: their momentum would not be in the ckpt."""

from __future__ import annotations

import logging

import torch

from migrator.events import log
from migrator.state.registry import Registry


class UnregisteredOptimizers:
    """Logs each optimizer that changes registered parameters and whose own state nobody saves."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._known: set[int] = {id(optimizer) for optimizer in registry.optimizers()}
        self._unproven: dict[int, str] = {}
        """By the optimizer's id: what it changes. Whether its state is saved is known after its first step."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer that steps for the first time, if it changes something registered."""
        if id(optimizer) in self._known:
            return
        self._known.add(id(optimizer))
        params = (param for group in optimizer.param_groups for param in group["params"])
        owner = self._registry.owner_of(params)
        if owner is not None:
            self._unproven[id(optimizer)] = owner

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The first step makes the optimizer's state: a registered wrapper may save it."""
        changes = self._unproven.pop(id(optimizer), None)
        if changes is not None and not self._registry.saves_state_of(optimizer):
            log(
                "unregistered_optimizer",
                level=logging.WARNING,
                optimizer=type(optimizer).__name__,
                changes=changes,
                means="its own state is not saved: register it as well",
            )
