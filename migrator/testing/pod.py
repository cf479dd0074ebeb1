"""One pod, from its start to its end, managed as by kubelet.

    delete   preStop inside the grace -> SIGTERM to process 1 -> SIGKILL at the end of the grace
             (2 s later if the hook used it up)
    in place a container that ends is started again in the same pod, if the policy says so: its own
             files are new, the pod's emptyDirs are not

A thread per pod starts its containers and waits for their end. The calls of a test
(`delete`, `crash`, ...) run in the thread of the caller. All waits have a deadline;
their errors say what did not happen and contain the pod's output.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from migrator.testing.container import Command, Container, Exec
from migrator.testing.errors import StandInError
from migrator.testing.spec import FIELDS, ContainerSpec, Mount, PodSpec, expand, replacer

WAIT_S = 60.0
"""Default maximum time, in seconds, of a wait."""
MIN_GRACE_S = 2.0
"""Time, in seconds, that the container still gets after a hook has used up the grace, as with kubelet."""
_MESSAGE_AT_MOST = 4096
"""Maximum size of a termination message, in bytes."""
_FALLBACK_AT_MOST = 2048
"""Maximum length of a message that is taken from the output, in characters."""
_QUICK_END_S, _PAUSE_AT_MOST_S = 1.0, 5.0
"""A container that ran for less than the first is restarted after a pause, of at most the second; in seconds."""
TERMINATION_LOG = "/dev/termination-log"
TMP = "/tmp"
RUN_DIRECTORY = "/tmp/migrator"
"""The default directory of the signal file, in the container's own file system, which is new for each container."""


@dataclass(frozen=True)
class HookRun:
    """One run of a hook."""

    name: str
    code: int | None
    """The exit code; 137 if it ended with the container; None if it could not be started."""
    text: str
    """The output, or why it could not be started."""
    began_s: float
    """Seconds since the stop began."""
    took_s: float


@dataclass(frozen=True)
class Stop:
    """How a container ended. Times are seconds since the stop was requested; without a request, since the end."""

    exit_code: int
    """128 plus the number if a signal ended it."""
    reason: str
    """`Completed`, `Error`, `OOMKilled`, `NodeLost` or `StartError`."""
    hooks: tuple[HookRun, ...] = ()
    term_s: float | None = None
    """When SIGTERM was sent; None if it was not."""
    is_term_heard: bool = False
    """Process 1 had a handler for SIGTERM. Without one the kernel drops signals for process 1."""
    kill_s: float | None = None
    """When SIGKILL was sent."""
    took_s: float = 0.0
    message: str = ""
    """The termination message of the container."""

    @property
    def hook(self) -> HookRun:
        """The one run of preStop."""
        if len(self.hooks) != 1:
            raise StandInError(f"preStop ran {len(self.hooks)} times, not once")
        return self.hooks[0]


@dataclass
class _Stopping:
    """A stop in progress. Times are on the monotonic clock."""

    start_s: float
    runs: list[Exec] = field(default_factory=list)
    term_s: float | None = None
    is_term_heard: bool = False
    kill_s: float | None = None


class Pod:
    """One pod. Made by a `Kubelet`."""

    def __init__(
        self,
        name: str,
        spec: PodSpec,
        directory: Path,
        *,
        paths: Mapping[str, Path],
        volume: Callable[[str], Path],
        env: Mapping[str, str],
        late_env: Callable[[int], Mapping[str, str]] = lambda number: {},
        on_delete: Callable[[Pod], None] = lambda pod: None,
        on_end: Callable[[Pod], None] = lambda pod: None,
    ) -> None:
        self.name = name
        self.spec = spec
        self.directory = directory
        self.containers: list[Container] = []
        """One for each start, the newest last."""
        self.stops: list[Stop] = []
        """How each container ended."""
        self.is_deleted = False
        self.is_disrupted = False
        """The cluster removed the pod, and not its owner: the condition `DisruptionTarget`."""
        self.is_over = threading.Event()
        self._paths = dict(paths)
        self._volume = volume
        self._env = dict(env)
        self._late_env = late_env
        self._on_delete = on_delete
        self._on_end = on_end
        self._why: str | None = None
        self._stopping: _Stopping | None = None
        self._pause_s = 0.0
        self._changed = threading.Condition()
        self._hooks: list[tuple[str, Exec]] = []
        directory.mkdir(parents=True)
        self._thread = threading.Thread(target=self._live, daemon=True, name=f"pod {name}")

    # What a test reads.

    @property
    def container(self) -> Container:
        """The container that runs, or ran last. Waits for a container that is being started or restarted."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.is_over.is_set() or self._is_running(), WAIT_S):
                raise StandInError(f"pod {self.name}: no container within {WAIT_S:.0f} s")
            if not self.containers:
                raise StandInError(f"pod {self.name} ended before its container was started: {self.stops[-1]}")
            return self.containers[-1]

    @property
    def restarts(self) -> int:
        """How often the container was started again in place."""
        return max(0, len(self.containers) - 1)

    @property
    def log(self) -> str:
        """The output of all containers, oldest first."""
        return "".join(container.text for container in list(self.containers))

    def path(self, path: str) -> Path:
        """The path on this machine for a path of the container: `pod.path("/ckpts/preStop.log")`."""
        number, spec = len(self.containers) or 1, self.spec.container
        if (tmp := self._tmp(spec)) and (path == TMP or path.startswith(f"{TMP}/")):
            return tmp / path.removeprefix(TMP).lstrip("/")
        return Path(self._place(number, spec)(path))

    def wait_for_log(self, pattern: str, timeout_s: float = WAIT_S, *, count: int = 1) -> re.Match[str]:
        """Wait until `count` places of the output match; the last of these matches."""
        end_s = time.monotonic() + timeout_s
        while True:
            is_over = self.is_over.is_set()
            found = list(re.finditer(pattern, self.log, re.MULTILINE))
            if len(found) >= count:
                return found[count - 1]
            if is_over or time.monotonic() > end_s:
                why = "it has ended" if is_over else f"{timeout_s:.0f} s are over"
                raise StandInError(
                    f"pod {self.name} wrote {pattern!r} {len(found)} times, expected {count}: {why}\n{self._story()}"
                )
            time.sleep(0.005)

    def wait(self, timeout_s: float = WAIT_S) -> Stop:
        """Wait until the pod is over; how its last container ended."""
        if not self.is_over.wait(timeout_s):
            raise StandInError(f"pod {self.name} still runs after {timeout_s:.0f} s\n{self._story()}")
        return self.stops[-1]

    # What a test does.

    def delete(
        self, *, grace_s: float | None = None, hooks: int = 1, at_once: bool = False, timeout_s: float | None = None
    ) -> Stop:
        """As `kubectl delete pod`: stop the pod and do not restart it in place.

        `grace_s` overrides that of the pod; 0 kills at once, without a hook. `hooks=2` runs preStop twice, one run
        after the other or both `at_once`, as kubelet may do after it was restarted itself.
        """
        with self._changed:
            is_first, self.is_deleted = not self.is_deleted, True
            self._changed.notify_all()
        grace_s = self.spec.grace_s if grace_s is None else grace_s
        if is_first:
            # A controller makes the replacement as soon as the pod is being deleted.
            self._on_delete(self)
            self._stop(grace_s, hooks=hooks, at_once=at_once)
        elif grace_s <= 0:
            with self._changed:
                if self._stopping is not None:
                    self._stopping.kill_s = time.monotonic()
                    self.containers[-1].kill()
        return self.wait(grace_s + MIN_GRACE_S + WAIT_S if timeout_s is None else timeout_s)

    def evict(self, *, grace_s: float | None = None) -> Stop:
        """As `kubectl drain` or a preemption: delete the pod, marked as a disruption by the cluster."""
        self.is_disrupted = True
        return self.delete(grace_s=grace_s)

    def fail_liveness(self, *, grace_s: float | None = None) -> Stop:
        """As after failed liveness probes: stop the container like that of a deleted pod, then restart it in place."""
        container = self.container
        self._stop(self.spec.grace_s if grace_s is None else grace_s)
        return self._stop_of(container)

    def crash(self) -> Stop:
        """Send SIGKILL to process 1, which ends the container. No hook, no SIGTERM."""
        return self._kill("Error")

    def oom(self) -> Stop:
        """As when the container exceeds its memory: SIGKILL to all its processes."""
        return self._kill("OOMKilled")

    def lose(self) -> Stop:
        """As when the node is lost: all processes end at once, without a hook, and the emptyDirs are deleted."""
        with self._changed:
            self.is_deleted = self.is_disrupted = True
            self._why = "NodeLost"
            is_started = bool(self.containers)
        self._on_delete(self)
        return self._kill("NodeLost") if is_started else self.wait()

    def close(self) -> None:
        """Nothing of it is left when this returns. May be called twice."""
        with self._changed:
            self.is_deleted = True
        if self._thread.ident is None:
            return
        end_s = time.monotonic() + WAIT_S
        # It takes longer only if a volume hangs: the kernel cannot kill a process that waits for it.
        while not self.is_over.wait(0.05) and time.monotonic() < end_s:
            if self.containers:
                self.containers[-1].kill()
        for container in self.containers:
            container.close()
        self._thread.join(WAIT_S)

    # What kubelet does.

    def start(self) -> None:
        """Start the pod. Returns at once."""
        self._thread.start()

    def _live(self) -> None:
        try:
            if self._prepare():
                while self._run_once():
                    pass
        except (StandInError, OSError) as error:
            if self.containers:
                self.containers[-1].close()
            self.stops.append(Stop(128, "StartError", message=str(error)))
        finally:
            if self._why == "NodeLost":
                self._drop_empty_dirs()
            try:
                self._on_end(self)
            finally:
                with self._changed:
                    self.is_over.set()
                    self._changed.notify_all()

    def _is_running(self) -> bool:
        return bool(self.containers) and not self.containers[-1].is_over.is_set()

    def _prepare(self) -> bool:
        """The init containers, one after the other."""
        for number, init in enumerate(self.spec.init):
            command = self._command(0, init)
            container = Container(command, self.directory / f"init-{number}.txt")
            container.start()
            while not container.is_over.wait(0.02):
                if self.is_deleted:
                    container.kill()
            container.close()
            if container.status != 0:
                self.stops.append(
                    Stop(_code(container), "Error", message=f"init container {init.name}: {container.text}")
                )
                return False
        if self.is_deleted:
            self.stops.append(Stop(128 + signal.SIGKILL, "Error", message="deleted before its container was started"))
            return False
        return True

    def _run_once(self) -> bool:
        """Run one container from start to end. True if it has to be restarted."""
        number = len(self.containers) + 1
        termination = self._termination_log(number)
        termination.touch()
        container = Container(self._command(number, self.spec.container), self.directory / f"output-{number}.txt")
        container.start()
        with self._changed:
            self.containers.append(container)
            self._changed.notify_all()
            if self.is_deleted and self._stopping is None:
                container.kill()  # deleted before the container was started
        if self.spec.container.post_start is not None:
            self._post_start(container)
        container.is_over.wait()
        with self._changed:
            self._changed.notify_all()
        stop = self._ended(container, termination)
        container.close()
        policy = self.spec.restart_policy
        with self._changed:
            self.stops.append(stop)
            self._changed.notify_all()
            if policy == "Never" or (policy == "OnFailure" and stop.exit_code == 0):
                return False
            # Pause before restarting a container that ends at once, so that it does not keep the machine busy.
            lived_s = (container.ended_s or 0.0) - container.began_s
            self._pause_s = 0.0 if lived_s > _QUICK_END_S else min(2 * self._pause_s + 0.05, _PAUSE_AT_MOST_S)
            self._changed.wait_for(lambda: self.is_deleted, self._pause_s)
            return not self.is_deleted

    def _post_start(self, container: Container) -> None:
        """Run postStart in parallel to the container's process. If it fails, the container is stopped."""
        hook = self._exec("postStart", container)
        while not hook.is_over.wait(0.02):
            if container.is_over.is_set():
                return
        if hook.code != 0 and not container.is_over.is_set():
            self._stop(self.spec.grace_s)

    def _stop(self, grace_s: float, *, hooks: int = 1, at_once: bool = False) -> None:
        """preStop, SIGTERM, SIGKILL. Returns when the container has ended."""
        with self._changed:
            if not self._is_running():
                return  # it is being prepared or restarted, and is killed as soon as it has started
            container, start_s = self.containers[-1], time.monotonic()
            stopping = self._stopping = _Stopping(start_s)
            runs = stopping.runs
        if grace_s <= 0:
            stopping.kill_s = time.monotonic()
            container.kill()
        else:
            if self.spec.container.pre_stop is not None:
                for _ in range(hooks):
                    # Noted before it starts, because the container may end and be reported meanwhile.
                    self._exec("preStop", container, note=runs.append)
                    if not at_once:
                        _wait_for(runs[-1:], start_s + grace_s)
                _wait_for(runs, start_s + grace_s)
            left_s = max(MIN_GRACE_S, start_s + grace_s - time.monotonic())
            if not container.is_over.is_set():
                stopping.term_s = time.monotonic()
                # Before it is sent, because after it the container may end and be reported at any time.
                stopping.is_term_heard = container.hears_sigterm()
                container.terminate()
            if not container.is_over.wait(left_s):
                stopping.kill_s = time.monotonic()
                container.kill()
        container.is_over.wait(WAIT_S)

    def _kill(self, why: str) -> Stop:
        container = self.container
        with self._changed:
            if not container.is_over.is_set():
                self._why, now_s = why, time.monotonic()
                # A stop that is already in progress keeps what it has done.
                self._stopping = self._stopping or _Stopping(now_s)
                self._stopping.kill_s = now_s
        if why == "Error":
            container.kill_pid_1()
        else:
            container.kill()
        return self._stop_of(container)

    def _stop_of(self, container: Container) -> Stop:
        with self._changed:
            number = self.containers.index(container) + 1
            if not self._changed.wait_for(lambda: len(self.stops) >= number, WAIT_S):
                raise StandInError(f"pod {self.name}: container {number} still runs\n{self._story()}")
            return self.stops[number - 1]

    def _ended(self, container: Container, termination: Path) -> Stop:
        with self._changed:
            stopping, self._stopping = self._stopping, None
            why, self._why = self._why, self._why if self._why == "NodeLost" else None
        code = _code(container)
        assert container.ended_s is not None
        stopping = stopping or _Stopping(container.ended_s)
        start_s = stopping.start_s
        _wait_for(stopping.runs, time.monotonic() + WAIT_S)  # a hook ends with the container at the latest
        return Stop(
            exit_code=code,
            reason=why or ("Completed" if code == 0 else "Error"),
            hooks=tuple(_report("preStop", run, start_s) for run in stopping.runs),
            term_s=_since(start_s, stopping.term_s),
            is_term_heard=stopping.is_term_heard,
            kill_s=_since(start_s, stopping.kill_s),
            took_s=max(0.0, container.ended_s - start_s),
            message=self._message(container, termination, code),
        )

    def _message(self, container: Container, termination: Path, code: int) -> str:
        text = termination.read_bytes()[:_MESSAGE_AT_MOST].decode(errors="replace")
        if not text and code != 0 and self.spec.container.falls_back_to_logs:
            text = "\n".join(container.text.splitlines()[-80:])[-_FALLBACK_AT_MOST:]
        return text.strip()

    def _exec(self, name: str, container: Container, *, note: Callable[[Exec], None] = lambda run: None) -> Exec:
        spec, number = self.spec.container, len(self.containers) or 1
        argv = spec.pre_stop if name == "preStop" else spec.post_start
        assert argv is not None
        place, command = self._place(number, spec), self._command(number, spec)
        out = self.directory / f"{name}-{number}-{len(self._hooks) + 1}.txt"
        command = Command([place(word) for word in argv], command.env, command.cwd)
        hook = container.exec(command, out, note=note)
        self._hooks.append((name, hook))
        return hook

    # Files and variables.

    def _own(self, number: int) -> Path:
        """The directory for one container's own file system."""
        return self.directory / f"container-{number}"

    def _termination_log(self, number: int) -> Path:
        return self.directory / f"termination-{number}.txt"

    def empty_dir(self, name: str) -> Path:
        """The directory of one of the pod's emptyDirs."""
        return self.directory / "empty-dirs" / name

    def _drop_empty_dirs(self) -> None:
        import shutil

        shutil.rmtree(self.directory / "empty-dirs", ignore_errors=True)

    def _mounted(self, mount: Mount) -> Path:
        if mount.volume in self.spec.empty_dirs:
            base = self.empty_dir(mount.volume)
        else:
            base = self._volume(self.spec.claims.get(mount.volume, mount.volume))
        place = base / mount.sub_path if mount.sub_path else base
        if not place.exists():  # a single file may be mounted as well
            place.mkdir(parents=True, exist_ok=True)
        return place

    def _tmp(self, spec: ContainerSpec) -> Path | None:
        """The volume that is mounted at /tmp."""
        return next((self._mounted(mount) for mount in spec.mounts if mount.path == TMP), None)

    def _run(self, number: int, spec: ContainerSpec) -> Path:
        """The default directory of the signal file."""
        tmp = self._tmp(spec)
        return tmp / "migrator" if tmp else self._own(number) / "run"

    def _place(self, number: int, spec: ContainerSpec) -> Callable[[str], str]:
        """A function that replaces paths of this container by directories of this machine."""
        paths = {
            **self._paths,
            RUN_DIRECTORY: self._run(number, spec),
            TERMINATION_LOG: self._termination_log(number),
        }
        # /tmp itself is not replaced: paths of this machine, which a test gives in arguments, may begin with it.
        paths |= {mount.path: self._mounted(mount) for mount in spec.mounts if mount.path != TMP}
        return replacer(paths)

    def _command(self, number: int, spec: ContainerSpec) -> Command:
        place, own, run, tmp = self._place(number, spec), self._own(number), self._run(number, spec), self._tmp(spec)
        for directory in (own, run):
            directory.mkdir(parents=True, exist_ok=True)
        # Already paths of this machine. As in a pod, `$(NAME)` does not see variables of the image.
        env = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
            "HOME": str(own),
            **({"TMPDIR": str(tmp)} if tmp else {}),
            "HOSTNAME": self.name,
            # In a cluster each pod has its own address; here all pods use loopback.
            "GLOO_SOCKET_IFNAME": "lo",
            "TP_SOCKET_IFNAME": "lo",
            "MIGRATOR_TERMINATION_LOG": str(self._termination_log(number)),
        }
        fields = {**FIELDS, "metadata.name": self.name}
        wanted = {name: fields[path] for name, path in spec.fields}
        values: dict[str, str] = {}
        """The values before paths are replaced, so that `$(NAME)` does not replace a path twice."""
        for name, value in {**spec.env, **wanted, **self._late_env(number), **self._env}.items():
            values[name] = expand(value, values)
            env[name] = str(tmp) if tmp and values[name] == TMP else place(values[name])
        if not {"MIGRATOR_SIGNAL", "MIGRATION_SIGNAL_PATH"} & env.keys():
            env["MIGRATOR_SIGNAL"] = str(run / "signal")
        cwd = Path(place(spec.working_dir)) if spec.working_dir else own
        if not cwd.is_dir():
            raise StandInError(f"the working directory {cwd} of container {spec.name} is not there")
        return Command([place(expand(word, values)) for word in spec.argv], env, cwd)

    def _story(self) -> str:
        hooks = [
            f"{name} {hook.code if hook.failed is None else hook.failed}: {hook.text.strip()}"
            for name, hook in self._hooks
        ]
        return "\n".join([*map(str, self.stops), *hooks, self.log])


def _code(container: Container) -> int:
    status = container.status
    assert status is not None
    return status if status >= 0 else 128 - status


def _since(start_s: float, moment_s: float | None) -> float | None:
    return None if moment_s is None else moment_s - start_s


def _wait_for(runs: Sequence[Exec], end_s: float) -> None:
    for run in runs:
        run.is_over.wait(max(0.0, end_s - time.monotonic()))


def _report(name: str, run: Exec, start_s: float) -> HookRun:
    took_s = (run.ended_s or time.monotonic()) - run.began_s
    text = run.failed if run.failed is not None else run.text
    return HookRun(name, run.code, text, run.began_s - start_s, took_s)
