"""How ranks in `listening()` learn at once that one of them has ended before it came there.

On the board a rank that never came is only silent, and silence has to be borne for a
minute: it may be busy. A collective of gloo ends with an error as soon as the
connection to one of its members breaks. So all ranks pass one before they meet, and
wait for it in Python, where a signal handler can run.

The price: one collective more in `listening()`. With NCCL there is none, since it
does not notice a process that ended.
"""

from __future__ import annotations

import time

from migrator.errors import RanksError

_PAUSE_S = 0.002
"""Between two looks whether all have come."""
_WORDS = (
    "See its last lines. If its pod was told to go: SIGTERM before listening() ends a process, and `import migrator; "
    "migrator.watch()` at the top of the script keeps it for listening(), where all ranks leave together"
)


def come_together() -> None:
    """Return when all ranks have come to `listening()`; `RanksError` if one has ended, or does not come.

    A rank that is only late is waited for as long as the process group waits in any collective.
    """
    import torch
    from torch import distributed

    # Without an argument, init_process_group() makes one group for each kind of device.
    if "cpu:gloo" not in str(distributed.get_backend_config()):
        return
    try:
        work = distributed.all_reduce(torch.zeros(1), async_op=True)
        while not work.is_completed():
            time.sleep(_PAUSE_S)
        work.wait()
    except RuntimeError as error:
        found = (str(error) or repr(error)).splitlines()[0]
        what = "another rank has ended before it came there"
        if "timed out" in found.lower():
            what = "another rank does not come there; each has to call listening() once, at the same place"
        raise RanksError(f"listening(): {what} ({found}). {_WORDS}") from error
