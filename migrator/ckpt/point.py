"""The names of safe points, as ranks and manifests know them."""

from __future__ import annotations

Point = tuple[int, int]
"""A safe point: the step, and how often since then a new round of the loop was entered."""

Turns = tuple[tuple[int, str], ...]
"""Safe points of one step that a rank can still save, lowest first: the turn, and the place of its loop in the script.

The place is empty for turn 0, directly behind the step, which is the same on all ranks. At another turn an empty place
means that it is unknown, and it matches no other place.
"""
