"""The error of the stand-in kubelet; the message says what was found and what to do."""

from __future__ import annotations


class StandInError(Exception):
    """The stand-in does not support a request, or something did not happen in time."""
