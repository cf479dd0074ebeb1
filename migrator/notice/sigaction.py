"""What the kernel does at a signal, below what Python knows of it.

A C library may take a signal without Python's knowledge: `signal.getsignal` then still
names the Python handler, and nobody calls it. The call `sigaction` tells, and takes the
signal back, from any thread.

The price: the layout of a C structure is known here. It is the same with glibc and musl
on all machines that torch runs on.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

_POINTER = ctypes.sizeof(ctypes.c_void_p)
_MASK = 128
_SIZE = 512
_NODEFER = 0x40000000


class Action:
    """A copy of the structure."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    @property
    def function(self) -> int:
        """Its address; 0 and 1 stand for the default and for nothing at all."""
        return int.from_bytes(self.data[:_POINTER], sys.byteorder)

    @property
    def calls_on(self) -> bool:
        """Its function raises the signal again for the one before: `faulthandler.register(chain=True)` sets this."""
        flags = int.from_bytes(self.data[_POINTER + _MASK : _POINTER + _MASK + 4], sys.byteorder)
        return bool(flags & _NODEFER)


@functools.cache
def _call() -> Any:
    try:
        return ctypes.CDLL(None).sigaction
    except (OSError, AttributeError):
        return None


def read(number: int) -> Action | None:
    """What is set for the signal; None if that cannot be known here."""
    buffer = ctypes.create_string_buffer(_SIZE)
    if _call() is None or _call()(number, None, buffer) != 0:
        return None
    return Action(buffer.raw)


def write(number: int, action: Action) -> bool:
    """Set it as it was read."""
    return _call() is not None and _call()(number, ctypes.create_string_buffer(action.data, _SIZE), None) == 0
