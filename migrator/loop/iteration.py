"""Whether the script's present iteration is whole, where the script itself asks for a save.

At the end of a batch it is whole, whatever happened in it, because the script goes on from there.
Elsewhere an exception may have left it half done: Ctrl-C within `optimizer.step()`, or an error
between that and `scheduler.step()`.
"""

from __future__ import annotations

import sys


class Iteration:
    """The iteration that the script is in."""

    def __init__(self) -> None:
        self.stepping: set[int] = set()
        """Optimizers whose step has begun and has not ended."""
        self.is_broken_off = False
        """An exception ended the last iteration after something was trained in it."""
        self._handled: BaseException | None = None
        """The exception that the script was already handling when it got its batch, or at the last safe point."""

    def begins(self) -> None:
        """The loop gets its next batch."""
        self._handled = sys.exc_info()[1]

    def is_whole(self) -> None:
        """At a safe point: whatever was broken off before does not matter any more."""
        self.begins()
        self.is_broken_off = False
        self.stepping.clear()

    def why_not_whole(self) -> str | None:
        """Why there can be no safe point here; None: nothing speaks against it."""
        if self.stepping:
            return "an optimizer's step was broken off by an exception"
        handled = sys.exc_info()[1]
        if handled is not None and handled is not self._handled:
            return f"the script deals with an exception that came in the middle of an iteration ({handled!r})"
        return "an exception ended the last iteration in its middle" if self.is_broken_off else None
