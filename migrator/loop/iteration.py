"""What tells whether the script's iteration at hand is whole, where the script itself asks for a save.

At the end of a batch it is, whatever happened in it: the script goes on from there. Elsewhere an
exception may have left it half done, such as Ctrl-C within `optimizer.step()`, or an error between
that and `scheduler.step()`.
"""

from __future__ import annotations

import sys


class Iteration:
    def __init__(self) -> None:
        self.stepping: set[int] = set()
        """Optimizers that have begun a step and not ended it."""
        self.is_broken_off = False
        """An exception left the loop after something was trained in its last iteration."""
        self._handled: BaseException | None = None
        """What the script was dealing with already when it got its batch, or at the last safe point."""

    def begins(self) -> None:
        """The loop gets its batch."""
        self._handled = sys.exc_info()[1]

    def is_whole(self) -> None:
        """A safe point: what was before is behind us."""
        self.begins()
        self.is_broken_off = False
        self.stepping.clear()

    def why_not_whole(self) -> str | None:
        """What speaks against a safe point here."""
        if self.stepping:
            return "an optimizer's step was broken off by an exception"
        handled = sys.exc_info()[1]
        if handled is not None and handled is not self._handled:
            return f"the script deals with an exception that came in the middle of an iteration ({handled!r})"
        return "an exception ended the last iteration in its middle" if self.is_broken_off else None
