"""How a process that was forked from a warm interpreter runs a script as `__main__`, and how it ends.

An interpreter's own end takes apart every module that was ever imported, and then all that torch registered in C++.
In a fork each page of that is copied first: 0.16 s for a script that does nothing, ten times what its life takes. So
the process is ended here: threads are joined, atexit and multiprocessing's finalizers run, `__main__` is dropped, and
exit code and messages are those of an interpreter. All other modules are not taken apart.

The interpreter's own end may abort if a thread is still running. So a process with a thread left over ends the
interpreter's way, and so does one that asks for it (`whole_end`).
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import gc
import importlib.machinery
import os
import signal
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import NoReturn


def run_script(*, whole_end: bool) -> NoReturn:
    """`python argv...`, from `sys.argv`, to the end of the process."""
    code = _run(Path(sys.argv[0]))
    if not whole_end or code < 0:
        _join_threads()
        atexit._run_exitfuncs()
        if threading.active_count() == 1 or code < 0:
            _forget_main()
            _end(code)
    ctypes.pythonapi.Py_Exit(code)  # `sys.exit` from any depth, whatever stands between here and the first line
    raise AssertionError("not reached")


def _join_threads() -> None:
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except BaseException as error:  # a signal handler's: the interpreter prints it like this, and goes on
        print(f"Exception ignored in: {threading!r}", file=sys.stderr)
        traceback.print_exception(error)


def _run(path: Path) -> int:
    """The exit code; what ended the script has been printed."""
    if not path.is_file():
        print(
            f"{sys.executable}: can't open file {str(path.absolute())!r}: [Errno 2] No such file or directory",
            file=sys.stderr,
        )
        return 2
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
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            code = code or 120  # as the interpreter says that its output is lost
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        code = 128 - code  # the kernel keeps it from process 1
    os._exit(code)
