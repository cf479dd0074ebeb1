"""The exit code of a process whose script ends by itself after a notice.

Training operators take exit code 0 for finished work. A script with a SIGTERM
handler of its own may leave its loop early and end with 0. Its work is not finished,
so the process has to end with the code that requests a restart.

Python offers no way to ask with which code it is about to end. Wrapping `sys.exit` is
not enough: in `sys.exit(main())` the function is looked up before `main()` runs. So
from the notice on, the outermost frame of the script is traced for exceptions, and
only this frame. The price: from the notice to the end, each call of a Python function
in the main thread takes a fraction of a microsecond longer; and under a debugger the
code is not seen.

The exit code is changed at the very end of the process. `os._exit()` in an exit
handler would skip all exit handlers that were registered earlier, and the output
that they flush.
"""

from __future__ import annotations

import ctypes
import dis
import sys
import threading
from types import FrameType
from typing import Any

_in_main_thread = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class ScriptEnd:
    """Notes with which code the script ends."""

    def __init__(self) -> None:
        self._frame: FrameType | None = None
        self._code: object = 0
        # Referenced here, because the interpreter calls it later through a plain pointer.
        self._begin = _in_main_thread(self._trace_script)

    def watch(self) -> None:
        """From now on note the code. Any thread; further calls do nothing."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        names = getattr(sys.modules.get("__main__"), "__dict__", None)
        while frame is not None and not (frame.f_code.co_name == "<module>" and frame.f_globals is names):
            frame = frame.f_back
        if self._frame is not None or frame is None:
            return
        self._frame = frame
        # `sys.settrace` works for the calling thread only.
        if threading.current_thread() is threading.main_thread():
            self._trace_script(None)
        else:
            ctypes.pythonapi.Py_AddPendingCall(self._begin, None)

    def _trace_script(self, _: object) -> int:
        if self._frame is not None and sys.gettrace() is None:
            self._frame.f_trace, self._frame.f_trace_lines = self._on_event, False
            sys.settrace(_trace_no_call)
        return 0

    def _on_event(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "exception" and frame is self._frame:
            self._code = arg[1].code if isinstance(arg[1], SystemExit) else 1

    @property
    def is_zero(self) -> bool:
        """As far as is known, the process is about to end with 0."""
        leaving = sys.exc_info()[1]  # in a child of multiprocessing finalizers run while the exception is handled
        if leaving is not None:
            return isinstance(leaving, SystemExit) and _is_zero(leaving.code)
        if self._frame is not None and _has_returned(self._frame):
            return True  # the script caught the exception that was noted
        return _is_zero(self._code)

    def close(self) -> None:
        """Stop tracing. May be called twice."""
        if self._frame is not None:
            if sys.gettrace() is _trace_no_call:
                sys.settrace(None)
            self._frame.f_trace = None
        self._frame = None


def _trace_no_call(frame: FrameType, event: str, arg: Any) -> None:
    return None


def _is_zero(code: object) -> bool:
    return code is None or (isinstance(code, int) and code & 0xFF == 0)


def _has_returned(frame: FrameType) -> bool:
    """The frame has returned; it was not left by an exception."""
    return frame.f_lasti >= 0 and dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN_")


def end_with(code: int) -> bool:
    """Let the process end in the normal way, but with this code. False: the C library does not support it."""
    try:
        libc = ctypes.CDLL(None)
        register, leave, flush = (getattr(libc, name) for name in ("__cxa_atexit", "_exit", "fflush"))
    except (OSError, AttributeError):
        return False
    register.argtypes = (ctypes.c_void_p,) * 3
    # The function registered last runs first: flush the streams of C, then end.
    is_set = register(ctypes.cast(leave, ctypes.c_void_p), code, None) == 0
    return bool(is_set and register(ctypes.cast(flush, ctypes.c_void_p), None, None) == 0)
