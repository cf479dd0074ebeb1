"""How a life of the job begins: its generation, the lives before it, and the ckpts that it can go on from.

With several ranks only rank 0 does this, and the others get what it found (`group.py`). A notice
that comes meanwhile ends all waiting: such a life claims no generation and only leaves.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import distributed

from migrator.ckpt import catalog, continuation, generations, leaving_mark
from migrator.ckpt.generations import Generation
from migrator.ckpt.manifest import MANIFEST_LIMIT, Manifest
from migrator.ckpt.names import manifest_name
from migrator.errors import Migrated, MigratorError, NoUsableCkpt, UsageError
from migrator.events import log
from migrator.leaving.staying import wait_for_agent
from migrator.notice import signal_file
from migrator.notice.inbox import NoticeInbox
from migrator.notice.signal_file import SignalFile
from migrator.notice.signal_file_owner import SignalFileOwner
from migrator.platform import container, launcher
from migrator.save import speed
from migrator.session.memory_before import log_memory_before
from migrator.settings import Every, Settings
from migrator.storage.base import Storage


class Notices(Protocol):
    """What is known so far of notices that this process must leave."""

    @property
    def has_notice(self) -> bool:
        """There is one."""

    def wait(self, timeout_s: float) -> bool:
        """Until there is one, but not for longer; returns whether there is one."""


class _Noticed(Exception):  # noqa: N818 - internal
    """The notice came while `listening()` waited."""


@dataclass(frozen=True)
class StartingPoint:
    """What a life found when it began. Holds for all ranks."""

    generation: Generation
    ckpts: tuple[str, ...]
    """The ckpts that it can go on from, furthest first."""
    every: Every
    """How often a save is made."""
    is_warned: bool = False
    """The log says that a save takes too long for the grace."""

    def to_json(self) -> dict[str, Any]:
        generation = {**asdict(self.generation), "proven": sorted(self.generation.proven), "differs": {}}
        return {
            "generation": generation,
            "ckpts": self.ckpts,
            "every": asdict(self.every),
            "is_warned": self.is_warned,
        }

    @staticmethod
    def from_json(found: dict[str, Any]) -> StartingPoint:
        got = found["generation"]
        generation = Generation(
            got["number"],
            got["continues"],
            tuple(got["lineage"]),
            frozenset(got["proven"]),
            is_claimed=got["is_claimed"],
        )
        return StartingPoint(
            generation, tuple(found["ckpts"]), Every(**found["every"]), is_warned=found.get("is_warned", False)
        )


def begin_generation(settings: Settings, storage: Storage, notices: Notices, about: dict[str, Any]) -> StartingPoint:
    """Claim this life's number, wait for an earlier life that is still saving, and look for ckpts."""
    storage.check()
    if traits := storage.traits():
        log("storage", root=storage.root, **dict[str, Any](traits))
    for why in storage.weaknesses():
        log("storage_warning", level=logging.WARNING, why=why)
    fresh = settings.resume == "never"
    if notices.has_notice:
        generation = generations.not_claimed(storage, fresh=fresh)
    else:
        generation = generations.claim(storage, fresh=fresh, about={**_about(), **about})
        _log_generation(settings, storage, generation)

        def sleep(seconds: float) -> None:
            if notices.wait(seconds):
                raise _Noticed

        with contextlib.suppress(_Noticed):
            leaving_mark.wait_for_leaving(storage, generation.lineage, sleep=sleep)
            log_memory_before(storage, generation.continues)

    def find() -> list[str]:
        return catalog.furthest_first(storage, generation)

    ckpts = find() if notices.has_notice else continuation.go_on(storage, generation.number, find)
    _log_forks(storage, ckpts)
    is_there = bool(ckpts) or legacy_file(settings, ckpts) is not None
    if settings.resume == "require" and not is_there and not notices.has_notice:
        raise NoUsableCkpt(
            f"MIGRATOR_RESUME=require, but there is no ckpt of job {settings.job!r} "
            f"under {storage.root}. Is the volume mounted, and are MIGRATOR_CKPT and MIGRATOR_JOB "
            "those of the run to be continued?"
        )
    is_warned = not notices.has_notice and _warn_of_grace(settings, storage, ckpts)
    return StartingPoint(generation, tuple(ckpts), settings.every, is_warned=is_warned)


def _warn_of_grace(settings: Settings, storage: Storage, ckpts: list[str]) -> bool:
    """Whether the save of the ckpt that will be loaded took too long for the grace."""
    try:
        manifest = Manifest.from_bytes(storage.get(manifest_name(ckpts[0]), limit=MANIFEST_LIMIT)) if ckpts else None
    except MigratorError:
        return False  # it is named when it is loaded
    if manifest is None or manifest.took_s is None:
        return False
    return speed.warn_before(manifest.ckpt, manifest.bytes, manifest.took_s, grace_s=settings.grace_s)


def legacy_file(settings: Settings, ckpts: list[str]) -> Path | None:
    """The predecessor's file, if it is what this life goes on from."""
    file = settings.legacy_file
    if ckpts or settings.resume == "never" or file is None or not file.is_file():
        return None
    return file


def check_is_alone(settings: Settings) -> None:
    """Raise if a launcher started this process as one of several ranks, and the script has made no process group."""
    if settings.ranks == "auto" and not group_size():
        several = launcher.one_of_several(os.environ)
        if several is not None:
            raise UsageError(several.refusal)


def group_size() -> int:
    """Number of ranks in the process group; 0: there is none."""
    is_there = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if is_there else 0


def write_init(file: SignalFile, pids: list[int], *, grace_s: float) -> None:
    """Write into the signal file that these processes listen. An open request stays, for the watcher to find it."""
    file.forget_ends()
    file.write_unless_asked(signal_file.INIT, grace_s=grace_s, pids=",".join(map(str, pids)))


def give_up(settings: Settings, noticed: NoticeInbox, owner: SignalFileOwner, error: BaseException) -> None:
    """`listening()` has failed: everything is as before. Raises `Migrated` if the pod has to leave anyway."""
    owner.release()
    file = SignalFile.here(settings.signal)
    is_told = noticed.has_notice and isinstance(error, Exception)
    with contextlib.suppress(MigratorError):
        _withdraw(file, error, is_told=is_told, grace_s=settings.grace_s)
    if is_told:
        why = f"nothing was trained yet, and listening() failed: {type(error).__name__}: {error}"
        log("leaving", level=logging.ERROR, why=why)
        sigterm = noticed.sigterm
        wait_for_agent(launcher.agent(), is_terminated=lambda: sigterm.is_heard, deadline_s=noticed.deadline_s)
    noticed.give_up()
    if is_told:
        # The pod goes in any case, and an error would tell the cluster not to start it again.
        raise Migrated(settings.exit_code) from error


def _withdraw(file: SignalFile, error: BaseException, *, is_told: bool, grace_s: float) -> None:
    """In the signal file: answer the hook, or take back that this process listens."""
    found = file.read()
    if found is None or (found.pids and os.getpid() not in found.pids):
        return  # another process listens, and answers
    if is_told and file.open_deadline(grace_s) is not None:
        why = f"nothing was trained yet, and listening() failed: {error}"
        fields = {"deadline": found.fields.get("deadline"), "agent": file.agent} if file.agent else {}
        file.write(signal_file.INIT, request=found.fields.get("request"), error=why, **fields)
    elif found.word == signal_file.INIT and found.pids == (os.getpid(),):
        file.remove()


def _about() -> dict[str, Any]:
    """What the record of a generation says of the process that claimed it."""
    return {
        "host": container.pod_name(),
        "pid": os.getpid(),
        "time": time.time(),
        "script": sys.argv[0] if sys.argv else "",
        "argv": sys.argv[1:],
    }


def _log_generation(settings: Settings, storage: Storage, generation: Generation) -> None:
    log(
        "generation_claimed",
        generation=generation.number,
        continues=generation.continues,
        root=storage.root,
        job=settings.job,
    )
    for what, (there, here) in generation.differs.items():
        log("other_script", level=logging.WARNING, what=what, there=there, here=here)
    strangers = catalog.others(storage, generation.lineage)
    if strangers:
        log("other_lineage", level=logging.WARNING, ckpts=",".join(strangers))
    if isinstance(settings.ckpt, Path) and _dies_with_container(settings.ckpt):
        log(
            "storage_warning",
            level=logging.WARNING,
            why=f"{settings.ckpt} is on the container's own file system and dies with the pod; "
            "mount a volume there, or set MIGRATOR_CKPT to one",
        )
    if isinstance(settings.ckpt, str) and settings.ckpt.startswith("memory://"):
        log(
            "storage_warning",
            level=logging.WARNING,
            why=f"{settings.ckpt} is the memory of this process: every ckpt is lost when the process ends, and no "
            "other life can load one; set MIGRATOR_CKPT to a volume or a bucket for anything but a trial",
        )


def _dies_with_container(root: Path) -> bool:
    return container.in_kubernetes(os.environ) and container.is_on_container_filesystem(root)


def _log_forks(storage: Storage, ckpts: list[str]) -> None:
    branches = catalog.beside(storage, ckpts)
    if branches:
        log(
            "fork",
            level=logging.WARNING,
            furthest=ckpts[0],
            beside=",".join(branches),
            means="two lives went on from the same ckpt; the one that trained further counts, what the other one "
            "trained is not used",
        )
