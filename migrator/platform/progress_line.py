"""The line by which KubeDL's autoscaler learns how a job trains.

KubeDL reads the last line of the log of the pod `<job>-worker-0` every 30 s, splits it at TABs, and searches some of
the fields with four expressions; each takes the first text that fits:

    field 0, if it contains `Epoch`   epoch      [0-9]{1,2}
                                      batch      [0-9]{2,4}
    field 1                           latency    [0-9]{1,2}.[0-9]{3}          above 1 s the line is dropped
    field 5                           accuracy   [0-9]{1,2}.[0-9]{1,2}

If a line has `Epoch` in its first field and one of these texts is missing, KubeDL's controller crashes, for all jobs.
So each line here has all of them, or no `Epoch`.

The expressions cannot tell every number. What they cannot tell is written so that they find the nearest number that
they can tell, with the true one behind it in parentheses; or the line begins with `epoch`, and is not read at all.
Above all: the first number with two digits is the batch, so an epoch from 10 on would be read as the batch too. It is
read as 9.

The price: KubeDL's own log shows no epoch above 9. It decides by the latency alone.
"""

from __future__ import annotations

import contextlib
import math
import operator
import sys
from typing import Any

from migrator.errors import UsageError

_LAST_EPOCH = 9
"""A larger epoch has two digits, and KubeDL would take them for the batch."""
_LAST_BATCH = 9999
"""KubeDL reads four digits of the batch at most."""
_LATENCY_END_S = 99.9995
"""From here on, in seconds, a latency is rounded to three digits before the point, of which KubeDL reads two."""
_WHOLE_MOST = 10**18
"""Larger whole numbers are shown as this one: Python refuses to write those with thousands of digits."""


class ProgressLine:
    """Prints the line, in the processes whose output is looked at."""

    def __init__(self, *, is_shown: bool, ranks: int) -> None:
        self._is_shown = is_shown
        self._ranks = ranks
        self._has_begun = False

    def print(self, **given: Any) -> None:
        """`given`: the arguments of `migrator.progress()`. The first call refuses what is no number, on every rank.

        A later call never ends a training: what is no number makes the line one that is not read.
        """
        if self._has_begun and not self._is_shown:
            return
        numbers, wrong = _numbers(given)
        if wrong and not self._has_begun:
            raise UsageError("progress(...): " + "; ".join(wrong))
        self._has_begun = True
        if not self._is_shown or sys.stdout is None:
            return
        # A closed pipe is no reason to stop a training either.
        with contextlib.suppress(OSError, ValueError):
            # With its end in one piece, so that no line of another thread comes between.
            sys.stdout.write(line(**numbers, ranks=self._ranks) + "\n")
            sys.stdout.flush()


def line(
    *, epoch: int, batch: int, batches: int, latency_s: float, loss: float, accuracy: float, ranks: int = 1
) -> str:
    """The text of one line, without its end."""
    can_be_told = 0 <= latency_s < _LATENCY_END_S and math.isfinite(accuracy)
    seen_epoch, seen_batch = _within(epoch, _LAST_EPOCH), _within(batch, _LAST_BATCH)
    # At least two digits, as KubeDL needs them. Zeros, not blanks: behind blanks `batches` would be the first number.
    width = max(2, len(str(_within(batches, _LAST_BATCH))))
    place = f"[{seen_epoch}][{seen_batch:0{width}}/{batches:0{width}}]"
    true = [
        f"{what} {number}" for what, number, seen in (("epoch", epoch, seen_epoch), ("batch", batch, seen_batch))
        if number != seen
    ]  # fmt: skip
    seen_accuracy = min(max(accuracy, 0.0), 100.0)
    fields = [
        f"{'Epoch' if can_be_told else 'epoch'}: {place}" + (f" ({', '.join(true)})" if true else ""),
        f"Time {latency_s:6.3f}",
        f"Rate {1 / latency_s if latency_s else math.inf:.3f}/s",
        f"Loss {loss:.4e}",
        f"Ranks {ranks}",
        f"Acc {seen_accuracy:6.2f}" + (f" ({accuracy:g})" if accuracy != seen_accuracy else ""),
    ]
    return "\t".join(fields)


def _within(number: int, most: int) -> int:
    return min(max(number, 0), most)


def _numbers(given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Each argument as a number, and a text for each that is none."""
    numbers: dict[str, Any] = {}
    wrong = []
    for name, value in given.items():
        is_whole = name in ("epoch", "batch", "batches")
        try:
            numbers[name] = _whole(value) if is_whole else _real(value)
        except Exception:  # a tensor of several elements, or whatever else somebody's __float__ raises
            expected = "a whole number" if is_whole else "a number, or a tensor of one element"
            wrong.append(f"{name} is {_shown(value)}, expected {expected}")
            numbers[name] = 0 if is_whole else math.nan
    if wrong:
        numbers["latency_s"] = math.nan  # nobody reads such a line
    return numbers, wrong


def _whole(value: Any) -> int:
    return min(max(operator.index(value), -_WHOLE_MOST), _WHOLE_MOST)


def _real(value: Any) -> float:
    if isinstance(value, str | bytes | bytearray):
        raise TypeError  # float() would read it
    # A tensor that has a gradient warns when it becomes a number.
    value = value.detach() if hasattr(value, "detach") else value
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _shown(value: Any) -> str:
    with contextlib.suppress(Exception):
        text = " ".join(repr(value).split())
        return text if len(text) <= 80 else f"{text[:77]}..."
    return f"a {type(value).__name__}"
