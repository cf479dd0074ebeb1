"""What KubeDL's autoscaler makes of a line of worker 0's log, written after its source (`log_util.go`).

Its expressions are those of Go, which finds the same text as Python for them. Go's code takes the first text of each
without asking whether there is one: the panic of its controller is `Crash` here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


class Crash(Exception):  # noqa: N818 - it is what happens
    """KubeDL's controller panics."""


@dataclass(frozen=True)
class Seen:
    """What KubeDL keeps of a line."""

    epoch: int
    batch: int
    latency_s: float
    accuracy: float


def read(line: str) -> Seen | None:
    """The last line of the log, without its end. None: it is dropped."""
    fields = f"{line}\n".split("\t")
    if "Epoch" not in fields[0]:
        return None
    seen = Seen(
        epoch=int(_first(r"[0-9]{1,2}", fields, 0)),
        batch=int(_first(r"[0-9]{2,4}", fields, 0)),
        latency_s=_float(_first(r"[0-9]{1,2}.[0-9]{3}", fields, 1)),
        accuracy=_float(_first(r"[0-9]{1,2}.[0-9]{1,2}", fields, 5)),
    )
    return None if seen.latency_s > 1 else seen


def _first(expression: str, fields: list[str], number: int) -> str:
    if number >= len(fields):
        raise Crash(f"there is no field {number} in {fields}")
    found = re.search(expression, fields[number])
    if found is None:
        raise Crash(f"nothing fits {expression} in field {number} of {fields}")
    return found[0]


def _float(text: str) -> float:
    """As Go reads it: its error is not looked at, and the number is 0 then."""
    return float(text) if re.fullmatch(r"[0-9]+([.e][0-9]+)?", text) else 0.0
