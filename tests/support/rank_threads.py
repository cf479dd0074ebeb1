"""Many ranks as threads of one process, with one real TCPStore between them.

The code that talks to the store and agrees is the library's (`Ranks`, `LastSave`). Gate, tensors and storage are
stand-ins that cost nothing: every rank is at step 7, a share is an empty file, and so is the ckpt. A rank looks at its
view when something came, or once a second: a thousand savers that look every 15 ms would need a thousand machines.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.distributed import TCPStore

from migrator.errors import MigratorError
from migrator.notice.watcher import Notice
from migrator.ranks.peers import Peers
from migrator.ranks.protocol import Line
from migrator.save.group.last_save import LastSave
from migrator.save.group.rank_warnings import RankWarnings
from migrator.save.results import NothingToSave

STEP = 7
LOOK_S = 1.0


def served() -> TCPStore:
    """A store for the ranks of one test."""
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def connected(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=60), wait_for_workers=False)


class Counted:
    """A connection that counts what goes over it."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.calls = 0
        self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*args: Any) -> Any:
            self.calls += 1
            self.bytes += _size(args)
            found = method(*args)
            self.bytes += _size(found)
            return found

        return call


def _size(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value) + 8
    if isinstance(value, (list, tuple)):
        return sum(map(_size, value))
    return 8


class Gate:
    """The loop stands at a safe point, for good."""

    at = reach = (STEP, 0)

    is_closed = False

    def stop(self) -> tuple[tuple[int, int], tuple[tuple[int, str], ...], bool]:
        return self.at, ((0, ""),), True

    stop_here = stop

    def let(self, limit: Any) -> None: ...
    def open(self) -> None: ...
    def unpin(self, capture: Any) -> None: ...

    def is_lost(self, point: Any) -> bool:
        return False

    def is_at(self, point: Any) -> bool:
        return True

    def take(self, wait_s: float, *, exact: Any) -> Any:
        return SimpleNamespace(at=exact, step=exact[0])


class Attempt:
    """A rank's part of one save."""

    name = "ckpt"

    def __init__(self, directory: Path, rank: int, members: tuple[int, ...]) -> None:
        self._directory, self._rank = directory, rank
        self.position = members.index(rank) if rank in members else len(members)

    def standing(self) -> None:
        return None

    def share(self) -> None:
        (self._directory / f"rank-{self._rank}").touch()

    def help(self) -> None: ...

    def look(self) -> Any:
        names = [path.name for path in self._directory.glob("rank-*")]
        records = dict.fromkeys(sorted(int(name[5:]) for name in names), self)
        return SimpleNamespace(records=records, alike=lambda: records, unlike=dict, missing=list, shares=1, newer={})

    def commit(self) -> Any:
        (self._directory / "manifest").write_text(str(self._rank))
        return SimpleNamespace(ckpt=self.name, is_joined=False)


class _Commits:
    """What is committed."""

    def __init__(self, directory: Path) -> None:
        self._manifest = directory / "manifest"

    def name(self, step: int) -> str:
        return Attempt.name

    def is_there(self, name: str) -> bool:
        return self._manifest.exists()

    def note_own(self, name: str) -> None: ...

    def furthest(self, names: set[str], *, is_alone: bool) -> Any:
        return Attempt.name


class _Leaving(SimpleNamespace):
    @property
    def left_s(self) -> float:
        return float(self.notice.deadline_s - time.monotonic())


class OneRank:
    """One rank, as a thread."""

    def __init__(self, rank: int, size: int, port: int, directory: Path) -> None:
        self.stores = [Counted(connected(port)) for _ in range(2)]
        self.peers = Peers(rank, size, "n", self.stores[0], waiting=self.stores[1])
        self._told = threading.Event()
        self._directory = directory
        self.deadline_s = 0.0
        self.decided_s = self.done_s = 0.0
        self.ordered_s: dict[int, float] = {}
        """When it heard that a step is to be saved."""
        self.failure = ""
        self.peers.start()
        self.peers.listen(self._read)
        self.saver = threading.Thread(target=self._leave, daemon=True)
        self.saver.start()

    def _read(self, lines: list[Line]) -> None:
        for line in lines:
            if line.what == "notice" and not self._told.is_set():
                self.tell(30.0)
            if line.what == "decide" and not self.decided_s:
                self.decided_s = time.time()
            if line.what == "order" and line.point is not None:
                self.ordered_s[line.point[0]] = time.time()

    def tell(self, grace_s: float) -> None:
        self.deadline_s = time.monotonic() + grace_s
        self._grace_s = grace_s
        self._told.set()

    def close(self) -> None:
        """Without a word to the others."""
        self._told.set()
        self.peers.close()

    def _leave(self) -> None:
        self._told.wait()
        if not self.deadline_s:
            return
        rank, directory = self.peers.rank, self._directory
        leaving = _Leaving(
            notice=Notice("SIGTERM", self.deadline_s, self._grace_s, is_local=True),
            advanced_s=0.0,
            why_no_safe_point="none",
        )
        context: Any = SimpleNamespace(
            gate=Gate(), writes=True, exchange=None, generation=SimpleNamespace(number=1), storage=None, rank=rank
        )

        def attempt(capture: Any, members: tuple[int, ...]) -> Any:
            return Attempt(directory, rank, members)

        agreement = LastSave(
            context,
            self.peers,
            leaving,  # type: ignore[arg-type]
            attempt,
            commits=_Commits(directory),  # type: ignore[arg-type]
            warnings=RankWarnings(self.peers),
            changed_objects=None,  # type: ignore[arg-type]
        )
        try:
            agreement.save()
        except (MigratorError, NothingToSave) as error:
            self.failure = repr(error)
        self.done_s = time.time()
        self.peers.post(Line("out", rank), timeout_s=5.0)
        self.peers.close()
