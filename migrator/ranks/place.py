"""Where this process stands: its rank in the job, and the pod that it runs in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from migrator.errors import UsageError
from migrator.platform import container


def rank_and_size() -> tuple[int, int]:
    """The rank of this process and the number of ranks; `UsageError` if a process group is missing."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:
        raise UsageError(
            f"listening(): WORLD_SIZE={size}, but there is no process group, through which the ranks would agree on "
            "what they save. Call torch.distributed.init_process_group() before listening()."
        )
    return 0, 1


def pod(signal: os.PathLike[str] | str) -> Mapping[str, Any]:
    """What identifies the pod of this rank: ranks with the same container and signal file share a pod."""
    return {"pid": os.getpid(), "container": container.container(), "signal": os.fspath(signal)}
