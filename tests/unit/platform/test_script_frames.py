"""How a loop was left, and where in the script it stands."""

from __future__ import annotations

import contextlib
import io
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

import pytest
from tqdm import tqdm

from migrator.platform import script_frames


@pytest.fixture
def seen() -> list[bool | None]:
    return []


class Numbers:
    """As `batches()` does it: an iterable, so that the loop alone holds the iterator."""

    def __init__(self, seen: list[bool | None], *, may_end: bool = True) -> None:
        self._seen = seen
        self._may_end = may_end

    def __iter__(self) -> Iterator[int]:
        for number in range(5):
            took = script_frames.takers(sys._getframe().f_back)
            try:
                yield number
            except GeneratorExit:
                why = script_frames.is_left_at_will(sys._getframe().f_back, took=took, may_end=self._may_end)
                self._seen.append(why)
                raise


class Around:
    def __init__(self, numbers: Numbers, wrap: Callable[[Iterable[int]], Iterable[int]]) -> None:
        self._numbers, self._wrap = numbers, wrap

    def __iter__(self) -> Iterator[int]:
        return iter(self._wrap(self._numbers))


def passed_on(batches: Iterable[int]) -> Iterator[int]:
    for batch in batches:  # noqa: UP028 "yield from" is another case
        yield batch


def delegated(batches: Iterable[int]) -> Iterator[int]:
    yield from batches


def failing(batches: Iterable[int]) -> Iterator[int]:
    for batch in batches:
        yield batch
        raise ValueError


def by_break(loop: Iterable[int]) -> None:
    for x in loop:
        if x == 2:
            break


def in_enumerate(loop: Iterable[int]) -> None:
    for i, _ in enumerate(loop):
        if i == 2:
            break


def by_return(loop: Iterable[int]) -> int | None:
    for x in loop:
        if x == 2:
            return x
    return None


def by_return_of_a_call(loop: Iterable[int]) -> list[int] | None:
    for x in loop:
        if x == 2:
            return [x, len("a")]
    return None


def through_finally(loop: Iterable[int]) -> None:
    for x in loop:
        try:
            if x == 2:
                break
        finally:
            pass


def through_with(loop: Iterable[int]) -> None:
    for x in loop:
        with contextlib.nullcontext():
            if x == 2:
                break


def behind_an_exception_that_was_dealt_with(loop: Iterable[int]) -> None:
    done = False
    for _ in loop:
        try:
            raise ValueError
        except ValueError:
            done = True
        if done:
            break


def by_a_slice(loop: Iterable[int]) -> None:
    for _ in itertools.islice(loop, 2):
        pass


def by_a_zip(loop: Iterable[int]) -> None:
    for _ in zip(loop, range(2), strict=False):
        pass


AT_WILL = [
    by_break,
    in_enumerate,
    by_return,
    by_return_of_a_call,
    through_finally,
    through_with,
    behind_an_exception_that_was_dealt_with,
    by_a_slice,
    by_a_zip,
]


def raising(loop: Iterable[int]) -> None:
    for x in loop:
        if x == 2:
            raise ValueError


def in_a_statement(loop: Iterable[int]) -> None:
    for _ in loop:
        int("a")


def in_enumerate_too(loop: Iterable[int]) -> None:
    for i, _ in enumerate(loop):
        if i == 2:
            raise ValueError


def caught_around_the_loop(loop: Iterable[int]) -> None:
    try:
        for _ in loop:
            int("a")
    except ValueError:
        pass


def suppressed_around_the_loop(loop: Iterable[int]) -> None:
    with contextlib.suppress(ValueError):
        for _ in loop:
            int("a")


def by_break_out_of_except(loop: Iterable[int]) -> None:
    for _ in loop:
        try:
            int("a")
        except ValueError:
            break


def by_break_out_of_except_with_a_name(loop: Iterable[int]) -> None:
    for _ in loop:
        try:
            int("a")
        except ValueError as error:
            print(error)
            break


def by_return_out_of_except(loop: Iterable[int]) -> None:
    for _ in loop:
        try:
            int("a")
        except ValueError:
            return


def by_return_of_a_value_out_of_except(loop: Iterable[int]) -> int | None:
    for x in loop:
        try:
            int("a")
        except ValueError:
            return x
    return None


def by_break_out_of_except_through_finally(loop: Iterable[int]) -> None:
    for x in loop:
        try:
            int("a")
        except ValueError:
            break
        finally:
            str(x)


def by_break_out_of_except_through_with(loop: Iterable[int]) -> None:
    for _ in loop:
        with contextlib.nullcontext():
            try:
                int("a")
            except ValueError:
                break


def by_return_in_finally(loop: Iterable[int]) -> int | None:
    for x in loop:
        try:
            int("a")
        finally:
            return x  # noqa: B012 - people do
    return None


BY_EXCEPTION = [
    by_return_of_a_value_out_of_except,
    by_break_out_of_except_through_finally,
    by_break_out_of_except_through_with,
    by_return_in_finally,
    raising,
    in_a_statement,
    in_enumerate_too,
    caught_around_the_loop,
    suppressed_around_the_loop,
    by_break_out_of_except,
    by_break_out_of_except_with_a_name,
    by_return_out_of_except,
]
AROUND: dict[str, Callable[[Iterable[int]], Iterable[int]]] = {
    "nothing": lambda loop: loop,
    "a generator": passed_on,
    "yield from": delegated,
    "tqdm off": lambda loop: tqdm(loop, disable=True),
    "tqdm": lambda loop: tqdm(loop, file=io.StringIO()),
    "map": lambda loop: map(int, loop),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("leave", AT_WILL, ids=lambda leave: leave.__name__)
def test_left_at_will(leave: Callable[[Iterable[int]], object], around: str, seen: list[bool | None]) -> None:
    """`break` and `return`, through whatever stands between the loop and its batches."""
    leave(Around(Numbers(seen), AROUND[around]))

    assert seen == [True]


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("leave", BY_EXCEPTION, ids=lambda leave: leave.__name__)
def test_left_by_an_exception(leave: Callable[[Iterable[int]], object], around: str, seen: list[bool | None]) -> None:
    """Wherever it is raised and whoever catches it."""
    with contextlib.suppress(ValueError):
        leave(Around(Numbers(seen), AROUND[around]))

    assert seen == [False]


def test_an_exception_in_a_generator_of_the_script(seen: list[bool | None]) -> None:
    """What stands between the loop and its batches may fail as well."""
    with contextlib.suppress(ValueError):
        for _ in failing(Numbers(seen)):
            pass

    assert seen == [False]


def test_an_exception_in_what_map_calls(seen: list[bool | None]) -> None:
    """It stands between the loop and its batches, and the loop's frame stands where batches are taken."""

    def failing_on(_: int) -> int:
        raise ValueError

    with contextlib.suppress(ValueError):
        for _ in map(failing_on, Numbers(seen, may_end=False)):
            pass

    assert seen == [False]


def taken_by_hand(seen: list[bool | None]) -> None:
    numbers = iter(Numbers(seen))
    next(numbers)


def let_go_by_hand(seen: list[bool | None]) -> None:
    numbers = iter(Numbers(seen))
    next(numbers)
    del numbers
    others: Iterator[int] | None = iter(Numbers(seen))
    next(others)
    others = None


@pytest.mark.parametrize(("leave", "times"), [(taken_by_hand, 1), (let_go_by_hand, 2)])
def test_what_a_variable_held(leave: Callable[[list[bool | None]], None], times: int, seen: list[bool | None]) -> None:
    """Nothing failed, and nobody says whether the iteration is whole."""
    leave(seen)

    assert seen == [None] * times


def test_what_a_variable_held_in_a_function_that_fails(seen: list[bool | None]) -> None:
    """It goes when the traceback does."""

    def failing_by_hand() -> None:
        numbers = iter(Numbers(seen))
        next(numbers)
        raise ValueError

    try:
        failing_by_hand()
    except ValueError as error:
        str(error)

    assert seen == [False]


def test_an_exception_that_nobody_catches_in_a_function(seen: list[bool | None]) -> None:
    """It passes through several frames before the loop's iterator is let go."""

    def inner() -> None:
        for _ in Numbers(seen):
            deeper()

    def deeper() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        inner()

    assert seen == [False]


# Where a call stands.


def place(_name: str = "") -> str:
    return script_frames.place_in_script(sys._getframe(1))[0]


def one() -> str:
    return batches()


def batches() -> str:
    return place()


def test_each_call_has_a_place_of_its_own() -> None:
    places = [batches(), batches(), one(), one()]

    assert len(set(places)) == 4


def test_the_same_call_has_the_same_place_each_time() -> None:
    assert len({batches() for _ in range(3)}) == 1


BEFORE = """
def train():
    return batches()
def main():
    train()
    return train()
found = main()
"""
AFTER = """
# a remark
def train():
    print("another line")
    return batches()
def evaluate():
    pass
def main():
    x = 1
    train()
    evaluate()
    return train()
found = main()
"""


def test_lines_added_elsewhere_do_not_move_a_place(capsys: pytest.CaptureFixture[str]) -> None:
    def found(text: str) -> str:
        space = {"__name__": "__main__", "batches": batches}
        exec(compile(text, "/somewhere/train.py", "exec"), space)
        return str(space["found"])

    assert found(BEFORE) == found(AFTER)
    assert found(BEFORE) != found(BEFORE.replace("    train()\n", ""))


def test_it_is_told_to_people_by_file_and_line() -> None:
    def shown(frame: FrameType | None) -> str:
        return script_frames.place_in_script(frame)[1]

    line = sys._getframe().f_lineno + 1
    assert shown(sys._getframe()) == f"test_script_frames.py, line {line}"
