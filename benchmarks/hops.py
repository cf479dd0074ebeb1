"""How many steps from module to module a reader follows through a save and a load.

    python benchmarks/hops.py [--pairs]

Runs a small training in a temporary directory under `sys.setprofile` and `threading.setprofile`: some saves by
`save_ckpt()`, each until its commit, in a job of one process and on rank 0 of two, and `load_ckpt()`. Only calls from
one module of the package to another count, in the main thread, the saving thread and the ranks' thread. `--pairs`
prints them all.

    distinct   different pairs of (module and function that calls, module and function that is called)
    calls      all of them, for one save; those of several ranks depend on how long they wait for one another
    modules    how many modules take part
    up         distinct pairs in which the called module is in a room above the caller's: callbacks
    in all     distinct pairs, with those inside one module

Measured with the modules as they were cut before the rooms, when a group's saving thread was a subclass and a life was
one class, and now:

                               distinct     calls   modules        up    in all
    save                before       82       291        20         4       225
                        now         110       296        34         4       252
    save, 2 ranks       before      149       414        27         7       363
                        now         192       463        45         7       398
    load                before       55       133        19         2       187
                        now          81       209        32         2       210

A tenth more steps in all, and a third more of them lead to another file: the files are smaller.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = "migrator."
ROOMS = [
    *("errors", "events", "settings", "platform", "data", "storage", "notice", "leaving"),
    *("ckpt", "state", "ranks", "loop", "compat", "save", "session", "api"),
]
"""Lowest first. A room may use those before it."""
THREADS = ("MainThread", "migrator-saver", "migrator-ranks")
SAVES = 10


class Hops:
    """Counts the calls between modules of the package, in every thread that starts after this was made."""

    def __init__(self) -> None:
        self.pairs: Counter[tuple[str, str]] = Counter()
        self._inside: set[tuple[str, str]] = set()
        self._begun = 0
        self._is_on = False
        sys.setprofile(self._profile)
        threading.setprofile(self._profile)

    def begin(self) -> None:
        self._begun += 1
        self._is_on = True

    def end(self) -> None:
        self._is_on = False

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self._is_on or event != "call" or (called := _name(frame)) is None:
            return
        if threading.current_thread().name not in THREADS:
            return
        caller = frame.f_back
        while caller is not None and _name(caller) is None:
            caller = caller.f_back
        if caller is None or (calling := _name(caller)) is None:
            return
        if _module(calling) == _module(called):
            self._inside.add((calling, called))
        else:
            self.pairs[calling, called] += 1

    def line(self) -> str:
        modules = {_module(name) for pair in self.pairs for name in pair}
        up = sum(_height(called) > _height(calling) for calling, called in self.pairs)
        calls = sum(self.pairs.values()) // self._begun
        return f"{len(self.pairs):9} {calls:9} {len(modules):9} {up:9} {len(self.pairs) + len(self._inside):9}"

    def print_pairs(self) -> None:
        for (calling, called), count in sorted(self.pairs.items()):
            mark = " (up)" if _height(called) > _height(calling) else ""
            print(f"    {calling} -> {called} x{count}{mark}")


def _name(frame: FrameType) -> str | None:
    """`room.module:function`; None outside of the package, for a comprehension, which belongs to its function, and for
    what `dataclass` makes."""
    module = frame.f_globals.get("__name__", "")
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)
    is_of_another = (code.co_name.startswith("<") and code.co_name != "<lambda>") or "__create_fn__" in name
    return None if is_of_another or not module.startswith(PACKAGE) else f"{module.removeprefix(PACKAGE)}:{name}"


def _module(name: str) -> str:
    return name.partition(":")[0]


def _height(name: str) -> int:
    return ROOMS.index(name.partition(":")[0].partition(".")[0])


def train(what: str, *, prints_pairs: bool) -> None:
    """One rank of a job that saves once, or loads what it saved."""
    import torch
    from torch import distributed, nn

    from migrator import events, migrator

    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        distributed.init_process_group("gloo")
    hops = Hops()
    log = events.log

    def log_and_end(event: str, /, **fields: Any) -> None:
        log(event, **fields)
        if event == "committed":
            hops.end()

    # Before `listening()` imports what saves.
    for module in [module for name, module in sys.modules.items() if name.startswith(PACKAGE)]:
        if getattr(module, "log", None) is log:
            module.log = log_and_end  # type: ignore[attr-defined]
    torch.manual_seed(0)
    model, state = nn.Sequential(nn.Linear(100, 100), nn.BatchNorm1d(100)), {"step": 0}
    optimizer = torch.optim.AdamW(model.parameters())
    for name, value in (("model", model), ("optimizer", optimizer), ("state", state)):
        migrator.register(name, value)
    migrator.listening(every="off")
    if what == "load":
        hops.begin()
        migrator.load_ckpt()
        hops.end()
    else:
        for step in range(1, SAVES + 1):
            optimizer.zero_grad()
            model(torch.randn(4, 100)).sum().backward()
            optimizer.step()
            state["step"] = step
            migrator.safe_point()
            hops.begin()
            migrator.save_ckpt()
            hops.end()
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{what + (f', {size} ranks' if size > 1 else ''):20} {hops.line()}")
        if prints_pairs:
            hops.print_pairs()
    sys.setprofile(None)
    threading.setprofile(None)
    migrator.close()
    if size > 1:
        distributed.destroy_process_group()


def run(what: str, root: str, size: int, *, prints_pairs: bool) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, __file__, what, *(["--pairs"] if prints_pairs else [])]
    ranks = []
    for rank in range(size):
        env = {**os.environ, "MIGRATOR_CKPT": root, "MIGRATOR_SIGNAL": f"{root}/signal", "OMP_NUM_THREADS": "1"}
        if size > 1:
            env |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with Path(f"{root}.{what}.{rank}.log").open("w") as log:
            ranks.append(subprocess.Popen(command, env=env, stderr=log))
    for rank, process in enumerate(ranks):
        if process.wait(120):
            sys.exit(f"rank {rank} failed:\n{Path(f'{root}.{what}.{rank}.log').read_text()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="?", choices=["save", "load"])
    parser.add_argument("--pairs", action="store_true")
    options = parser.parse_args()
    if options.what:
        train(options.what, prints_pairs=options.pairs)
        return
    print(f"{'':20} {'distinct':>9} {'calls':>9} {'modules':>9} {'up':>9} {'in all':>9}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        for what, root, size in (("save", "one", 1), ("load", "one", 1), ("save", "two", 2)):
            run(what, f"{directory}/{root}", size, prints_pairs=options.pairs)


if __name__ == "__main__":
    main()
