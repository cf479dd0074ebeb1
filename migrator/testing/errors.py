"""What the stand-in kubelet raises: always this, with what was found and what to do."""

from __future__ import annotations


class StandInError(Exception):
    """The stand-in cannot do what it was asked for, or what it waited for did not come."""
