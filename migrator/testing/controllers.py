"""Controllers that start pods again: a Job, and the operator of a PyTorchJob.

In a Job each pod has a new name, so the replacement is made as soon as a pod is
being deleted: it starts while the old pod still saves. The pods of a PyTorchJob
have fixed names, so each is made again after the old one has ended.
"""

from __future__ import annotations

import abc
import contextlib
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from migrator.testing.errors import StandInError
from migrator.testing.pod import WAIT_S, Pod, Stop
from migrator.testing.spec import PodSpec

Read = Callable[[Mapping[str, Any]], PodSpec]
Make = Callable[..., Pod]
_RETRYABLE_FROM = 128
"""With restartPolicy `ExitCode`, lowest exit code that is restarted: a signal ended it, and not an error of the
script."""


class Controller(abc.ABC):
    """Starts pods and replaces those that end. Made by `Kubelet.apply`."""

    _ends_all = False
    """When the job is over, pods that still run are deleted."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pods: list[Pod] = []
        """All pods so far, oldest first."""
        self.is_complete = False
        self.failed: str | None = None
        """Why the job has failed."""
        self._is_deleted = False
        self._changed = threading.Condition(threading.RLock())

    @abc.abstractmethod
    def start(self) -> None:
        """Make the first pods."""

    def wait(self, timeout_s: float = WAIT_S) -> None:
        """Wait until the job is complete. If it fails, the error contains the output of its pods."""
        with self._changed:
            is_over = self._changed.wait_for(self._is_over, timeout_s)
        if self.is_complete:
            return
        why = self.failed if is_over else f"it is not complete after {timeout_s:.0f} s"
        stories = "\n".join(f"--- {pod.name}: {pod.stops}\n{pod.log}" for pod in self.pods)
        raise StandInError(f"job {self.name}: {why}\n{stories}")

    def delete(self, *, grace_s: float | None = None) -> list[Stop]:
        """As `kubectl delete -f`: delete all pods and make none again. Returns how the running pods have ended."""
        with self._changed:
            self._is_deleted = True
            running = [pod for pod in self.pods if not pod.is_over.is_set()]
        stops: dict[int, Stop] = {}

        def one(number: int, pod: Pod) -> None:
            stops[number] = pod.delete(grace_s=grace_s)

        threads = [threading.Thread(target=one, args=pair, daemon=True) for pair in enumerate(running)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(stops) != len(running):
            raise StandInError(f"job {self.name}: not all pods ended: {[pod.name for pod in running]}")
        return [stops[number] for number in range(len(running))]

    def close(self) -> None:
        """Make no further pods."""
        with self._changed:
            self._is_deleted = True

    def _add(self, pod: Pod) -> None:
        with self._changed:
            self.pods.append(pod)
            self._changed.notify_all()
        pod.start()

    def _is_over(self) -> bool:
        return self.is_complete or self.failed is not None

    def _why_not(self) -> str:
        return self.failed or ("it is complete" if self.is_complete else "it still runs")

    def _conclude(self, ended: Pod, *, failed: str | None = None) -> None:
        with self._changed:
            self.is_complete, self.failed = failed is None, failed
            self._changed.notify_all()
            others = [pod for pod in self.pods if pod is not ended and not pod.is_over.is_set()]
        if self._ends_all:
            for pod in others:
                threading.Thread(target=_delete, args=(pod,), daemon=True).start()


def _delete(pod: Pod) -> None:
    with contextlib.suppress(StandInError):
        pod.delete()


class Job(Controller):
    """A batch/v1 Job with one pod at a time."""

    _ends_all = True

    def __init__(self, name: str, spec: Mapping[str, Any], read: Read, make: Make) -> None:
        super().__init__(name)
        for key in ("completions", "parallelism"):
            if spec.get(key, 1) != 1:
                raise StandInError(f"Job {name}: {key} is {spec[key]}; Jobs of one pod at a time are run here")
        self._template = read((spec.get("template") or {}).get("spec") or {})
        if self._template.restart_policy == "Always":
            raise StandInError(f"Job {name}: restartPolicy Always is not allowed in a Job; take Never or OnFailure")
        self._make = make
        self._backoff_limit = int(spec.get("backoffLimit", 6))
        self._at_once = spec.get("podReplacementPolicy", "TerminatingOrFailed") == "TerminatingOrFailed"
        self._rules = (spec.get("podFailurePolicy") or {}).get("rules") or []
        self._failures = 0
        self._replaced: set[str] = set()

    @property
    def pod(self) -> Pod:
        """The newest pod."""
        with self._changed:
            return self.pods[-1]

    def wait_for_pod(self, number: int, timeout_s: float = WAIT_S) -> Pod:
        """Wait for the pod with this number, counted from 1."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.pods) >= number or self._is_over(), timeout_s)
            if len(self.pods) < number:
                raise StandInError(f"job {self.name} has {len(self.pods)} pods, expected {number}: {self._why_not()}")
            return self.pods[number - 1]

    def start(self) -> None:
        name = f"{self.name}-{len(self.pods) + 1:05d}"
        self._add(self._make(name, self._template, on_delete=self._on_delete, on_end=self._on_end))

    def _on_delete(self, pod: Pod) -> None:
        if self._at_once:
            self._replace(pod)

    def _on_end(self, pod: Pod) -> None:
        stop = pod.stops[-1] if pod.stops else None
        if stop is not None and stop.exit_code == 0:
            # Also if it was deleted: exit code 0 means that there is nothing more to do.
            self._conclude(pod)
            return
        action = next((str(rule.get("action")) for rule in self._rules if _is_meant(rule, pod)), "Count")
        if action == "FailJob" and not self._is_deleted:
            self._conclude(pod, failed=f"{pod.name} ended in a way that podFailurePolicy does not restart: {stop}")
            return
        self._failures += action == "Count"
        if self._failures > self._backoff_limit and not self._is_deleted:
            self._conclude(pod, failed=f"more than {self._backoff_limit} pods failed (backoffLimit)")
            return
        self._replace(pod)

    def _replace(self, pod: Pod) -> None:
        with self._changed:
            if self._is_deleted or self.is_complete or self.failed is not None or pod.name in self._replaced:
                return
            self._replaced.add(pod.name)
            self.start()


class PyTorchJob(Controller):
    """A kubeflow.org/v1 PyTorchJob: one master, some workers, and the variables that the operator sets for them.

    The n-th starts of all containers use the same port, and each n has another one. In a cluster pods have their own
    addresses instead; in both cases no rank of a new life finds the store of the previous one.
    """

    def __init__(
        self, name: str, spec: Mapping[str, Any], read: Read, make: Make, *, workers: int | None = None
    ) -> None:
        super().__init__(name)
        self._make = make
        replicas = spec.get("pytorchReplicaSpecs") or {}
        if "elasticPolicy" in spec:
            raise StandInError(
                f"PyTorchJob {name} has an elasticPolicy: its pods find one another by their names, and here all have "
                "the address of this machine. Give it a Master and Workers"
            )
        if set(replicas) - {"Master", "Worker"} or "Master" not in replicas:
            found = ", ".join(replicas) or "none"
            raise StandInError(f"PyTorchJob {name}: found replicas {found}; expected Master and Worker")
        self._templates: dict[str, PodSpec] = {}
        self._policies: dict[str, str] = {}
        for kind, replica in replicas.items():
            policy = str(replica.get("restartPolicy", "Never"))
            template = dict((replica.get("template") or {}).get("spec") or {})
            # The operator itself restarts pods, unless the policy lets kubelet restart them in place.
            template["restartPolicy"] = policy if policy in ("Always", "OnFailure") else "Never"
            self._templates[kind], self._policies[kind] = read(template), policy
        counts = {kind: int(replica.get("replicas", 1)) for kind, replica in replicas.items()}
        if counts.get("Master", 1) != 1:
            raise StandInError(f"PyTorchJob {name}: it has {counts['Master']} Masters, expected one")
        if workers is not None and "Worker" not in replicas:
            raise StandInError(f"PyTorchJob {name} has no Worker to make {workers} of")
        count = counts.get("Worker", 0) if workers is None else workers
        self._ranks = [f"{name}-master-0", *(f"{name}-worker-{number}" for number in range(count))]
        self._per_node = str(spec.get("nprocPerNode", "1"))
        self._ports: dict[int, int] = {}

    @property
    def master(self) -> Pod:
        """The newest pod of rank 0."""
        return self.rank(0)

    @property
    def workers(self) -> list[Pod]:
        """The newest pods of the other ranks."""
        return [self.rank(number) for number in range(1, len(self._ranks))]

    def rank(self, number: int) -> Pod:
        """The newest pod of this rank (of this node, under torchrun)."""
        with self._changed:
            return next(pod for pod in reversed(self.pods) if pod.name == self._ranks[number])

    def wait_for_start(self, number: int, timeout_s: float = WAIT_S) -> list[Pod]:
        """Wait until each rank was started `number` times, in place or as a new pod; the newest pods of all ranks."""
        end_s = time.monotonic() + timeout_s
        while True:
            with self._changed:
                starts = {name: sum(len(p.containers) for p in self.pods if p.name == name) for name in self._ranks}
                if all(count >= number for count in starts.values()):
                    return [self.rank(rank) for rank in range(len(self._ranks))]
            if time.monotonic() > end_s or self.failed is not None:
                raise StandInError(
                    f"job {self.name}: not all were started {number} times: {starts}; {self.failed or ''}"
                )
            time.sleep(0.01)

    def start(self) -> None:
        for name in self._ranks:
            self._begin(name)

    def _begin(self, name: str) -> None:
        # Each container of this name counts as a start, in place or as a new pod.
        before = sum(len(pod.containers) for pod in self.pods if pod.name == name)

        def env(container: int) -> Mapping[str, str]:
            return self._variables(name, before + container)

        template = self._templates["Master" if "-master-" in name else "Worker"]
        self._add(self._make(name, template, late_env=env, on_end=self._on_end))

    def _variables(self, name: str, start: int) -> Mapping[str, str]:
        """The variables that the operator sets for this start of this pod."""
        with self._changed:
            port = str(self._ports.setdefault(start, free_port()))
        size, rank = str(len(self._ranks)), str(self._ranks.index(name))
        return {
            "PYTHONUNBUFFERED": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "WORLD_SIZE": size,
            "RANK": rank,
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": port,
            "PET_NNODES": size,
            "PET_NODE_RANK": rank,
            "PET_NPROC_PER_NODE": self._per_node,
        }

    def _on_end(self, pod: Pod) -> None:
        kind = "Master" if "-master-" in pod.name else "Worker"
        code = pod.stops[-1].exit_code if pod.stops else 128
        if code == 0:
            if pod.name == self._ranks[0] and not self._is_deleted:
                self._conclude(pod)
            return
        policy = self._policies[kind]
        may = pod.is_deleted or policy in ("Always", "OnFailure") or (policy == "ExitCode" and code >= _RETRYABLE_FROM)
        with self._changed:
            if self._is_deleted or self.is_complete or self.failed is not None:
                return
            if may:
                self._begin(pod.name)
            else:
                self._conclude(
                    pod, failed=f"{pod.name} ended with {code}, and restartPolicy {policy} does not restart it"
                )


def _is_meant(rule: Mapping[str, Any], pod: Pod) -> bool:
    """Whether this rule of a `podFailurePolicy` applies to the end of the pod."""
    codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions") or []
    if codes and pod.stops:
        is_named = codes.get("containerName") in (None, pod.spec.container.name)
        return is_named and (pod.stops[-1].exit_code in codes["values"]) == (codes["operator"] == "In")
    return pod.is_disrupted and any(one.get("type") == "DisruptionTarget" for one in conditions)


def free_port() -> int:
    """A port on which nobody listens. Below 32768, so that the kernel does not choose it for an outgoing connection.

    Between this look and the moment at which somebody listens, no other process gets the port from here: its number is
    held as a UDP port, which TCP does not mind. The port after it is given to nobody.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32000, 2)
        held = socket.socket(type=socket.SOCK_DGRAM)
        try:
            held.bind(("127.0.0.1", port))
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            held.close()
            continue
        if len(_held) == _HELD_AT_MOST:
            _held.popleft().close()
        _held.append(held)
        return port


_held: deque[socket.socket] = deque()
_HELD_AT_MOST = 100
"""Numbers of ports that one process holds, the newest ones."""
