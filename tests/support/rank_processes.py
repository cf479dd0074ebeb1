"""Several ranks of one job as real processes, each in a pod of its own or together with others.

They are started as a training operator does it, without an agent: `env://` and
real gloo groups over loopback. A pod is what shares a signal file: the hook's
request reaches the ranks of its pod and nobody else.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from migrator.notice.signal_file import SAVE, Signal, SignalFile
from migrator.testing.gangs import free_port
from tests.support.harness import DEADLINE_S, Process, until

if TYPE_CHECKING:
    from tests.support.harness import Job

Roots = Literal["shared", "own"]
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}


class Pod:
    """What the ranks of one pod share. Pod 0 is that of jobs of one process, with the job's signal file."""

    def __init__(self, job: Job, number: int, *, has_own_root: bool = False) -> None:
        self.name = f"pod-{number}"
        self.signal = job.signal if number == 0 else job.directory / self.name / "signal"
        self.root = job.directory / f"ckpts-{number}" if has_own_root and number else job.root
        """The root of the ckpts as the pod sees it."""
        self.env = {**LOOPBACK, "HOSTNAME": self.name, "MIGRATOR_SIGNAL": str(self.signal)}
        self.env["MIGRATOR_CKPT"] = job.url or str(self.root)

    def ask(self, grace_s: float = 20.0, request: str = "r-1") -> None:
        """Write what the hook writes."""
        SignalFile(self.signal).write(SAVE, request=request, pod=self.name, deadline=time.time() + grace_s)

    def answer(self, timeout_s: float = DEADLINE_S, context: Callable[[], str] = lambda: "") -> Signal | None:
        """What the signal file says as soon as it is no request; None: it was taken away."""
        file = SignalFile(self.signal)

        def found() -> list[Signal | None]:
            said = file.read()
            return [] if said is not None and said.word == SAVE else [said]

        answers: list[Signal | None] = until(found, f"an answer in {self.signal}", timeout_s, context)
        return answers[0]


class Gang:
    """One life of a job of several ranks.

    `pods` says which rank lives in which pod, by a number for each rank, or how many pods share the
    ranks evenly. With `roots="own"` each pod but the first has a volume of its own as well. `each` has
    further variables for single ranks, `delay_s` says by how much each rank starts late.
    """

    def __init__(
        self,
        job: Job,
        size: int,
        *argv: str,
        name: str = "gang",
        pods: int | Sequence[int] = 1,
        roots: Roots = "shared",
        env: Mapping[str, str] | None = None,
        each: Mapping[int, Mapping[str, str]] | None = None,
        delay_s: Sequence[float] = (),
        **more: str,
    ) -> None:
        self.size = size
        self.pods = [rank * pods // size for rank in range(size)] if isinstance(pods, int) else list(pods)
        assert len(self.pods) == size
        assert len(delay_s) in (0, size)
        self._pods = {number: Pod(job, number, has_own_root=roots == "own") for number in self.pods}
        self.port = free_port()
        self._ranks: list[Process] = []
        for rank in range(size):
            place = {**self._place(rank), **(env or {}), **more, **(each or {}).get(rank, {})}
            out = job.directory / f"{name}-rank-{rank}.txt"
            late_s = delay_s[rank] if delay_s else 0.0
            self._ranks.append(job.start([str(job.script), *argv], out=out, env=place, delay_s=late_s))

    def _place(self, rank: int) -> dict[str, str]:
        pod = self.pods[rank]
        return {
            **self._pods[pod].env,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.pods[:rank].count(pod)),
            "LOCAL_WORLD_SIZE": str(self.pods.count(pod)),
        }

    def pod(self, number: int) -> Pod:
        return self._pods[number]

    def __getitem__(self, rank: int) -> Process:
        return self._ranks[rank]

    def __len__(self) -> int:
        return self.size

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._ranks]

    @property
    def texts(self) -> list[str]:
        """What each rank wrote."""
        return [process.text for process in self._ranks]

    @property
    def text(self) -> str:
        """What all ranks wrote, one after the other, for messages."""
        return "\n".join(f"--- rank {rank}, pod {self.pods[rank]}\n{text}" for rank, text in enumerate(self.texts))

    def events(self, name: str) -> list[tuple[int, dict[str, str]]]:
        """Rank and fields of all log lines with this event, rank by rank."""
        return [(rank, fields) for rank, process in enumerate(self._ranks) for fields in process.events(name)]

    def wait(self, timeout_s: float = DEADLINE_S) -> list[int]:
        """The exit codes. One deadline for all."""
        end_s = time.monotonic() + timeout_s
        for rank, process in enumerate(self._ranks):
            try:
                process.wait(max(0.01, end_s - time.monotonic()))
            except AssertionError:
                raise AssertionError(f"rank {rank} still running after {timeout_s} s:\n{self.text}") from None
        return [process.wait() for process in self._ranks]

    def wait_for(self, pattern: str, ranks: Iterable[int] | None = None, timeout_s: float = DEADLINE_S) -> None:
        """Until a line of each of these ranks matches; all ranks unless said."""
        end_s = time.monotonic() + timeout_s
        for rank in self._those(ranks):
            try:
                self[rank].wait_for(pattern, max(0.0, end_s - time.monotonic()))
            except AssertionError:
                message = f"waited {timeout_s} s for {pattern!r} in the output of rank {rank}:\n{self.text}"
                raise AssertionError(message) from None

    def kill(self, number: int = signal.SIGTERM, ranks: Iterable[int] | None = None) -> None:
        """A signal to these ranks, to each process alone; all ranks unless said. Who has ended gets none."""
        for rank in self._those(ranks):
            with contextlib.suppress(ProcessLookupError):
                self[rank].kill(number)

    def freeze(self, rank: int) -> None:
        """Stop the rank and its loader workers where they are. It has stopped when this returns."""
        self[rank].kill_group(signal.SIGSTOP)
        until(lambda: state_of(self[rank].pid) == "T", f"rank {rank} to stand still")

    def thaw(self, rank: int) -> None:
        self[rank].kill_group(signal.SIGCONT)

    def ask(self, pod: int = 0, grace_s: float = 20.0, request: str = "r-1") -> None:
        """Write what the pod's hook writes."""
        self._pods[pod].ask(grace_s, request)

    def answer(self, pod: int = 0, timeout_s: float = DEADLINE_S) -> Signal | None:
        """What the pod's signal file says as soon as it is no request; None: it was taken away."""
        return self._pods[pod].answer(timeout_s, lambda: self.text)

    def end(self) -> None:
        """Whatever is left of it, frozen or not. All are killed before any is waited for."""
        for process in self._ranks:
            process.kill_if_running()
        for process in self._ranks:
            process.end()

    def _those(self, ranks: Iterable[int] | None) -> Iterable[int]:
        return range(self.size) if ranks is None else ranks


def state_of(pid: int) -> str:
    """The kernel's letter for what the process does: `T` stopped, `Z` ended; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def is_running(pid: int) -> bool:
    """There is such a process and it has not ended, whether its parent has noticed or not."""
    return state_of(pid) not in ("", "Z", "X")
