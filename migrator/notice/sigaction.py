"""The C function that the kernel calls for a signal, read and set by the system call `sigaction`.

A C library may replace the handler of a signal behind Python's back: `signal.getsignal`
then still returns the Python handler, but nobody calls it. `sigaction` shows the real
handler and can restore it, from any thread.

The price: this module depends on the layout of a C structure. It is the same for glibc
and musl on all machines that torch runs on.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

_POINTER = ctypes.sizeof(ctypes.c_void_p)
_MASK = 128
"""Size of the signal mask in the structure, in bytes."""
_SIZE = 512
"""Size of the buffer, in bytes; larger than the structure."""
_NODEFER = 0x40000000
"""The flag SA_NODEFER."""


class Action:
    """A copy of the structure `sigaction`."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    @property
    def function(self) -> int:
        """The address of the handler; 0 is the default (SIG_DFL), 1 is ignore (SIG_IGN)."""
        return int.from_bytes(self.data[:_POINTER], sys.byteorder)

    @property
    def calls_on(self) -> bool:
        """The handler raises the signal again for the previous handler, as `faulthandler.register(chain=True)` does."""
        flags = int.from_bytes(self.data[_POINTER + _MASK : _POINTER + _MASK + 4], sys.byteorder)
        return bool(flags & _NODEFER)


@functools.cache
def _call() -> Any:
    try:
        return ctypes.CDLL(None).sigaction
    except (OSError, AttributeError):
        return None


def read(number: int) -> Action | None:
    """The present action of the signal; None if the C library does not offer the call."""
    buffer = ctypes.create_string_buffer(_SIZE)
    if _call() is None or _call()(number, None, buffer) != 0:
        return None
    return Action(buffer.raw)


def write(number: int, action: Action) -> bool:
    """Set an action that was read before. Whether it succeeded."""
    return _call() is not None and _call()(number, ctypes.create_string_buffer(action.data, _SIZE), None) == 0
