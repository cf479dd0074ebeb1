"""How the ranks of a job meet, and what they do together outside of a save.

Rank 0 claims the generation and finds the ckpts; the others hear of it through
the board. What could go wrong later in silence is compared now: what is
registered, and whether all ranks see the same root. On a root that they do not
share rank 0 writes and reads for all.

Loading is agreed as well: a ckpt counts as loaded when every rank has verified
every byte of it; one that a single rank cannot use is used by none.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from migrator import errors
from migrator.platform import container as environment
from migrator.ranks import large_values
from migrator.ckpt import generations as lineage
from migrator.session import restore_plan as loading
from migrator.ranks.protocol import Line
from migrator.errors import (
    CkptCorrupt,
    CkptMismatch,
    MigratorError,
    RanksError,
    RegistrationError,
    SettingsError,
    StorageError,
)
from migrator.events import log
from migrator.save.group.group import Pod
from migrator.ckpt.generations import Generation
from migrator.ckpt.manifest import LIMIT, NAME, Manifest
from migrator.ranks.peers import Ranks, here
from migrator.state.registry import Registry
from migrator.save.attempt import Workshop
from migrator.settings import Every, Settings
from migrator.notice.signal_file_owner import SignalOwner
from migrator.storage.posix import LocalStorage
from migrator.save.group.last_save import ThroughStore
from migrator.notice.watcher import News

BYE_S = 2.0
"""Rank 0, if it serves the job's store, ends so long after the others at most."""
LOAD_S = 1800.0
"""A rank that has loaded waits so long for the others to have done so too."""
_SEE_S = 2.0
_MEETING = "meeting"
_FOR_EVER = float("inf")


@dataclass(frozen=True)
class Welcome:
    """What rank 0 found, for all."""

    generation: Generation
    ckpts: tuple[str, ...]
    every: Every
    """How often a save is made, on all ranks alike."""

    def to_json(self) -> dict[str, Any]:
        generation = {**asdict(self.generation), "proven": sorted(self.generation.proven), "differs": {}}
        return {"generation": generation, "ckpts": self.ckpts, "every": asdict(self.every)}

    @staticmethod
    def of(found: dict[str, Any]) -> Welcome:
        got = found["generation"]
        generation = Generation(
            got["number"],
            got["continues"],
            tuple(got["lineage"]),
            frozenset(got["proven"]),
            is_claimed=got["is_claimed"],
        )
        return Welcome(generation, tuple(found["ckpts"]), Every(**found["every"]))


class Team:
    """This rank among the others."""

    welcome: Welcome

    def __init__(self, ranks: Ranks, settings: Settings, registry: Registry, storage: LocalStorage) -> None:
        self.ranks = ranks
        self._settings = settings
        self._registry = registry
        self._storage = storage
        self._is_shared = True
        self._loads = 0
        self.pids: list[int] = []
        """The ranks in this pod."""
        agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        # Known from the beginning: whatever goes wrong, the store ends last.
        self.pod = Pod(serves_store=ranks.rank == 0 and not agent_serves)
        ranks.start()

    @property
    def is_told(self) -> bool:
        """A rank has said that its pod must leave."""
        return bool(self.ranks.lines("news"))

    def pass_on(self, news: News) -> None:
        """Before there is anybody here who saves: the others are to know of it when they have met."""
        self.ranks.tell_news(news.deadline_s)

    # Beginning.

    def meet(self, begin: Callable[[dict[str, Any]], Welcome]) -> None:
        """All ranks come together; rank 0 begins the generation. Raises on all ranks what went wrong on one."""
        try:
            self._meet(begin)
        except BaseException:
            # The others are to hear the same before the store goes with this process.
            self.say_bye()
            self.close()
            raise

    def _meet(self, begin: Callable[[dict[str, Any]], Welcome]) -> None:
        ranks = self.ranks
        own = self._registry.own
        registered = {name: kind.kind + (" (own)" if name in own else "") for name, kind in self._registry}
        taken = SignalOwner(self._settings.signal).other()
        mine = here(self._settings.signal)
        # Before the hello: when rank 0 has all hellos, each rank finds those of its pod.
        pod = f"pod/{xxhash.xxh3_64_hexdigest(repr(_pod(mine)).encode())}"
        ranks.tell("here", mine, topic=pod)
        ranks.tell("hello", {**mine, "registered": registered, "taken": taken}, topic=_MEETING)

        def welcome(hellos: dict[int, Any]) -> Any:
            self._check_signal_files(hellos)
            self._check_registered({rank: hello["registered"] for rank, hello in hellos.items()})
            self.welcome = begin({"ranks": ranks.size, "nonce": ranks.nonce})
            return self.welcome.to_json()

        found = self._agreed("hello", _MEETING, welcome, "each rank has to call listening() once")
        if ranks.rank != 0:
            self.welcome = Welcome.of(found)
        self._find_pod(ranks.said_in(pod))
        ranks.tell("sees", self._sees_root(), topic=_MEETING)
        sees: dict[str, bool] = self._agreed("sees", _MEETING, dict, "each rank looks whether it sees the root")
        self._is_shared = all(sees.values())
        if not self._is_shared and ranks.rank == 0:
            blind = ",".join(rank for rank, does in sees.items() if not does)
            log(
                "roots_apart",
                level=logging.WARNING,
                ranks=blind,
                root=self._storage.root,
                means="rank 0 writes and reads for all; should its pod be lost without notice, so are its ckpts. "
                "Mount one volume for all pods, or set MIGRATOR_CKPT to one",
            )

    def _agreed(
        self,
        what: str,
        topic: str,
        sum_up: Callable[[dict[int, Any]], Any],
        why: str,
        *,
        at_most_s: float = _FOR_EVER,
    ) -> Any:
        """What rank 0 makes of what all ranks said, on all ranks; or there the error that it made of it.

        So each rank reads one line, however many there are.
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
                refusal = SignalOwner(Path(hello["signal"])).refusal(hello["taken"])
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
        self.pod = replace(self.pod, position=len(lower), lower_pids=lower)

    def _sees_root(self) -> bool:
        """Whether this rank finds the very record that rank 0 has just made, and can write beside it."""
        if self.ranks.rank == 0 or not self.welcome.generation.is_claimed:
            return True
        end_s = time.monotonic() + _SEE_S
        while True:
            try:
                about = lineage.read_about(self._storage, self.welcome.generation.number)
                if about.get("nonce") == self.ranks.nonce:
                    self._storage.check()
                    return True
                if about:
                    return False
            except StorageError:
                return False
            if time.monotonic() > end_s:
                return False
            time.sleep(0.05)

    def workshop(self, shop: Workshop) -> Workshop:
        """`shop` for one of several ranks."""
        return replace(
            shop,
            rank=self.ranks.rank,
            size=self.ranks.size,
            exchange=None if self._is_shared else ThroughStore(self.ranks),
            writes=self._is_shared or self.ranks.rank == 0,
        )

    def begin(self) -> None:
        """Everybody listens from here on."""
        log(
            "ranks",
            size=self.ranks.size,
            pod=",".join(map(str, self.pids)),
            root="shared" if self._is_shared else "rank 0's",
        )
        self.ranks.relax()
        # What was said before anybody listened here.
        self.ranks.on_lines(list(self.ranks.board.lines))

    # Loading.

    def load(self, name: str) -> loading.Loaded:
        """Load this ckpt on all ranks, or raise on all of them."""
        self._loads += 1
        self.ranks.hurry()
        what, bad, fatal = f"load {self._loads} {name}", "", ""
        loaded: loading.Loaded | None = None
        error: Exception | None = None
        try:
            if self._is_shared:
                loaded = loading.load(self._storage, name, self._registry, rank=self.ranks.rank, size=self.ranks.size)
            else:
                loaded = self._load_apart(name, what)
        except CkptCorrupt as found:
            error, bad = found, str(found)
        except Exception as found:
            error, fatal = found, f"{type(found).__name__}: {found}"
        self.ranks.tell(what, {"bad": bad, "fatal": fatal}, topic=what)
        verdict = self._agreed(what, what, _worst, "each rank has to call load_ckpt()", at_most_s=LOAD_S)
        self.ranks.relax()
        if fatal and error is not None:
            raise error
        if verdict["fatal"]:
            raise CkptMismatch(f"rank {verdict['rank']} could not load {name}: {verdict['fatal']}")
        if verdict["bad"]:
            raise error or CkptCorrupt(f"rank {verdict['rank']} found {verdict['bad']}")
        assert loaded is not None
        return loaded

    def _load_apart(self, name: str, what: str) -> loading.Loaded:
        """Rank 0 reads; manifest and tensors reach the others through store and process group."""
        from torch import distributed

        ranks, key = self.ranks, self.ranks.key(what)
        tensors: dict[str, Any] = {}
        if ranks.rank == 0:
            try:
                manifest = lineage.whole(self._storage, name)
                data = self._storage.get(f"{name}/{NAME}", limit=LIMIT)
                tensors = loading.read(self._storage, manifest, {})
                lineage.make_durable(self._storage, name)
            except MigratorError as error:
                ranks.tell(f"{what} read", {"bad": str(error)})
                raise
            if ranks.call(lambda store: large_values.put(store, key, data), timeout_s=LOAD_S) is None:
                raise RanksError("the job's store does not answer: the ckpt cannot be handed to the other ranks")
            ranks.tell(f"{what} read", {"tensors": loading.described(tensors)})
        found = ranks.gather(f"{what} read", "rank 0 reads the ckpt", of={0}, at_most_s=LOAD_S)[0]
        if "bad" in found:
            raise CkptCorrupt(f"rank 0 found {found['bad']}")
        try:
            if ranks.rank != 0:
                data = ranks.call(lambda store: large_values.get(store, key), timeout_s=LOAD_S)
                if data is None:
                    gone = "ended" if ranks.is_lost else "did not answer"
                    raise RanksError(f"the job's store {gone} while the ckpt was handed over")
                manifest = Manifest.from_bytes(data)
                tensors = loading.made(found["tensors"])
        except Exception:
            ranks.tell(f"{what} ready", False, topic=what)
            raise
        # From here on all ranks do the same, or none: a collective knows no way back.
        ranks.tell(f"{what} ready", True, topic=what)
        ready: dict[str, bool] = self._agreed(
            f"{what} ready", what, dict, "each rank makes room for the ckpt", at_most_s=LOAD_S
        )
        if ranks.rank == 0:
            ranks.later(lambda store: large_values.delete(store, key))
        if not all(ready.values()):
            raise RanksError(f"not all ranks could make room for {name}")
        group = distributed.new_group(backend="gloo")
        for tensor in tensors.values():
            distributed.broadcast(loading.as_bytes(tensor), src=0, group=group)
        distributed.destroy_process_group(group)
        fit = loading.Fit(manifest, self._registry, rank=ranks.rank, size=ranks.size)
        return fit.restore(tensors)

    # Ending.

    def say_bye(self) -> None:
        """The script has ended; nobody has to wait for this rank."""
        # Who serves the store ends as soon as it has read this line, maybe while this rank still looks for others.
        self.ranks.is_done = True
        if self.pod.serves_store:
            self.ranks.follow("leave")
            self.ranks.hurry()
        self.ranks.post(Line("bye", self.ranks.rank), timeout_s=0.5)
        end_s = time.monotonic() + BYE_S
        while self.pod.serves_store and not self.ranks.is_lost and time.monotonic() < end_s:
            if len({line.rank for line in self.ranks.lines("bye")}) == self.ranks.size:
                return
            self.ranks.wait(0.02)

    def is_last_of_pod(self, ended: set[int]) -> bool:
        """No other rank of this pod needs the signal file any more.

        `ended` has to be read behind one's own note in it: of two that end at the same moment one finds both.
        """
        others = [pid for pid in self.pids if pid != os.getpid()]
        said = {line.rank for line in self.ranks.lines("bye")}
        return len(said) == self.ranks.size or not any(environment.is_alive(pid) for pid in others if pid not in ended)

    def close(self) -> None:
        self.ranks.close()


def _worst(votes: dict[int, dict[str, str]]) -> dict[str, Any]:
    """Of all that was said of a ckpt what keeps it from being used, if anything does."""
    for kind in ("fatal", "bad"):
        for rank, vote in votes.items():
            if vote[kind]:
                return {"rank": rank, "fatal": "", "bad": "", kind: vote[kind]}
    return {"rank": 0, "fatal": "", "bad": ""}


def _pod(hello: Mapping[str, Any]) -> tuple[str, str]:
    return hello["container"], hello["signal"]
