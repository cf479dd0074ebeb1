"""How long a busy thread may keep the interpreter's lock while another one waits for it: Python's switch interval."""

from __future__ import annotations

import sys
import threading


class SwitchInterval:
    """Made shorter for a while. It is one for the whole process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._usual_s: float | None = None
        """What it was before; None: it was not changed."""

    def shorten(self, at_most_s: float) -> None:
        """Until `restore()`. May be called again with another time."""
        with self._lock:
            before_s = sys.getswitchinterval()
            if self._usual_s is None:
                self._usual_s = before_s
            sys.setswitchinterval(min(before_s, at_most_s))

    def restore(self) -> None:
        """Make it what it was before the first `shorten()`. Without one nothing happens."""
        with self._lock:
            usual_s, self._usual_s = self._usual_s, None
            if usual_s is not None:
                sys.setswitchinterval(usual_s)
