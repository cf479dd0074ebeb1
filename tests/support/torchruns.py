"""A torchrun agent and its ranks, as real processes: one agent is one node, and one pod.

The agent is forked from the warm interpreter, and so are its ranks (`warm.py`): each is a child of the agent, in a
session of its own.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from migrator.notice.signal_file import Signal
from tests.support.harness import DEADLINE_S, ROOT, events_in, kill_group, until
from tests.support.rank_processes import Pod, Roots, free_port, is_running

if TYPE_CHECKING:
    from tests.support.harness import Job

AGENT = ROOT / "tests" / "support" / "scripts" / "agent.py"
WORKER = ROOT / "tests" / "support" / "scripts" / "worker.py"
IMPATIENT = "last_call_timeout=1,keep_alive_interval=1"
"""A node that may still come is waited for 1 s, not 30; one that vanished is missed after 3 s, not 15."""


@dataclass(frozen=True)
class Worker:
    """One process of one rank. A rank that is started again is another one."""

    life: int
    local_rank: int
    rank: int
    size: int
    pid: int
    out: Path

    @property
    def text(self) -> str:
        return self.out.read_text(errors="replace")


class Torchrun:
    """One agent. Further nodes of its job are agents with the `rdzv` of the first.

    A life is what the agent starts at once: `lives[1]` are the ranks after the first restart,
    or after another node came or went.

    `meeting` are options that say otherwise how the nodes meet: statically, for example.

    `shares_store` is whether the ranks use the agent's store, as they do by default, or rank 0 makes one for each life.
    Unless said they share it only where nothing starts anew: torch 2.13 keeps it for the next life with all its
    keys. Gloo then connects to ranks that are dead (6 of 12 restarts failed or hung, none of 12 with stores of their
    own), and a node that joins a running job waits for an address that nobody tells it.
    """

    def __init__(
        self,
        job: Job,
        *argv: str,
        name: str = "torchrun",
        nproc: int = 2,
        nnodes: str = "1",
        rdzv: str | None = None,
        rdzv_conf: str = IMPATIENT,
        meeting: Sequence[str] = (),
        max_restarts: int = 0,
        shutdown_timeout_s: int | None = None,
        shares_store: bool | None = None,
        pod: int = 0,
        roots: Roots = "shared",
        env: Mapping[str, str] | None = None,
        **more: str,
    ) -> None:
        self.nproc = nproc
        self.rdzv = rdzv or f"127.0.0.1:{free_port()}"
        """Where the nodes meet: a store that the agent holds which was given none."""
        self.pod = Pod(job, pod, has_own_root=roots == "own")
        self._stem = job.directory / name
        options = [f"--nproc-per-node={nproc}", f"--nnodes={nnodes}", f"--max-restarts={max_restarts}"]
        options += meeting or [
            # Both nodes are on this machine, so without a word whoever is first to bind would hold the store.
            f"--rdzv-conf=is_host={int(rdzv is None)},{rdzv_conf}",
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={self.rdzv}", "--rdzv-id=tests"),
            "--local-addr=127.0.0.1",
        ]
        if shutdown_timeout_s is not None:
            options.append(f"--shutdown-timeout={shutdown_timeout_s}")
        self.shares_store = nnodes == "1" and max_restarts == 0 if shares_store is None else shares_store
        own_store = {} if self.shares_store else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        base = {**self.pod.env, **own_store, "PYTHONPATH": str(ROOT), "TESTS_OUT": str(self._stem)}
        self.agent = job.start(
            [str(AGENT), *options, str(WORKER), str(job.script), *argv],
            out=job.directory / f"{name}.txt",
            env={**base, **(env or {}), **more},
        )

    @property
    def lives(self) -> list[list[Worker]]:
        """All ranks this agent ever started, life by life, each in the order of ranks."""
        lives: dict[int, list[Worker]] = {}
        for out in self._stem.parent.glob(f"{self._stem.name}-life-*.txt"):
            life, local, rank, size, pid = map(int, re.findall(r"\d+", out.name.removeprefix(self._stem.name)))
            worker = Worker(life=life, local_rank=local, rank=rank, size=size, pid=pid, out=out)
            lives.setdefault(worker.life, []).append(worker)
        return [sorted(lives[life], key=lambda worker: worker.rank) for life in sorted(lives)]

    @property
    def text(self) -> str:
        """What all wrote, one after the other, for messages."""
        workers = [worker for life in self.lives for worker in life]
        texts = [f"--- life {w.life}, rank {w.rank} of {w.size}, pid {w.pid}\n{w.text}" for w in workers]
        return "\n".join([f"--- agent {self.agent.pid}, {self.pod.name}\n{self.agent.text}", *texts])

    def events(self, name: str, life: int = -1) -> list[tuple[int, dict[str, str]]]:
        """Rank and fields of all log lines of one life with this event, rank by rank."""
        return [(worker.rank, fields) for worker in self.lives[life] for fields in events_in(worker.text, name)]

    def wait_for(self, pattern: str, life: int = 0, timeout_s: float = DEADLINE_S) -> list[Worker]:
        """Until a line of each rank of this life matches; the ranks."""

        def found() -> list[Worker]:
            workers = [*self.lives, *[[]] * (life + 1)][life]
            is_there = len(workers) == self.nproc and all(re.search(pattern, w.text, re.MULTILINE) for w in workers)
            return workers if is_there else []

        ranks: list[Worker] = until(found, f"{pattern!r} of all ranks of life {life}", timeout_s, lambda: self.text)
        return ranks

    def worker_pids(self) -> list[int]:
        """The ranks that run now."""
        try:
            children = psutil.Process(self.agent.pid).children()
        except psutil.NoSuchProcess:
            return []
        # What forks them for the agent is a child of it as well, but leads no session.
        return [child.pid for child in children if is_running(child.pid) and os.getsid(child.pid) == child.pid]

    def terminate(self) -> None:
        """SIGTERM to the agent, which passes it on, as kubelet does where it is PID 1."""
        self.agent.kill(signal.SIGTERM)

    def ask(self, grace_s: float = 20.0, request: str = "r-1") -> None:
        """Write what the pod's hook writes."""
        self.pod.ask(grace_s, request)

    def answer(self, timeout_s: float = DEADLINE_S) -> Signal | None:
        """What the pod's signal file says as soon as it is no request; None: it was taken away."""
        return self.pod.answer(timeout_s, lambda: self.text)

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        """The agent's exit code. torchrun makes 1 of all its ranks' failures and of every SIGTERM."""
        try:
            return self.agent.wait(timeout_s)
        except AssertionError:
            raise AssertionError(f"the agent still runs after {timeout_s} s:\n{self.text}") from None

    def end(self) -> None:
        """Whatever is left of it: the agent, its ranks, and what they started."""
        try:
            below = [child.pid for child in psutil.Process(self.agent.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            below = []
        # The agent first, so that it starts none of them again.
        self.agent.end()
        for pid in below:
            kill_group(pid)
        until(lambda: not any(map(is_running, below)), "the ranks to end", context=lambda: self.text)
