"""A save of all ranks that did not come about: the message names the cause that was found."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from migrator.ranks.protocol import KnownLines, Line, Self
from migrator.save.group.reasons import why_alone, why_missing, why_not, why_uncommitted


class Peers:
    """Four ranks, of which this is number 0."""

    rank, size = 0, 4

    def __init__(self, *lines: Line, store_is_unreachable: bool = False, silent: tuple[int, ...] = ()) -> None:
        self.known = KnownLines(tuple(lines))
        self.store_is_unreachable = store_is_unreachable
        self._silent = silent

    def is_alive_there(self, rank: int) -> bool:
        return rank not in self._silent


def gathering(
    *,
    alike: tuple[int, ...] = (0,),
    unlike: tuple[int, ...] = (),
    missing: tuple[int, ...] = (),
    newer: tuple[int, ...] = (),
) -> Any:
    """The records that this rank has found."""
    return SimpleNamespace(
        newer=dict.fromkeys(newer, "written by a newer migrator"),
        records=dict.fromkeys(sorted((*alike, *unlike))),
        alike=lambda: dict.fromkeys(alike),
        unlike=lambda: {rank: ["model"] for rank in unlike},
        missing=lambda: list(missing),
        shares=4,
    )


# A rank whose own state is not in the ckpt.


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        (Peers(Line("bye", 2)), "its script had ended"),
        (Peers(Line("failed", 2, info="disk full")), "it could not write: disk full"),
        (Peers(Line("alone", 2, point=(4, 0))), "it could not come to this step and saves the one it is at"),
        (
            Peers(store_is_unreachable=True, silent=(2,)),
            "the job's store is gone, and nothing of it was found on storage in time",
        ),
        (Peers(silent=(2,)), "it shows no sign of life: its process ended, froze or was cut off"),
        (Peers(Line("bye", 1), silent=(3,)), "it is alive and had not written what is its own in time"),
    ],
)
def test_why_a_rank_is_missing(ranks: Peers, why: str) -> None:
    """What it said itself comes first, then what was seen of it; late is only who lives."""
    assert why_missing(ranks, 2, gathering()) == why


def test_a_rank_with_other_tensors_is_not_said_to_be_late() -> None:
    """Its record is there, in time; it does not fit."""
    why = why_missing(Peers(Line("bye", 2)), 2, gathering(unlike=(2,)))

    assert why == "it holds other tensors than rank 0: model"


def test_a_rank_that_wrote_what_this_version_cannot_read_is_not_said_to_be_late() -> None:
    """Its record is there, and it is named why it is not used."""
    why = why_missing(Peers(Line("bye", 2)), 2, gathering(newer=(2,)))

    assert why == "written by a newer migrator"


# A save that did not come about.


@pytest.mark.parametrize(
    ("found", "writes", "why"),
    [
        (None, True, "what the other ranks wrote could not be looked at within the grace"),
        (gathering(), False, "rank 0, which writes for all ranks, did not commit within the grace"),
        (
            gathering(alike=(0, 1), missing=(2, 3)),
            True,
            "2 of 4 shares were not written within the grace; nothing that fits came from rank 2, 3",
        ),
        (gathering(alike=(0, 1, 2, 3), missing=(2,)), True, "1 of 4 shares were not written within the grace"),
        (
            gathering(alike=(1, 2, 3), unlike=(0,)),
            True,
            "rank 0 holds other tensors than this one, and did not commit its own within the grace",
        ),
        (
            gathering(alike=(0, 1, 2, 3)),
            True,
            "all shares were written, but the ckpt was not committed within the grace",
        ),
    ],
)
def test_why_nothing_was_committed(found: Any, writes: bool, why: str) -> None:
    """The shares of others are blamed only if they are missing."""
    assert why_uncommitted(Peers(), found, writes=writes) == why


DECIDED = Line("decide", 0, point=(7, 0), is_trained=True, members=(0, 1))


@pytest.mark.parametrize(
    ("ranks", "me", "why"),
    [
        (Peers(store_is_unreachable=True), Self(0), "the job's store is gone; no step was agreed on"),
        (Peers(Line("decide", 1)), Self(0, reach=(3, 0)), "the others have nothing to save; no step was agreed on"),
        (Peers(DECIDED), Self(0, reach=(8, 0)), "it is past step 7, which was agreed on"),
        (Peers(DECIDED), Self(0, reach=(6, 0)), "it did not come to step 7, which was agreed on, in time"),
        (
            Peers(DECIDED),
            Self(0, reach=(7, 1)),
            "it is in the next epoch, and what it held of step 7 before that changed",
        ),
        (
            Peers(replace(DECIDED, point=(7, 1))),
            Self(0, reach=(7, 0)),
            "it did not come to the epoch behind step 7, which was agreed on, in time",
        ),
        (Peers(DECIDED), Self(0, reach=None), "its script ends"),
        (Peers(DECIDED), Self(0, reach=(7, 0), is_unclean=True), "what it holds changed outside a step"),
    ],
)
def test_why_a_rank_saves_alone(ranks: Peers, me: Self, why: str) -> None:
    """Not each time because it was late."""
    assert why_alone(ranks, me) == why


@pytest.mark.parametrize(
    ("reach", "is_kept", "notice", "why"),
    [
        ((8, 0), False, None, "it has gone on already"),
        ((8, 0), False, object(), "it has gone on already"),
        ((7, 1), True, object(), "the process is leaving"),
        ((7, 0), True, object(), "the process is leaving"),
        (None, False, None, "its script has ended"),
    ],
)
def test_why_a_rank_cannot_save_what_another_one_asks_for(reach: Any, is_kept: bool, notice: Any, why: str) -> None:
    """A loop that stands still has not gone on, nor has one that has only begun the next epoch."""
    gate: Any = SimpleNamespace(reach=reach, can_save=lambda _: is_kept, is_at=lambda _: False)
    leaving: Any = SimpleNamespace(notice=notice)

    assert why_not((7, 0), gate, leaving) == why
