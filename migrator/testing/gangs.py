"""Controllers of pods that train together: an indexed Job, a StatefulSet, and the operator of a PyTorchJob.

Their pods have fixed names, so each is made again under its name after the old one
has ended. Pods that stay keep their container, if the launcher in it does.
"""

from __future__ import annotations

import abc
import atexit
import itertools
import random
import socket
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from migrator.testing.controllers import Controller, FailurePolicy, Make, Read
from migrator.testing.errors import StandInError
from migrator.testing.pod import WAIT_S, Pod
from migrator.testing.spec import PodSpec

_RETRYABLE_FROM = 128
"""With restartPolicy `ExitCode`, lowest exit code that is restarted: a signal ended it, and not an error of the
script."""


class Gang(Controller):
    """Pods with fixed names that train together; each is made again under its name when it is gone.

    In a cluster each pod has its own address and finds the others by their names. Here all have the loopback device.
    So if torchrun's rendezvous (`PET_RDZV_ENDPOINT`) names one of the pods, the name is replaced by a free port here,
    which stays the same as long as the job lives; only the pod that is named may serve the store there; and each pod
    has a loopback address of its own, because torchrun tells agents apart by address and pid, and the pid is 1 in all.
    """

    def __init__(self, name: str, pods: list[str], make: Make) -> None:
        super().__init__(name)
        self._ranks = pods
        self._make = make
        self._ports: dict[int, int] = {}
        self._numbers = itertools.count()

    @abc.abstractmethod
    def _template(self, name: str) -> PodSpec:
        """The template of the pod with this name."""

    @abc.abstractmethod
    def _on_end(self, pod: Pod) -> None:
        """What follows when a pod is over."""

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
        template = self._template(name)
        number = next(self._numbers)
        address = f"127.0.{1 + number // 250}.{1 + number % 250}"

        def env(container: int) -> Mapping[str, str]:
            own = self._variables(name, before + container)
            return {**own, **self._rendezvous(name, address, {**template.container.env, **own})}

        self._add(self._make(name, template, late_env=env, on_delete=self._on_delete, on_end=self._on_end))

    def _on_delete(self, pod: Pod) -> None:
        """What follows when a pod is being deleted: by default its replacement waits for its end."""

    def _variables(self, name: str, start: int) -> Mapping[str, str]:
        """The variables that the controller sets for this start of this pod."""
        return {}

    def _rendezvous(self, name: str, address: str, env: Mapping[str, str]) -> Mapping[str, str]:
        host, colon, _ = env.get("PET_RDZV_ENDPOINT", "").partition(":")
        # Also as name.service, and name.service.namespace.
        if not colon or host.partition(".")[0] not in self._ranks:
            return {}
        serves = "" if host.partition(".")[0] == name else "is_host=0"
        return {
            "PET_RDZV_ENDPOINT": f"127.0.0.1:{self._port(0)}",
            "PET_RDZV_CONF": ",".join(part for part in (env.get("PET_RDZV_CONF", ""), serves) if part),
            "PET_LOCAL_ADDR": address,
        }

    def _port(self, start: int) -> int:
        with self._changed:
            return self._ports.setdefault(start, free_port())


class IndexedJob(Gang):
    """A batch/v1 Job with `completionMode: Indexed` whose pods all run at once."""

    _ends_all = True

    def __init__(self, name: str, spec: Mapping[str, Any], read: Read, make: Make, *, pods: int | None = None) -> None:
        count = int(spec.get("completions", 1))
        if spec.get("parallelism", 1) != count:
            raise StandInError(
                f"Job {name}: parallelism is {spec.get('parallelism', 1)} and completions is {count}; indexed Jobs "
                "whose pods all run at once are run here"
            )
        super().__init__(name, [f"{name}-{index}" for index in range(count if pods is None else pods)], make)
        self._spec = read((spec.get("template") or {}).get("spec") or {})
        if self._spec.restart_policy == "Always":
            raise StandInError(f"Job {name}: restartPolicy Always is not allowed in a Job; take Never or OnFailure")
        self._policy_of_failures = FailurePolicy(spec)
        self._at_once = spec.get("podReplacementPolicy", "TerminatingOrFailed") == "TerminatingOrFailed"
        self._replaced: set[int] = set()
        self._succeeded: set[str] = set()

    def _template(self, name: str) -> PodSpec:
        return self._spec

    def _variables(self, name: str, start: int) -> Mapping[str, str]:
        return {"JOB_COMPLETION_INDEX": str(self._ranks.index(name))}

    def _on_delete(self, pod: Pod) -> None:
        if self._at_once:
            self._replace(pod)

    def _on_end(self, pod: Pod) -> None:
        stop = pod.stops[-1] if pod.stops else None
        if stop is not None and stop.exit_code == 0:
            self._succeeded.add(pod.name)
            if self._succeeded == set(self._ranks):
                self._conclude(pod)
            return
        if not self._is_deleted and (why := self._policy_of_failures.ends_with(pod)):
            self._conclude(pod, failed=why)
            return
        self._replace(pod)

    def _replace(self, pod: Pod) -> None:
        with self._changed:
            is_over = self._is_deleted or self.is_complete or self.failed is not None
            if is_over or id(pod) in self._replaced or pod.name in self._succeeded:
                return
            self._replaced.add(id(pod))
            self._begin(pod.name)


class StatefulSet(Gang):
    """An apps/v1 StatefulSet with `podManagementPolicy: Parallel`. It is never complete."""

    def __init__(self, name: str, spec: Mapping[str, Any], read: Read, make: Make, *, pods: int | None = None) -> None:
        count = int(spec.get("replicas", 1)) if pods is None else pods
        if count > 1 and spec.get("podManagementPolicy", "OrderedReady") != "Parallel":
            raise StandInError(
                f"StatefulSet {name}: its pods start one after the other, each when the one before is ready, and pods "
                "that train together wait for one another; set podManagementPolicy: Parallel"
            )
        if spec.get("volumeClaimTemplates"):
            raise StandInError(f"StatefulSet {name}: volumeClaimTemplates are not read here; name a claim for all pods")
        super().__init__(name, [f"{name}-{index}" for index in range(count)], make)
        self._spec = read((spec.get("template") or {}).get("spec") or {})
        if self._spec.restart_policy != "Always":
            raise StandInError(
                f"StatefulSet {name}: restartPolicy is {self._spec.restart_policy}; a StatefulSet has Always"
            )

    def _template(self, name: str) -> PodSpec:
        return self._spec

    def _on_end(self, pod: Pod) -> None:
        with self._changed:
            if not self._is_deleted:
                self._begin(pod.name)


class PyTorchJob(Gang):
    """A kubeflow.org/v1 PyTorchJob: one master and some workers, or an elastic one of workers; and their variables.

    Without an elasticPolicy the n-th starts of all containers use the same port, and each n has another one. In a
    cluster pods have their own addresses instead; in both cases no rank of a new life finds the store of the previous
    one.
    """

    def __init__(
        self, name: str, spec: Mapping[str, Any], read: Read, make: Make, *, workers: int | None = None
    ) -> None:
        replicas = spec.get("pytorchReplicaSpecs") or {}
        self._elastic: Mapping[str, Any] = spec.get("elasticPolicy") or {}
        expected = "Worker" if self._elastic else "Master"
        if set(replicas) - {"Master", "Worker"} or expected not in replicas:
            found = ", ".join(replicas) or "none"
            raise StandInError(
                f"PyTorchJob {name}: found replicas {found}; expected Master and Worker, or an elasticPolicy and Worker"
            )
        counts = {kind: int(replica.get("replicas", 1)) for kind, replica in replicas.items()}
        if counts.get("Master", 1) != 1:
            raise StandInError(f"PyTorchJob {name}: it has {counts['Master']} Masters, expected one")
        if workers is not None and "Worker" not in replicas:
            raise StandInError(f"PyTorchJob {name} has no Worker to make {workers} of")
        count = counts.get("Worker", 0) if workers is None else workers
        masters = [f"{name}-master-0"] if "Master" in replicas else []
        super().__init__(name, [*masters, *(f"{name}-worker-{number}" for number in range(count))], make)
        self._templates: dict[str, PodSpec] = {}
        self._policies: dict[str, str] = {}
        for kind, replica in replicas.items():
            policy = str(replica.get("restartPolicy", "Never"))
            template = dict((replica.get("template") or {}).get("spec") or {})
            # The operator itself restarts pods, unless the policy lets kubelet restart them in place.
            template["restartPolicy"] = policy if policy in ("Always", "OnFailure") else "Never"
            self._templates[kind], self._policies[kind] = read(template), policy
        self._per_node = str(spec.get("nprocPerNode", "1"))

    @property
    def master(self) -> Pod:
        """The newest pod of rank 0."""
        return self.rank(0)

    @property
    def workers(self) -> list[Pod]:
        """The newest pods of the other ranks."""
        return [self.rank(number) for number in range(1, len(self._ranks))]

    def _template(self, name: str) -> PodSpec:
        return self._templates["Master" if "-master-" in name else "Worker"]

    def _variables(self, name: str, start: int) -> Mapping[str, str]:
        """The variables that the operator sets for this start of this pod."""
        size, rank = str(len(self._ranks)), str(self._ranks.index(name))
        if self._elastic:
            conf = (f"{one['key']}={one['value']}" for one in self._elastic.get("rdzvConf") or [])
            least, most = (self._elastic.get(key, size) for key in ("minReplicas", "maxReplicas"))
            return {
                "PYTHONUNBUFFERED": "1",
                "PET_NNODES": f"{least}:{most}",
                "PET_NPROC_PER_NODE": str(self._elastic.get("nProcPerNode", self._per_node)),
                "PET_MAX_RESTARTS": str(self._elastic.get("maxRestarts", 0)),
                "PET_RDZV_BACKEND": str(self._elastic.get("rdzvBackend", "c10d")),
                "PET_RDZV_ENDPOINT": f"{self._ranks[0]}:{self._elastic.get('rdzvPort', 23456)}",
                "PET_RDZV_ID": str(self._elastic.get("rdzvId", self.name)),
                "PET_RDZV_CONF": ",".join(conf),
            }
        port = str(self._port(start))
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


@atexit.register
def _let_go() -> None:
    """Python warns of each socket that is left open, behind the last line of a test run."""
    while _held:
        _held.pop().close()
