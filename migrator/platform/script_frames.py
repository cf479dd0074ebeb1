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
from pathlib import Path
from types import CodeType, FrameType

_PACKAGE = __name__.partition(".")[0]
_STDLIB = str(Path(os.__file__).parent) + os.sep
_LIBRARIES = tuple(os.sep + name + os.sep for name in ("site-packages", "dist-packages"))

_LETS_GO = {"POP_TOP", "POP_ITER", "END_FOR"}
"""Drops the iterator of a `for` that is left by `break` or `return`."""
_ENDS = {"FOR_ITER"}
"""What stands around our iterator came to its end, between two batches; or what it called failed."""
_SUSPENDED = {"YIELD_VALUE", "RESUME", "SEND", "YIELD_FROM"}
"""A generator of the script's stands at its `yield` and is being let go itself."""
_FORGETS = ("STORE_", "DELETE_")
"""Drops what a variable held, an iterator or the exception whose frames hold one."""
_DELEGATES = {"SEND", "YIELD_FROM"}
"""A generator that hands on what another one yields."""
_CALLS = {name for name in dis.opmap if name.startswith("CALL")} | {"PRECALL"}
_GOES_ELSEWHERE = {"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE", "FOR_ITER"} | {
    *("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"),
}
"""Nothing gets past these to what follows them."""


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


def is_asked_by_hand(frame: FrameType | None) -> bool:
    """The script calls `next()` itself; no `for` stands at the end of whatever is in between."""
    frame = script(frame)
    while frame is not None and is_generator(frame) and script(frame.f_back) is not None:
        frame = script(frame.f_back)
    return frame is not None and _instruction(frame.f_code, frame.f_lasti)[0] in _CALLS


def takers(frame: FrameType | None) -> frozenset[int]:
    """The frames that take a batch, by their ids: the loop's, and those of generators in between."""
    found: set[int] = set()
    frame = script(frame)
    while frame is not None:
        found.add(id(frame))
        if not is_generator(frame):
            break
        frame = script(frame.f_back)
    return frozenset(found)


def is_left_at_will(frame: FrameType | None, *, took: frozenset[int], may_end: bool = True) -> bool | None:
    """Why the iterator is let go in this frame: True: by `break` or `return`, False: by an exception, None: not known.

    `took`: the frames that took the last batch. `may_end`: nothing around the iterator calls functions of the
    script's, so that its end is an end and no exception.
    """
    frame = script(frame)
    while frame is not None:
        name, follows_exception = _instruction(frame.f_code, frame.f_lasti)
        if name in _ENDS:
            return may_end
        if name in _LETS_GO:
            return not follows_exception
        if name.startswith(_FORGETS):
            return False if follows_exception else None
        if not (is_generator(frame) and name in _SUSPENDED):
            # A call in a frame that took none: a function ended that held the iterator in a variable. Had it failed,
            # its traceback would hold it.
            return None if name in _CALLS and id(frame) not in took else False
        frame = script(frame.f_back)
    return False


def is_let_go(frame: FrameType) -> bool:
    """A generator runs its last lines because nobody holds it any more: an exception would get no further."""
    caller = frame.f_back
    if not is_generator(frame) or caller is None:
        return False
    name, _ = _instruction(caller.f_code, caller.f_lasti)
    return name in _LETS_GO or name.startswith(_FORGETS) or name == "POP_EXCEPT"


@functools.lru_cache(maxsize=1024)
def _instruction(code: CodeType, last: int) -> tuple[str, bool]:
    """The instruction at which a frame stands, and whether it is on the way out of an `except` or `finally`."""
    at, follows_exception = "", False
    for instruction in dis.get_instructions(code):
        if instruction.offset > last:
            break
        if at in _GOES_ELSEWHERE:
            follows_exception = False
        follows_exception |= at == "POP_EXCEPT"
        at = instruction.opname
    return at, follows_exception


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
def _which_call(code: CodeType, last: int, name: str) -> str:
    """How often the function names what it calls up to there; if it has another name for it, how often it calls."""
    before = [i for i in dis.get_instructions(code) if i.offset <= last]
    named = sum(i.argval == name and i.opname.startswith("LOAD") for i in before)
    return str(named) if named else f"call {sum(i.opname in _CALLS for i in before)}"


@functools.lru_cache(maxsize=1024)
def _which_of(code: CodeType, last: int, opname: str) -> int:
    return sum(i.opname == opname for i in dis.get_instructions(code) if i.offset <= last)
