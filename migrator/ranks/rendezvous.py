"""How ranks in `listening()` learn at once that another rank has ended before it called `listening()`.

On the shared log such a rank is only silent, and a silent rank has to be waited for
for a minute: it may be busy. A gloo collective fails as soon as the connection to
one of its members breaks. So all ranks run one collective first, and wait for it in
Python, where a signal handler can run.

The price: one more collective in `listening()`. With NCCL it is skipped, because
NCCL does not notice that a process has ended.
"""

from __future__ import annotations

import time

from migrator.errors import RanksError

_PAUSE_S = 0.002
"""Time, in seconds, between two checks whether all ranks have arrived."""
_WORDS = (
    "See its last log lines. If its pod is being deleted: SIGTERM before listening() ends a process. With `import "
    "migrator; migrator.watch()` at the top of the script the process lives on, and all ranks leave in listening()"
)


def come_together() -> None:
    """Return when all ranks have called `listening()`; `RanksError` if one has ended or does not call it.

    A late rank is waited for until the timeout of the process group.
    """
    import torch
    from torch import distributed

    # init_process_group() without a backend makes one group for each kind of device.
    if "cpu:gloo" not in str(distributed.get_backend_config()):
        return
    try:
        work = distributed.all_reduce(torch.zeros(1), async_op=True)
        while not work.is_completed():
            time.sleep(_PAUSE_S)
        work.wait()
    except RuntimeError as error:
        found = (str(error) or repr(error)).splitlines()[0]
        what = "another rank has ended before it called listening()"
        if "timed out" in found.lower():
            what = "another rank does not call it; each rank has to call listening() once, at the same place"
        raise RanksError(f"listening(): {what} ({found}). {_WORDS}") from error
