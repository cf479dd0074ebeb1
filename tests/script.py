"""How a process that was forked from a warm interpreter runs a script as `__main__`, and how it ends.

An interpreter's own end takes apart every module that was ever imported, and then all that torch registered in C++.
In a fork each page of that is copied first: 0.16 s for a script that does nothing, ten times what its life takes. So
the end is made here, up to where the script's own objects are gone: threads, atexit and multiprocessing's
finalizers, the objects of `__main__`, the exit code and its messages. Only what the server
had imported is left to the kernel.

The interpreter's own end is what may go wrong when a thread is still there: the process aborts. So a process with a
thread left over ends the interpreter's way, and so does one that asks for it (`whole_end`).
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib.machinery
import os
import signal
import sys
import threading
import types
from pathlib import Path
from typing import NoReturn


def run_script(*, whole_end: bool) -> NoReturn:
    """`python argv...`, from `sys.argv`, to the end of the process."""
    code = _run(Path(sys.argv[0]))
    if not whole_end:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        if threading.active_count() == 1:
            _forget_main()
            _end(code)
    _exit_as_the_interpreter(code)


def _run(path: Path) -> int:
    """The exit code; what ended the script has been printed."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(
        __file__=str(path),
        __builtins__=builtins,
        __loader__=importlib.machinery.SourceFileLoader("__main__", str(path)),
        __spec__=None,
    )
    try:
        exec(compile(path.read_bytes(), path, "exec"), main.__dict__)
    except SystemExit as left:
        return _exit_code(left)
    except BaseException as error:
        # As the interpreter does: they keep the frames, and all that stands in them, up to the end.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _exit_code(left: SystemExit) -> int:
    if left.code is None:
        return 0
    if isinstance(left.code, int):
        return left.code & 0xFF
    print(left.code, file=sys.stderr)
    return 1


def _forget_main() -> None:
    """The first thing that the interpreter's end takes apart: what the script made, and nobody else holds."""
    sys.last_type = sys.last_value = sys.last_traceback = None
    sys.modules["__main__"] = None  # type: ignore[assignment]
    gc.collect()


def _end(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if code < 0:
        _die_of(-code)
    os._exit(code)


def _exit_as_the_interpreter(code: int) -> NoReturn:
    if code < 0:
        atexit._run_exitfuncs()
        _die_of(-code)
    ctypes.pythonapi.Py_Exit(code)  # `sys.exit` from any depth, whatever stands between here and the first line
    raise AssertionError("not reached")


def _die_of(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
