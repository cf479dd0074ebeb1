"""Ranks that come to the end of their inputs at different times: torch's `Join` around a training loop.

Inside `Join`, a rank that has no inputs left takes part in empty collectives while the others make further steps. Its
model, its optimizer and the number of its steps stay those of an earlier step, so there is no step that all ranks could
save together. That is refused at the first step inside such a block, before anything is trained.

The price: `__enter__` and `__exit__` of `Join` are replaced as long as a session of several ranks is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from migrator.errors import UsageError

_REFUSAL = (
    "an optimizer steps inside of torch's Join (`with Join([...])`, `model.join()`). There a rank that has no inputs "
    "left stays behind while the others go on, so there is no one step that all ranks could save. Give all ranks "
    "equally many batches, by an ElasticSampler or a DistributedSampler, and leave Join out, or set its enable=False."
)


def _parameters(joined: Any) -> Iterable[Tensor]:
    return joined.parameters() if isinstance(joined, nn.Module) else ()


class UnevenInputs:
    """The open blocks of `Join` in this process that join something registered."""

    def __init__(self, is_registered: Callable[[Iterable[Tensor]], bool]) -> None:
        from torch.distributed.algorithms.join import Join

        self._join = Join
        self._before: tuple[Any, Any] = Join.__enter__, Join.__exit__
        enter, leave = self._before
        self._open: set[int] = set()

        def is_ours(join: Any) -> bool:
            return bool(join._enable) and any(is_registered(_parameters(joined)) for joined in join._joinables)

        def entered(join: Any) -> Any:
            found = enter(join)  # type: ignore[no-untyped-call]
            if is_ours(join):
                self._open.add(id(join))
            return found

        def left(join: Any, *how: Any) -> Any:
            self._open.discard(id(join))
            return leave(join, *how)

        Join.__enter__, Join.__exit__ = entered, left  # type: ignore[method-assign]

    def check(self) -> None:
        """Before an optimizer's step: raise if it is inside such a block."""
        if self._open:
            raise UsageError(_REFUSAL)

    def remove(self) -> None:
        self._join.__enter__, self._join.__exit__ = self._before  # type: ignore[method-assign]
