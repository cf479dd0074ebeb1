"""What the tests draw at random: something else in each run, and the same again with `--seed`."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import TypeVar

Item = TypeVar("Item")
_run = 0
_takes_all = False


def begin(seed: int, *, whole: bool) -> None:
    """From now on everything is drawn from this seed of the run; `whole`: nothing is left out."""
    global _run, _takes_all
    _run, _takes_all = seed, whole


def takes_all() -> bool:
    """Whether nothing is to be left out of this run."""
    return _takes_all


def dice(what: object) -> random.Random:
    """Of one test, or of one thing in it: what others draw changes nothing here."""
    return random.Random(f"{_run} {what}")


def some(what: object, items: Iterable[Item], share: float) -> list[Item]:
    """This share of the items, in their order, at least one; all of them in a run with `--whole`."""
    items = list(items)
    if _takes_all or not items:
        return items
    chosen = dice(what).sample(range(len(items)), max(1, math.ceil(share * len(items))))
    return [items[place] for place in sorted(chosen)]
