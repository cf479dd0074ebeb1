"""Scripts that change registered tensors themselves, without any optimizer.

No hook is called for such a step. So, as long as no optimizer has stepped, the contents of
the registered tensors are compared at the end of each batch.

While an optimizer has yet to step, a change of other tensors is no step: a buffer that the
script fills with each batch changes too while gradients are accumulated, and a safe point
there would lose these gradients. So if an optimizer is registered, or the parameters of a
registered module have gradients, only a change of these parameters counts.
"""

from __future__ import annotations

from torch import Tensor

from migrator.events import log
from migrator.loop.gate import Gate
from migrator.state.capture import Capturer
from migrator.state.change_detector import Contents
from migrator.state.registry import Registry


class TrainingByHand:
    """Whether registered tensors have changed since they were looked at last."""

    def __init__(self, registry: Registry, capturer: Capturer, gate: Gate) -> None:
        self._registry = registry
        self._capturer = capturer
        self._gate = gate
        self._contents: dict[str, Contents] | None = None
        self._parameters: Contents | None = None

    def watch(self) -> None:
        """The first batch is about to be handed out: from now on changes count."""
        if self._contents is None:
            self._look()

    @property
    def has_trained(self) -> bool:
        """Registered tensors have changed since then."""
        if self._contents is None or self._parameters is None:
            return False
        if self._parameters.differ(self._learned()):
            return True
        return not self._awaits_optimizer() and self._capturer.have_changed(self._contents)

    def follow(self) -> None:
        """What has changed until now is a step; from now on the next one is watched for."""
        self._look()
        if not self._gate.holds_main:
            # The gate cannot hold back such a step while a save reads, so the main thread has to stay in safe points.
            self._gate.holds_main = True
            log("trained_by_hand", means="no optimizer steps: each batch in which registered tensors change is a step")

    def _look(self) -> None:
        self._contents = self._capturer.contents()
        self._parameters = Contents(self._learned())

    def _learned(self) -> list[Tensor]:
        """What an optimizer would change: the parameters of the registered ones, or of the registered modules."""
        groups = [group for optimizer in self._registry.optimizers() for group in optimizer.param_groups]
        if groups:
            return [param for group in groups for param in group["params"]]
        return [param for module in self._registry.modules() for param in module.parameters()]

    def _awaits_optimizer(self) -> bool:
        if any(optimizer.param_groups for optimizer in self._registry.optimizers()):
            return True
        return any(param.grad is not None for param in self._learned())
