"""Does anything grow faster than the job does? The same calls at sizes ten times apart, up to far beyond any usual one.

    python benchmarks/growth.py [--short] [--only "names;ckpts"]

What grows, one at a time: the number of tensors, by where a save puts them (in the manifest, in a part, in a part and
not copied at a safe point); the modules of a network with its AdamW; the registered names; the ckpts in the job's root,
all kept; and the lives before this one, each with a ckpt. All tensors are as small as they can be in their place. Ranks
grow in `many_ranks.py`.

Timed are `register()` of everything, `listening()`, `safe_point()`, `save_ckpt()`, a second `save_ckpt()` directly
behind the first one, which waits until that one has looked for ckpts to delete, and `load_ckpt()`. Each size has two
lives, each a process of its own: one saves, and the next one registers, listens and loads. So no row gets memory or
caches from another one, and what is loaded was made by another process. Files are in the page cache, as after a save.
A ckpt or a life that is there before is a copy of a real one with the right name and record.

A number is the quickest of all rounds, as noise only adds; the largest sizes have one round, so other work on the
machine shows in them. The exponent stands behind it: 1 says that ten times the size takes ten times as long, 2 a
hundred times. Above 1.15 in a time above 50 ms it is marked, and listed at the end.

Exponents leave out what Python's garbage collector took, which is in the seconds and, of all calls together, in the
last column. It looks through everything that torch has made as well, and does so first when a call makes some ten
thousand objects: a step that looks steep once, and is none.
"""

from __future__ import annotations

import gc
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import suite
from suite import Life, Result, Servers, Table, Tell, number

STEEP, NOTICED_S = 1.15, 0.05
"""The exponent and the seconds above which both a number is marked."""
ONCE = 10_000
"""From this size on a row runs in the first round only: it takes long, and the disk's noise is little of it."""
POINTS = 3
"""Safe points of each life. The first one finds out where everything lies, and is not timed."""
KEEP = 1_000_000
"""Ckpts to keep: all."""
CALLS = ["register", "listening", "safe point", "save", "next save", "load"]

State = dict[str, Any]
Change = Callable[[], None]
Made = tuple[State, Change]
"""What is registered, and what changes it in place."""


def tensors(count: int, elements: int) -> Made:
    """A module with so many parameters, all of one size."""
    import torch
    from torch import nn

    model = nn.ParameterList(nn.Parameter(row) for row in torch.zeros(count, elements).unbind())
    for param in model:  # not views: each has memory of its own, as in a real model
        param.data = param.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return {"model": model, "optimizer": optimizer}, stepping(optimizer)


def modules(blocks: int) -> Made:
    """Three modules, four parameters and three buffers a block."""
    import torch
    from torch import nn

    model = nn.Sequential(*(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)) for _ in range(blocks)))
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "optimizer": optimizer}, stepping(optimizer)


def named(count: int) -> Made:
    """A model, and so many small dicts, each registered by a name of its own."""
    import torch

    state, change = tensors(1, 4)
    return {**state, **{f"name{i}": {"count": i, "mean": torch.zeros(4)} for i in range(count)}}, change


def stepping(optimizer: Any) -> Change:
    import torch

    def step() -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()

    return step


@dataclass(frozen=True)
class Growth:
    """Something that grows. `copied`: what of it is in the job's root before, ckpts or lives."""

    title: str
    make: Callable[[int], Made]
    sizes: tuple[int, ...]
    copied: str = ""


TENS = (10, 100, 1_000, 10_000, 100_000)
GROWTHS = {
    "tensors": Growth("Tensors in the manifest", lambda count: tensors(count, 4), TENS),
    "in a part": Growth("Tensors in a part", lambda count: tensors(count, 68), TENS),
    "large": Growth("Tensors in a part, not copied", lambda count: tensors(count, 4100), TENS[:-1]),
    "modules": Growth("Blocks of three modules, with AdamW", modules, TENS[:-1]),
    "names": Growth("Registered names", named, (1, *TENS[:3])),
    "ckpts": Growth("Ckpts in the job's root", lambda _: named(1), (1, *TENS[:3]), "ckpts"),
    "lives": Growth("Lives before this one", lambda _: named(1), (1, *TENS[:3]), "lives"),
}


Took = tuple[float, float]
"""Seconds of a call, and those of them in the garbage collector."""


class Clock:
    """Times the calls of a life."""

    def __init__(self) -> None:
        self.took: dict[str, Took] = {}
        self._collecting_s = self._began_s = 0.0
        gc.callbacks.append(self._note)

    @contextmanager
    def timed(self, call: str) -> Iterator[None]:
        """Of several the quickest one counts."""
        start_s, before_s = time.perf_counter(), self._collecting_s
        yield
        took = time.perf_counter() - start_s, self._collecting_s - before_s
        self.took[call] = min(self.took.get(call, took), took)

    def _note(self, phase: str, _: object) -> None:
        if phase == "start":
            self._began_s = time.perf_counter()
        else:
            self._collecting_s += time.perf_counter() - self._began_s


def begin(state: State, directory: Path, clock: Clock) -> Any:
    from migrator import migrator

    with clock.timed("register"):
        for name, value in state.items():
            migrator.register(name, value)
    with clock.timed("listening"):
        migrator.listening(ckpt=str(directory), signal=str(directory / "signal"), every="off", keep=KEEP)
    # A safe point that leaves out what is costly would be measured as cheap.
    life: Any = migrator._session
    life._capturer._weigh = lambda *_: None
    return migrator


def saves(growth: Growth, size: int, directory: Path, *, counts: bool) -> Callable[[Tell], None]:
    """The life that trains and saves. If nothing of it counts, it makes the first ckpt only."""

    def live(tell: Tell) -> None:
        state, change = growth.make(size)
        clock = Clock()
        migrator = begin(state, directory, clock)
        migrator.load_ckpt()
        change()
        migrator.safe_point()
        for _ in range(POINTS if counts else 0):
            change()
            with clock.timed("safe point"):
                migrator.safe_point()
        again = 1 if size >= ONCE else 3
        for call in ["save", *["next save"] * again] if counts else ["save"]:
            with clock.timed(call):
                assert migrator.save_ckpt() is not None
            change()
            migrator.safe_point()
        migrator.close()
        tell("done", took={call: clock.took[call] for call in CALLS[2:-1] if counts})

    return live


def loads(growth: Growth, size: int, directory: Path) -> Callable[[Tell], None]:
    """The life after that."""

    def live(tell: Tell) -> None:
        state, _ = growth.make(size)
        clock = Clock()
        migrator = begin(state, directory, clock)
        with clock.timed("load"):
            assert migrator.load_ckpt() is not None
        tell("done", took=clock.took)

    return live


def copy(directory: Path, count: int, what: str) -> None:
    """Make so many ckpts of the first one, all of its life, or each of a life that goes on from the one before."""
    from migrator.ckpt.generations import RECORD_LIMIT
    from migrator.ckpt.manifest import MANIFEST_LIMIT, Manifest
    from migrator.ckpt.names import manifest_name, record_name
    from migrator.ckpt.sealed import seal, unseal

    (source,) = directory.glob("0*")
    first = Manifest.from_bytes((directory / manifest_name(source.name)).read_bytes()[:MANIFEST_LIMIT])
    record = unseal("generation", (directory / record_name(1)).read_bytes()[:RECORD_LIMIT])
    before = source.name
    for i in range(1, count):
        manifest = replace(first, step=first.step + i)
        if what == "lives":
            manifest = replace(manifest, generation=1 + i, written={**first.written, "continues": before})
            claimed = {**record, "generation": 1 + i, "continues": i}
            (directory / record_name(1 + i)).write_bytes(seal("generation", claimed))
        before = manifest.ckpt
        shutil.copytree(source, directory / before)
        (directory / manifest_name(before)).write_bytes(manifest.to_bytes())


def handle(job: dict[str, Any]) -> dict[str, Any]:
    """The lives of one row and one round, in a server."""
    growth, size, directory = GROWTHS[job["growth"]], job["size"], Path(job["directory"])
    directory.mkdir()

    def lived(body: Callable[[Tell], None]) -> dict[str, Took]:
        with Life(body, directory / "log") as life:
            took: dict[str, Took] = life.wait_for("done")["took"]
            return took

    if growth.copied:
        lived(saves(growth, size, directory, counts=False))
        copy(directory / "default", size, growth.copied)
    saved = lived(saves(growth, size, directory, counts=True))
    return {"took": {**saved, **lived(loads(growth, size, directory))}}


def exponent(size: int, took: Took, before_size: int, before: Took) -> float:
    """Of the time without the garbage collector."""
    return math.log((took[0] - took[1]) / (before[0] - before[1])) / math.log(size / before_size)


def table_of(name: str, found: dict[int, dict[str, Took]]) -> tuple[Table, list[str]]:
    """The seconds of one growth, each with its exponent, and what of it is too steep."""
    title = f"{GROWTHS[name].title}: seconds (exponent)"
    table = Table(f"growth.{name.replace(' ', '_')}", title, ["", *CALLS, "collector"], unit="s")
    sizes, steep = sorted(found), []
    for before, size in zip([None, *sizes], sizes, strict=False):
        cells = []
        for call in CALLS:
            took = found[size][call]
            cells.append(number(took[0]))
            if before is None:
                continue
            grows = exponent(size, took, before, found[before][call])
            is_steep = grows > STEEP and took[0] > NOTICED_S
            cells[-1] += f" ({grows:.2f}{' !' if is_steep else ''})"
            if is_steep:
                steep.append(f"{name}, {before:,} to {size:,}: {call} grows by the power of {grows:.2f}")
        table.rows.append([f"{size:,}", *cells, number(sum(found[size][call][1] for call in CALLS))])
    return table, steep


def sizes_of(name: str, *, is_short: bool) -> tuple[int, ...]:
    return GROWTHS[name].sizes[1:3] if is_short else GROWTHS[name].sizes


def main() -> None:
    usage = suite.parser(__doc__, "growth")
    usage.set_defaults(json=None)  # what lies in `results` goes into the page
    options = usage.parse_args()
    if options.serve:
        suite.serve(handle)
        return
    options.rounds = options.rounds or (1 if options.short else 2)
    names = suite.chosen(GROWTHS, options.only, usage)
    suite.say_how_idle()
    result = Result("growth", suite.machine(options.dir), {"rounds": options.rounds, "short": options.short})
    found: dict[str, dict[int, dict[str, Took]]] = {name: {} for name in names}
    rows = {f"{name}, {size:,}": (name, size) for name in names for size in sizes_of(name, is_short=options.short)}
    with suite.scratch(options.dir) as directory, Servers(__file__) as servers:
        for turn, row in suite.turns(list(rows), options.rounds):
            name, size = rows[row]
            if turn and size >= ONCE:
                continue
            place = directory / "life"
            one = servers.ask({"growth": name, "size": size, "directory": str(place)})
            suite.emptied(place)
            if "error" in one:
                result.skip(row, one["error"])
                continue
            took: dict[str, Took] = {call: tuple(one["took"][call]) for call in CALLS}
            print(f"round {turn + 1}, {row}: {', '.join(number(s) for s, _ in took.values())} s", flush=True)
            result.values.append({"row": name, "size": size, "round": turn, "took": took})
            before = found[name].setdefault(size, took)
            found[name][size] = {call: min(before[call], took[call]) for call in CALLS}
    steep = []
    for name, by_size in found.items():
        table, lines = table_of(name, by_size)
        result.tables.append(table)
        steep += lines
    result.finish(options.json)
    print("\n" + ("\n".join(f"STEEP {line}" for line in steep) or "Nothing grows faster than the job."))


if __name__ == "__main__":
    main()
