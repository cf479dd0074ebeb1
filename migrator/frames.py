"""What the frames of the script tell: where in it a loop stands, and how a loop was left.

Python tells an iterator that it is let go, but not why. A `break` or `return` drops the
loop's iterator by an instruction of its own; an exception drops it wherever it is raised.
So the instruction at which the script's frame stands tells the two apart.
"""

from __future__ import annotations

import dis
import functools
import inspect
import os
import sysconfig
from pathlib import Path
from types import CodeType, FrameType

_PACKAGE = __name__.partition(".")[0]
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_LIBRARIES = tuple(os.sep + name + os.sep for name in ("site-packages", "dist-packages"))

_LETS_GO = {"POP_TOP", "POP_ITER", "END_FOR"}
"""Drops the iterator of a `for` that is left by `break` or `return`."""
_ENDS = {"FOR_ITER"}
"""The iterator around ours came to its end, between two batches."""
_SUSPENDED = {"YIELD_VALUE", "RESUME", "SEND", "YIELD_FROM"}
"""A generator of the script's stands at its `yield` and is being let go itself."""
_DELEGATES = {"SEND", "YIELD_FROM"}
_FORGETS_AN_EXCEPTION = {"LOAD_CONST", "STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF", "NOP"} | {
    f"DELETE_{kind}" for kind in ("FAST", "NAME", "GLOBAL", "DEREF")
}
"""What `except ... as error:` does behind its end."""


def is_ours(frame: FrameType) -> bool:
    """The frame belongs to this package."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == _PACKAGE


def is_generator(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & inspect.CO_GENERATOR)


def is_delegating(frame: FrameType) -> bool:
    """The generator stands at a `yield from`: what it hands on it does not see."""
    return _instruction(frame.f_code, frame.f_lasti)[0] in _DELEGATES


def script(frame: FrameType | None) -> FrameType | None:
    """The innermost frame from here on that is not of this package."""
    while frame is not None and is_ours(frame):
        frame = frame.f_back
    return frame


def is_left_at_will(frame: FrameType | None) -> bool:
    """The loop whose iterator is let go in this frame was left by `break` or `return`, not by an exception.

    In doubt it was not: what an exception left is never whole, and a `break` that was not seen costs a safe point.
    """
    frame = script(frame)
    while frame is not None:
        name, before = _instruction(frame.f_code, frame.f_lasti)
        if name in _ENDS:
            return True
        if name in _LETS_GO:
            return before != "POP_EXCEPT"
        if not (is_generator(frame) and name in _SUSPENDED):
            return False
        frame = script(frame.f_back)
    return False


@functools.lru_cache(maxsize=1024)
def _instruction(code: CodeType, last: int) -> tuple[str, str]:
    """The instruction at which a frame stands, and the one before it that does something."""
    at, before = "", ""
    for instruction in dis.get_instructions(code):
        if instruction.offset > last:
            break
        if at not in _FORGETS_AN_EXCEPTION:
            before = at
        at = instruction.opname
    return at, before


def loop_in_script(frame: FrameType | None) -> str:
    """Where in the script an iterator is asked for its next item."""
    frame = script(frame)
    if frame is None:
        return ""
    at, _ = _instruction(frame.f_code, frame.f_lasti)
    return f"{at}#{_which_of(frame.f_code, frame.f_lasti, at)} in {place_in_script(frame)[0]}"


def place_in_script(frame: FrameType | None) -> tuple[str, str]:
    """Where in the script a call of `batches` stands, by a name that is the same in every life, and for people.

    The name holds the functions on the way there, not their lines, so that a line added elsewhere changes nothing.
    Where a function calls another several times, it says which of the calls it is.
    """
    steps: list[str] = []
    called, shown = "batches", ""
    frame = script(frame)
    while frame is not None:
        code = frame.f_code
        if not shown:
            shown = f"{Path(code.co_filename).name}, line {frame.f_lineno}"
        is_top = code.co_name == "<module>"
        if not _is_of_python(code.co_filename):
            file = Path(code.co_filename).name
            steps.append(f"{file}:{code.co_name}:{called}#{_which_call(code, frame.f_lasti, called)}")
        if is_top and frame.f_globals.get("__name__") in ("__main__", "__mp_main__"):
            break
        called, frame = code.co_name, script(frame.f_back)
    return " < ".join(steps), shown


def _is_of_python(file: str) -> bool:
    return file.startswith(_STDLIB) and not any(library in file for library in _LIBRARIES)


@functools.lru_cache(maxsize=1024)
def _which_call(code: CodeType, last: int, name: str) -> int:
    """How often the function names what it calls up to there."""
    named = (i for i in dis.get_instructions(code) if i.offset <= last)
    return sum(i.argval == name and i.opname.startswith("LOAD") for i in named)


@functools.lru_cache(maxsize=1024)
def _which_of(code: CodeType, last: int, opname: str) -> int:
    return sum(i.opname == opname for i in dis.get_instructions(code) if i.offset <= last)
