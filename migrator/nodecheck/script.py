"""The node check inside a script: `migrator.check_nodes()`, after `init_process_group()`.

It uses the store that the process group was made with, through connections of its own,
and never the process group itself: a collective that fails would break the group for
the training.
"""

from __future__ import annotations

import logging
import os
import sys

from torch import distributed

from migrator.errors import NodeFault, UsageError
from migrator.nodecheck import check
from migrator.nodecheck.check import Options, Verdict
from migrator.nodecheck.exchange import AGENT, Place


def check_nodes(options: Options) -> Verdict:
    """Check; raise `NodeFault` if a node has to be replaced."""
    options.validate("check_nodes()")
    verdict = check.run(_place(), options)
    if not verdict.replaced:
        return verdict
    code = check.prepare_end(verdict)
    if verdict.must_end_hard:
        end_hard(code)
    raise NodeFault(code, nodes=tuple(finding.node.name for finding in verdict.replaced))


def end_hard(code: int) -> None:
    """End without the interpreter's end, which would wait for a call that hangs."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    os._exit(code)


def _place() -> Place:
    if not (distributed.is_available() and distributed.is_initialized()):
        size = os.environ.get("WORLD_SIZE", "1")
        if size.isdecimal() and int(size) > 1:
            raise UsageError(
                f"check_nodes(): WORLD_SIZE={size}, but there is no process group, whose store the ranks would use. "
                "Call torch.distributed.init_process_group() before check_nodes(), or run python -m migrator.nodecheck "
                "before the script."
            )
        return Place(0, 1)
    store = vars(distributed)["distributed_c10d"]._get_default_store()
    while isinstance(store, distributed.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    if not isinstance(store, distributed.TCPStore):  # type: ignore[attr-defined]
        raise UsageError(
            f"check_nodes(): the process group was made with a {type(store).__name__}; the ranks can exchange what "
            "they found only through a TCPStore. Use init_process_group() with env:// (the default, torchrun's) or tcp://."
        )
    server = AGENT if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else Place.server
    return Place(distributed.get_rank(), distributed.get_world_size(), store.host, store.port, server=server)
