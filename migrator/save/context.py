"""What every save of one life works with."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from migrator.ckpt.generations import Generation
from migrator.loop.gate import Gate
from migrator.ranks.shares import Exchange
from migrator.state.capture import Capturer
from migrator.state.registry import Registry
from migrator.storage.base import Storage


@dataclass(frozen=True)
class SaveContext:
    """Where ckpts go, what is saved, and which rank this is."""

    storage: Storage
    generation: Generation
    job: str
    registry: Registry
    capturer: Capturer
    gate: Gate
    rank: int = 0
    size: int = 1
    exchange: Exchange | None = None
    """How ranks send each other records of what they wrote. None: on storage."""
    writes: bool = True
    """This rank sees the root; otherwise it only hands its own state to the ranks that do."""
    tries: Counter[str] = field(default_factory=Counter)
    """How often this process has written into each ckpt."""
    origin: list[str] = field(default_factory=list)
    """Has the ckpt that was loaded, if one was. Manifests of this life name it in `continues`."""
    is_warned: bool = False
    """`listening()` has said that a save takes too long for the grace."""
