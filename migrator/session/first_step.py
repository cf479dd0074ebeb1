"""What has to be in order before the first step of a life: mistakes that would cost what was trained."""

from __future__ import annotations

import logging

from migrator.errors import ResumeIgnored, UsageError
from migrator.events import log
from migrator.loop.gate import Gate, Phase
from migrator.session.candidates import Candidates
from migrator.session.start import group_size
from migrator.settings import Settings
from migrator.state.adapters import comm_hooks
from migrator.state.registry import Registry


class FirstStep:
    """Raises, or logs, what is wrong before anything is trained."""

    def __init__(
        self, settings: Settings, registry: Registry, candidates: Candidates, gate: Gate, *, has_other_ranks: bool
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._candidates = candidates
        self._gate = gate
        self._has_other_ranks = has_other_ranks
        self._has_checked_comm_hooks = False

    def before_safe_point(self) -> None:
        if self._gate.phase is Phase.FRESH:
            # Not everything that trains does it by an optimizer, so this is asked before a safe point as well.
            self._check_resume_was_not_ignored()
        self._check_no_group_was_made()

    def before_step(self) -> None:
        self.before_safe_point()
        self._check_comm_hooks()

    def _check_resume_was_not_ignored(self) -> None:
        if self._candidates.can_load and not self._gate.is_leaving:
            raise ResumeIgnored(
                f"there is a ckpt to go on from ({self._candidates.newest} under {self._candidates.root}), but the "
                "script did not load it and is about to train from the start. After listening(), add:\n"
                "    if migrator.resume:\n        migrator.load_ckpt()\n"
                "Or start over knowingly: MIGRATOR_RESUME=never."
            )

    def _check_no_group_was_made(self) -> None:
        if self._has_other_ranks or self._settings.ranks != "auto" or self._gate.is_leaving:
            return
        if (size := group_size()) > 1:
            raise UsageError(
                f"a process group of {size} ranks was made after listening(): this rank would save and load as a job "
                "by itself, beside the others. Call torch.distributed.init_process_group() before listening(). If "
                "each rank is a job by itself, say so: MIGRATOR_RANKS=1."
            )

    def _check_comm_hooks(self) -> None:
        """DDP modules are often made after `register()`, and their communication hooks later still."""
        if not self._has_other_ranks or self._has_checked_comm_hooks:
            return
        self._has_checked_comm_hooks = True
        for found in comm_hooks.in_use():
            name = self._registry.named(found.state)
            if name is None:
                log(
                    "comm_hook_not_saved",
                    level=logging.WARNING,
                    hook=found.hook,
                    state=type(found.state).__name__,
                    means="this communication hook of DDP's keeps a state that is not registered, and begins anew "
                    'after a resume: call migrator.register("comm_hook", state)',
                )
            elif isinstance(kind := self._registry[name], comm_hooks.HookState):
                kind.met(found.module)
