"""What the stack frames of the script show: where in the script a loop is, and how a loop was left.

Python informs an iterator that it is closed, but not why. `break` and `return` drop the
loop's iterator with certain bytecode instructions; an exception drops it at any other
instruction. So the current instruction of the script's frame shows which one it was.
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
"""Instructions that drop the iterator of a `for` loop after `break` or `return`."""
_ENDS = {"FOR_ITER"}
"""An iterator around ours has ended between two batches, or something that it called has failed."""
_SUSPENDED = {"YIELD_VALUE", "RESUME", "SEND", "YIELD_FROM"}
"""A generator of the script is suspended at its `yield` and is being closed itself."""
_FORGETS = ("STORE_", "DELETE_")
"""Prefixes of instructions that drop the value of a variable: an iterator, or an exception whose frames hold one."""
_DELEGATES = {"SEND", "YIELD_FROM"}
"""Instructions of `yield from`."""
_CALLS = {name for name in dis.opmap if name.startswith("CALL")} | {"PRECALL"}
_GOES_ELSEWHERE = {"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE", "FOR_ITER"} | {
    *("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"),
}
"""Instructions after which the next one in the code is not executed next."""


def is_ours(frame: FrameType) -> bool:
    """The frame belongs to this package."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == _PACKAGE


def is_generator(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & inspect.CO_GENERATOR)


def is_delegating(frame: FrameType) -> bool:
    """The generator is at a `yield from`, so it does not see the items."""
    return _instruction(frame.f_code, frame.f_lasti)[0] in _DELEGATES


def script(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that does not belong to this package, from `frame` outwards."""
    while frame is not None and is_ours(frame):
        frame = frame.f_back
    return frame


def is_asked_by_hand(frame: FrameType | None) -> bool:
    """The script calls `next()` itself, directly or through generators, instead of using a `for` loop."""
    frame = script(frame)
    while frame is not None and is_generator(frame) and script(frame.f_back) is not None:
        frame = script(frame.f_back)
    return frame is not None and _instruction(frame.f_code, frame.f_lasti)[0] in _CALLS


def takers(frame: FrameType | None) -> frozenset[int]:
    """The ids of the frames that take a batch: the frame of the loop, and those of generators in between."""
    found: set[int] = set()
    frame = script(frame)
    while frame is not None:
        found.add(id(frame))
        if not is_generator(frame):
            break
        frame = script(frame.f_back)
    return frozenset(found)


def is_left_at_will(frame: FrameType | None, *, took: frozenset[int], may_end: bool = True) -> bool | None:
    """Why the iterator is closed in this frame. True: `break` or `return`; False: an exception; None: not known.

    `took`: the frames that took the last batch. `may_end`: no iterator around ours calls functions of the script, so
    if such an iterator ends, the reason is not an exception.
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
            # A call in a frame that took no batch: a function has returned that held the iterator in a variable. If it
            # had failed, its traceback would still hold the iterator.
            return None if name in _CALLS and id(frame) not in took else False
        frame = script(frame.f_back)
    return False


def is_finalized(frame: FrameType) -> bool:
    """The generator is being finalized because nothing refers to it: an exception would not leave it."""
    caller = frame.f_back
    if not is_generator(frame) or caller is None:
        return False
    name, _ = _instruction(caller.f_code, caller.f_lasti)
    return name in _LETS_GO or name.startswith(_FORGETS) or name == "POP_EXCEPT"


@functools.lru_cache(maxsize=1024)
def _instruction(code: CodeType, last: int) -> tuple[str, bool]:
    """The current instruction of a frame, and whether it follows the end of an `except` or `finally` block."""
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
    """The place in the script where the next item of an iterator is requested."""
    frame = script(frame)
    if frame is None:
        return ""
    at, _ = _instruction(frame.f_code, frame.f_lasti)
    return f"{at}#{_which_of(frame.f_code, frame.f_lasti, at)} in {place_in_script(frame)[0]}"


def place_in_script(frame: FrameType | None) -> tuple[str, str]:
    """The place of a call of `batches` in the script: a name that is the same in every life, and a text for people.

    The name contains the functions on the way to the call but no line numbers, so that a line added elsewhere does not
    change it. If a function calls another one several times, the name contains the number of the call.
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
    """The number of this call among those that use `name`; if the code uses another name, among all calls."""
    before = [i for i in dis.get_instructions(code) if i.offset <= last]
    named = sum(i.argval == name and i.opname.startswith("LOAD") for i in before)
    return str(named) if named else f"call {sum(i.opname in _CALLS for i in before)}"


@functools.lru_cache(maxsize=1024)
def _which_of(code: CodeType, last: int, opname: str) -> int:
    return sum(i.opname == opname for i in dis.get_instructions(code) if i.offset <= last)
