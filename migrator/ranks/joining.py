"""How a rank connects to the store of its job, in `listening()`.

The store is the one that the process group was made with, so there is no further
server and no address to configure. Each rank opens two connections of its own:
one connection serves one call at a time, and a call that waits would hold back
all others.
"""

from __future__ import annotations

import functools
import socket
import uuid
from datetime import timedelta
from typing import Any

from migrator.errors import RanksError, UsageError
from migrator.ranks import place
from migrator.ranks.peers import Peers

CONNECT_S = 20.0
"""Maximum time, in seconds, to open each connection in `listening()`."""


def join() -> Peers:
    """Connect to the other ranks. All ranks call this at the same place. Main thread."""
    from torch import distributed

    rank, size = place.rank_and_size()
    served = _store_of(distributed)
    host, port = served.host, served.port
    nonce = _from_rank_0(distributed, uuid.uuid4().hex[:16])
    connect = functools.partial(_connected, distributed, host, port)
    try:
        store, waiting = connect(CONNECT_S)
    except (OSError, RuntimeError, ValueError) as error:
        raise RanksError(
            f"listening(): the job's store at {host}:{port} does not answer ({error}). "
            "Rank 0, or the agent of torchrun, serves it: check that this process still runs."
        ) from error
    return Peers(rank, size, nonce, store, waiting=waiting, connect=connect, served=served)


def _connected(distributed: Any, host: str, port: int, timeout_s: float) -> tuple[Any, Any]:
    """Two connections: one for calls, and one for the thread that waits."""
    # Without a server this is refused at once; the store's own client would retry until its timeout.
    socket.create_connection((host, port), timeout=timeout_s).close()
    timeout = timedelta(seconds=timeout_s)
    first = distributed.TCPStore(host, port, None, False, timeout=timeout, wait_for_workers=False)
    return first, distributed.TCPStore(host, port, None, False, timeout=timeout, wait_for_workers=False)


def _store_of(distributed: Any) -> Any:
    """The store that the process group was made with."""
    store = distributed.distributed_c10d._get_default_store()
    while isinstance(store, distributed.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, distributed.TCPStore):
        raise UsageError(
            f"listening(): the process group was made with a {type(store).__name__}; the ranks can agree only through "
            "a TCPStore. Use init_process_group() with env:// (the default, torchrun's) or tcp://."
        )
    return store


def _from_rank_0(distributed: Any, nonce: str) -> str:
    """The nonce of rank 0, broadcast to all ranks."""
    import torch

    device = "cpu"
    if "nccl" in distributed.get_backend():
        device = f"cuda:{torch.cuda.current_device()}"
    sent = torch.tensor(list(nonce.encode("ascii")), dtype=torch.uint8, device=device)
    distributed.broadcast(sent, src=0)
    return bytes(sent.tolist()).decode("ascii")
