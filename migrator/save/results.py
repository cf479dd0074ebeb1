"""What can come of a save: a ckpt, or one of the reasons why there is none."""

from __future__ import annotations

from dataclasses import dataclass

from migrator.errors import StorageError

GIVEN_UP = "the save was given up: the pod is leaving and the newest step is saved instead"
"""The reason that the callers which waited for such a save get."""
SCRIPT_ENDED = "the script ended before it reached a safe point"
"""The reason of a save for which there is no safe point any more."""


@dataclass(frozen=True)
class Saved:
    """What was committed."""

    ckpt: str
    step: int
    size: int
    took_s: float
    is_joined: bool = False
    """Another rank had committed it already."""


class Unclean(Exception):  # noqa: N818 - internal: try again at the next safe point
    """The state is not that of the safe point any more."""

    def __init__(self, names: list[str], why: str = "") -> None:
        super().__init__(", ".join(names))
        self.names = names
        self.why = why


class GivenUp(Exception):  # noqa: N818 - internal
    """The save was ended for a newer step."""


class Missed(Exception):  # noqa: N818 - internal
    """The safe point that all ranks were to save cannot be saved, on this rank or another."""


class Postponed(Exception):  # noqa: N818 - internal
    """An earlier safe point has to be saved first."""


class NothingToSave(Exception):  # noqa: N818 - internal
    """No rank has trained anything."""


def failed_text(error: BaseException) -> str:
    """One line for log and hook."""
    return " ".join(str(error).split()) if isinstance(error, StorageError) else f"{type(error).__name__}: {error}"
