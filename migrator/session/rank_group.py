"""How the ranks of a job meet, and what they do together outside of saving and loading.

Rank 0 begins the generation and finds the ckpts, and the others read the answer in the shared
log. What would only fail later, and without a message, is compared now: the names that each rank
has registered, and whether all ranks see the same root. Where they do not, rank 0 writes and
reads for all.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from migrator import errors
from migrator.ckpt import generations
from migrator.errors import (
    CkptMismatch,
    MigratorError,
    RanksError,
    RegistrationError,
    SettingsError,
    StorageError,
)
from migrator.events import log
from migrator.notice.inbox import NoticeInbox
from migrator.notice.signal_file_owner import SignalFileOwner
from migrator.notice.watcher import Notice
from migrator.platform import container
from migrator.ranks import place
from migrator.ranks.peers import Peers
from migrator.ranks.process_groups import Regroup
from migrator.ranks.protocol import Line
from migrator.save.context import SaveContext
from migrator.save.group.records_through_store import ThroughStore
from migrator.save.reply import Pod
from migrator.session.start import StartingPoint
from migrator.settings import Settings
from migrator.state.registry import Registry
from migrator.storage.base import Storage

_BYE_S = 2.0
"""Maximum time, in seconds, that a rank 0 that serves the job's store waits at its end for the other ranks to end."""
_SEE_S = 2.0
"""Maximum time, in seconds, until a rank sees the record that rank 0 has written, if both see the same root."""
_MEETING = "meeting"
_FOR_EVER = float("inf")


class RankGroup:
    """This rank among the other ranks of the job."""

    starting_point: StartingPoint
    """What rank 0 found, known after `meet()`."""

    def __init__(self, ranks: Peers, settings: Settings, registry: Registry, storage: Storage) -> None:
        self.ranks = ranks
        self._settings = settings
        self._registry = registry
        self._storage = storage
        self.shares_root = True
        """All ranks see the same root."""
        self.pids: list[int] = []
        """Process ids of the ranks in this pod."""
        self._regroup: Regroup | None = None
        agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        # Known from the beginning: the process that serves the store ends last, whatever goes wrong.
        self.pod = Pod(serves_store=ranks.rank == 0 and not agent_serves)
        ranks.start()

    @property
    def has_notice(self) -> bool:
        """The pod of some rank has a notice."""
        return bool(self.ranks.lines("notice"))

    def pass_on(self, notice: Notice) -> None:
        """A notice that came before the ranks have met: the other ranks know of it when they have."""
        self.ranks.tell_notice(notice.deadline_s)

    # Beginning.

    def meet(self, begin: Callable[[dict[str, Any]], StartingPoint]) -> StartingPoint:
        """Wait for all ranks; rank 0 begins the generation. An error on one rank is raised on all."""
        try:
            self._meet(begin)
        except BaseException:
            # The other ranks have to read of the error before the store ends with this process.
            self.say_bye()
            self.close()
            raise
        return self.starting_point

    def _meet(self, begin: Callable[[dict[str, Any]], StartingPoint]) -> None:
        ranks = self.ranks
        own = self._registry.own
        registered = {name: kind.kind + (" (own)" if name in own else "") for name, kind in self._registry}
        taken = SignalFileOwner(self._settings.signal).other()
        mine = place.pod(self._settings.signal)
        # Before the hello: when rank 0 has all hellos, each rank finds the lines of its pod.
        pod = f"pod/{xxhash.xxh3_64_hexdigest(repr(_pod(mine)).encode())}"
        ranks.tell("here", mine, topic=pod)
        ranks.tell("hello", {**mine, "registered": registered, "taken": taken}, topic=_MEETING)

        def answer(hellos: dict[int, Any]) -> Any:
            self._check_signal_files(hellos)
            self._check_registered({rank: hello["registered"] for rank, hello in hellos.items()})
            self.starting_point = begin({"ranks": ranks.size, "nonce": ranks.nonce})
            return self.starting_point.to_json()

        found = self.agree("hello", _MEETING, answer, "each rank has to call listening() once")
        if ranks.rank != 0:
            self.starting_point = StartingPoint.from_json(found)
        self._find_pod(ranks.said_in(pod))
        ranks.tell("sees", self._sees_root(), topic=_MEETING)
        sees: dict[str, bool] = self.agree("sees", _MEETING, dict, "each rank looks whether it sees the root")
        self.shares_root = all(sees.values())
        if not self.shares_root and ranks.rank == 0:
            blind = ",".join(rank for rank, does in sees.items() if not does)
            log(
                "roots_apart",
                level=logging.WARNING,
                ranks=blind,
                root=self._storage.root,
                means="rank 0 writes and reads for all; should its pod be lost without notice, so are its ckpts. "
                "Mount one volume for all pods, or set MIGRATOR_CKPT to one",
            )

    def agree(
        self,
        what: str,
        topic: str,
        sum_up: Callable[[dict[int, Any]], Any],
        why: str,
        *,
        at_most_s: float = _FOR_EVER,
    ) -> Any:
        """The answer that rank 0 computes from the reports of all ranks; its error, if any, is raised on all ranks.

        Each rank reads one line only, however many ranks there are.
        """
        ranks, answer = self.ranks, f"{what}: all"
        if ranks.rank:
            found = ranks.gather(answer, f"rank 0 has to answer: {why}", of={0}, at_most_s=at_most_s)[0]
            if "error" not in found:
                return found["answer"]
            kind = getattr(errors, found["error"], None)
            if isinstance(kind, type) and issubclass(kind, MigratorError):
                raise kind(found["text"])
            raise RanksError(f"rank 0 could not go on: {found['error']}: {found['text']}")
        try:
            summed = sum_up(ranks.gather(what, why, topic=topic, at_most_s=at_most_s))
        except Exception as error:
            ranks.tell(answer, {"error": type(error).__name__, "text": str(error)})
            raise
        ranks.tell(answer, {"answer": summed})
        return json.loads(json.dumps(summed))

    def _check_signal_files(self, hellos: dict[int, Any]) -> None:
        for rank, hello in hellos.items():
            if hello["taken"] is not None:
                refusal = SignalFileOwner(Path(hello["signal"])).refusal(hello["taken"])
                raise SettingsError(refusal if rank == self.ranks.rank else f"rank {rank}: {refusal}")

    def _check_registered(self, registered: dict[int, dict[str, str]]) -> None:
        lines = []
        for rank, names in registered.items():
            for name in sorted(names.keys() ^ registered[0].keys()):
                lines.append(f"{name}: {'not ' if name in registered[0] else ''}registered on rank {rank}")
            for name in names.keys() & registered[0].keys():
                if names[name] != registered[0][name]:
                    lines.append(f"{name}: a {names[name]} on rank {rank}, a {registered[0][name]} on rank 0")
        if lines:
            raise RegistrationError(
                "listening(): the ranks have not registered the same; rank 0 is what they are compared with:\n  "
                + "\n  ".join(lines)
                + "\nRegister the same names on every rank, metrics that only one of them fills as well."
            )

    def _find_pod(self, hellos: dict[int, Any]) -> None:
        mine = hellos[self.ranks.rank]
        pod = {rank: hello["pid"] for rank, hello in hellos.items() if _pod(hello) == _pod(mine)}
        lower = tuple(pid for rank, pid in pod.items() if rank < self.ranks.rank)
        self.pids = list(pod.values())
        self.pod = replace(self.pod, position=len(lower), lower_pids=lower, ranks=len(pod))

    def _sees_root(self) -> bool:
        """Whether this rank finds the record that rank 0 has just written, and can write beside it."""
        if self.ranks.rank == 0 or not self.starting_point.generation.is_claimed:
            return True
        end_s = time.monotonic() + _SEE_S
        while True:
            try:
                about = generations.read_about(self._storage, self.starting_point.generation.number)
                if about.get("nonce") == self.ranks.nonce:
                    self._storage.check()
                    return True
                if about:
                    return False
            except CkptMismatch as error:
                raise RanksError(
                    f"rank 0 runs a newer migrator than rank {self.ranks.rank}: run the same on all ranks. {error}"
                ) from error
            except StorageError:
                return False
            if time.monotonic() > end_s:
                return False
            time.sleep(0.05)

    def save_context(self, context: SaveContext) -> SaveContext:
        """`context` for one of several ranks."""
        return replace(
            context,
            rank=self.ranks.rank,
            size=self.ranks.size,
            exchange=None if self.shares_root else ThroughStore(self.ranks),
            writes=self.shares_root or self.ranks.rank == 0,
        )

    def begin(self) -> None:
        """Log how many ranks there are, which of them are in this pod, and whether they share the root."""
        log(
            "ranks",
            size=self.ranks.size,
            pod=",".join(map(str, self.pids)),
            root="shared" if self.shares_root else "rank 0's",
        )

    def install(self) -> None:
        """Give each process group that the script makes from now on keys of its own."""
        self._regroup = Regroup(self.ranks.nonce, self.ranks.rank, self.ranks.size)

    # Ending.

    def say_bye(self) -> None:
        """The script has ended; no other rank has to wait for this one."""
        # The rank that serves the store ends when it has read this line, maybe while this rank still reads others.
        self.ranks.is_done = True
        if self.pod.serves_store:
            self.ranks.follow("leave")
            self.ranks.hurry()
        self.ranks.post(Line("bye", self.ranks.rank), timeout_s=0.5)
        end_s = time.monotonic() + _BYE_S
        while self.pod.serves_store and not self.ranks.store_is_unreachable and time.monotonic() < end_s:
            if len({line.rank for line in self.ranks.lines("bye")}) == self.ranks.size:
                return
            self.ranks.wait(0.02)

    def is_last_of_pod(self, ended: set[int]) -> bool:
        """No other rank of this pod needs the signal file any more.

        `ended`: the notes of processes that have ended, read after this process has written its own. So of two that
        end at the same moment at least one finds both.
        """
        others = [pid for pid in self.pids if pid != os.getpid()]
        said = {line.rank for line in self.ranks.lines("bye")}
        return len(said) == self.ranks.size or not any(container.is_alive(pid) for pid in others if pid not in ended)

    def close(self) -> None:
        self.ranks.close()
        if self._regroup is not None:
            self._regroup.remove()


class NoticeToAnyRank:
    """Notices to this pod, and those to the pods of other ranks."""

    def __init__(self, here: NoticeInbox, group: RankGroup) -> None:
        self._here = here
        self._group = group

    @property
    def has_notice(self) -> bool:
        return self._here.has_notice or self._group.has_notice

    def wait(self, timeout_s: float) -> bool:
        """Wait for a notice to this pod only, and then look for others."""
        return self._here.wait(timeout_s) or self.has_notice


def _pod(hello: Mapping[str, Any]) -> tuple[str, str]:
    return hello["container"], hello["signal"]
