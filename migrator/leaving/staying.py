"""The wait for an agent's SIGTERM, of a process that has nothing more to save.

An agent such as torchrun starts a rank that has ended again, inside the pod that is
about to be taken away. So under an agent a rank stays until the agent's SIGTERM, at
most until shortly before the deadline. This holds after the last save, and when
`listening()` fails after a notice.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from migrator.notice.signal_file import AGENT_MARGIN_S
from migrator.platform.launcher import Agent

_LOOK_S = 0.01
"""How often, in seconds, the process looks whether SIGTERM has come."""


def wait_for_agent(agent: Agent | None, *, is_terminated: Callable[[], bool], deadline_s: float) -> None:
    """Wait for the agent's SIGTERM; without an agent, return at once."""
    if agent is None:
        return
    while not is_terminated() and time.monotonic() < deadline_s - AGENT_MARGIN_S:
        time.sleep(_LOOK_S)
