"""An elastic job for the fault table: a torchrun agent with one rank in each pod, and what can be done to them.

The pods are those of the stand-in kubelet, with its preStop hook; the agents meet at a c10d store that the first pod
serves. Each pod has an address of its own. Without a `PodNetwork` these are addresses of the loopback network, as no
rank is ever cut off there.

Here is no operator: a scenario makes the pods that an operator would make. What ends by itself is started again in its
pod, as by `restartPolicy: OnFailure`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy
from faults_history import History, Life

from migrator.testing import Kubelet, Pod, Stop
from migrator.testing.gangs import free_port

HERE = Path(__file__).resolve().parent
TRAINING = HERE / "faults_training.py"
SAMPLES, EPOCHS, BATCH = 1440, 4, 12
"""1440 samples and 12 of them for each rank in a step: on 4, 3 and 1 ranks each step and each rest of an epoch can be
shared evenly. So no sample is trained twice to fill up an epoch."""
EVERY = 10
"""Steps between two periodic saves: the most that a fault without notice may cost."""
PACE_S = 0.05
"""Seconds that a step of the first life takes at least."""
COLLECTIVE_S = 6
"""Seconds after which a rank gives up a collective. torch's default is half an hour."""
GRACE_S = 30
WAIT_S = 120.0
"""Seconds that any wait of a scenario may take."""
MEETING = {"last_call_timeout": 3, "keep_alive_interval": 1, "read_timeout": 10}
"""Seconds: how long the agents wait for a node that may still come (30 by default), how often each says that it is
there (5; it is missed after three times), and how long they wait for the store (60). By their defaults each scenario
would take a minute more, and show the same."""
LOOK_S = 0.03
"""Seconds between two looks at the diaries."""


class ScenarioError(Exception):
    """The job did not get to where the scenario needs it."""


class TrainingJob:
    """One job, from its first pod to the end of its training."""

    def __init__(
        self, kubelet: Kubelet, *, nodes: str = "3:4", network: PodNetwork | None = None, name: str = "worker"
    ) -> None:
        self._kubelet = kubelet
        self._nodes = nodes
        self._network = network
        self._name = name
        self._volume = kubelet.volume("ckpts")
        (self._volume / "diaries").mkdir(exist_ok=True)
        self._history = History(self._volume / "diaries")
        self._scratch = kubelet.directory / "tmp"
        self._scratch.mkdir()
        write_digits(self._volume / "digits.npz")
        self.pods: list[Pod] = []
        """Those that are there now. The first one serves the store."""
        self.faults_at: list[float] = []
        """When each fault was made, on the clock of the diaries."""
        self.stops: list[Stop] = []
        """How the pods ended that were told to."""
        self.notes: list[str] = []
        """For the table."""
        self._made = 0
        self._numbers: dict[str, int] = {}
        self._endpoint: tuple[str, int] | None = None

    # Pods come.

    def start(self, count: int) -> None:
        """So many pods, until all of them train together."""
        for _ in range(count):
            self.add()
        self.wait_for_group(count)

    def add(self, *, serves: bool = False) -> Pod:
        """One more pod. `serves`: it takes over the name at which the store is found, as `worker-0` in a cluster."""
        self._made += 1
        address = self._network.address(self._made) if self._network else f"127.0.1.{self._made}"
        if self._endpoint is None:
            serves, self._endpoint = True, (address, free_port())
        host, port = self._endpoint
        # In a cluster a name leads to the new address. Here it is an address, which the new pod has besides its own.
        meeting = ",".join(f"{name}={value}" for name, value in {"is_host": int(serves), **MEETING}.items())
        command: list[str | Path] = ["python", "-m", "torch.distributed.run", f"--nnodes={self._nodes}"]
        command += ["--nproc-per-node=1", "--max-restarts=100", "--rdzv-backend=c10d", "--rdzv-id=faults"]
        command += [f"--rdzv-endpoint={host}:{port}", f"--rdzv-conf={meeting}", f"--local-addr={address}"]
        command += [f"--shutdown-timeout={GRACE_S}", TRAINING, "/ckpts", f"--epochs={EPOCHS}", f"--batch={BATCH}"]
        command += [f"--timeout={COLLECTIVE_S}", f"--pace={PACE_S}"]
        env = {
            "PYTHONPATH": str(HERE.parent),
            "MIGRATOR_EVERY": str(EVERY),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self._scratch),
            # Each group of ranks has a store of its own: docs/troubleshooting.md says what happens otherwise.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            # torch's store asks the name service for the host of each connection, and answers nobody meanwhile.
            "RES_OPTIONS": "timeout:1 attempts:1",
            **({"GLOO_SOCKET_IFNAME": "eth0"} if self._network else {}),
        }
        pod = self._kubelet.run(
            [*self._network.command(self._made), *command] if self._network else command,
            name=f"{self._name}-{self._made - 1}",
            env=env,
            grace_s=GRACE_S,
            # A container that is started again would need its network anew.
            restart_policy="Never" if self._network else "OnFailure",
        )
        if self._network:
            self._numbers[pod.name] = self._made
            self._network.attach(self._made, pod)
        self.pods.insert(0 if serves else len(self.pods), pod)
        return pod

    def move(self, name: str) -> None:
        """All that comes from now on has other names, another address and another port of the store."""
        assert not self.pods, "the old pods are still there"
        self._name, self._endpoint = name, None
        self._made += 100

    # Pods go.

    def fault(self) -> None:
        """Now: from here on the next step is waited for."""
        self.faults_at.append(time.time())

    def preempt(self, *pods: Pod) -> None:
        """Each gets its preStop hook, then SIGTERM, all of them at the same time."""
        self.fault()
        stops: dict[Pod, Stop] = {}

        def end(pod: Pod) -> None:
            stops[pod] = pod.evict()

        threads = [threading.Thread(target=end, args=(pod,), daemon=True) for pod in pods]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(GRACE_S + WAIT_S)
        if len(stops) != len(pods):
            raise ScenarioError(f"not all pods ended: {[pod.name for pod in pods if pod not in stops]}\n{self.story()}")
        self.stops += stops.values()
        self.pods = [pod for pod in self.pods if pod not in pods]

    def lose(self, pod: Pod) -> None:
        """Its node is gone, without a word."""
        self.fault()
        self.take_away(pod)

    def cut(self, pod: Pod) -> None:
        """All that it sends, and all that is sent to it, is lost from now on."""
        assert self._network is not None, "the scenario needs a network"
        self.fault()
        self._network.cut(self._numbers[pod.name])

    def take_away(self, pod: Pod) -> None:
        """What is left of a pod after a fault."""
        pod.lose()
        self.pods.remove(pod)

    def rank_pid(self, pod: Pod) -> int:
        """The process that trains in this pod."""
        agent = pod.container.pid
        for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
            with suppress(OSError):
                if TRAINING.name in Path(f"/proc/{child}/cmdline").read_text():
                    return int(child)
        raise ScenarioError(f"no rank runs in {pod.name}\n{self.story()}")

    # What it has trained.

    @property
    def history(self) -> History:
        self._history.refresh()
        return self._history

    def wait_for_step(self, step: int) -> None:
        self.wait(lambda history: history.step >= step, f"step {step}")

    def wait_for_group(self, ranks: int) -> Life:
        """Until a life that began after the last fault trains on so many ranks, and all of them have made a step."""
        since = self.faults_at[-1] if self.faults_at else 0.0

        def trains(history: History) -> bool:
            newest = history.lives[-1] if history.lives else None
            return newest is not None and newest.ranks == ranks and (newest.first_step_at or 0.0) > since

        return self.wait(trains, f"a first step on {ranks} ranks").lives[-1]

    def finish(self) -> None:
        """Train what is left, as quickly as it goes."""
        (self._volume / "go").touch()
        self.wait(History.is_over, "the end of the training")

    def wait(self, condition: Callable[[History], bool], what: str) -> History:
        end_s = time.monotonic() + WAIT_S
        while not condition(found := self.history):
            if found.is_over():
                raise ScenarioError(f"the training was over before {what}\n{self.story()}")
            if time.monotonic() > end_s:
                raise ScenarioError(f"there was not {what} within {WAIT_S:.0f} s\n{self.story()}")
            time.sleep(LOOK_S)
        return found

    def story(self) -> str:
        """The lives so far, and what each pod wrote at last."""
        lives = [f"life of {one.ranks} ranks: steps {one.begins} to {one.last}" for one in self.history.lives]
        ends = [f"--- {pod.name}: {pod.stops}\n{pod.log[-3000:]}" for pod in self._kubelet.pods]
        return "\n".join([*lives, *ends])


def write_digits(path: Path) -> None:
    """Once for all ranks: to import scikit-learn takes each of them a second."""
    if path.exists():
        return
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images[:SAMPLES] / 16).astype("float32")
    numpy.savez(path, images=images, labels=digits.target[:SAMPLES])


@contextmanager
def slowed(pid: int, *, runs_s: float, stands_s: float) -> Iterator[None]:
    """The process is stopped and continued in turns, as by a CPU limit that is much too low."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                over.wait(stands_s)
                os.kill(pid, signal.SIGCONT)
            over.wait(runs_s)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(WAIT_S)


class PodNetwork:
    """A bridge on which each pod has an address and a cable of its own. It ends with the last process that uses it.

    The process that makes it has to be in a network namespace of its own (`why_not`, `faults.py --inside`).
    """

    _NET = "10.77.0"

    def __init__(self, directory: Path) -> None:
        self._marks = directory / "network"
        self._marks.mkdir(parents=True, exist_ok=True)
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "pods", "type", "bridge")
        _ip("link", "set", "pods", "up")

    @staticmethod
    def why_not() -> str | None:
        """None if this machine allows it, otherwise why not."""
        if missing := [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]:
            return f"{', '.join(missing)} is missing (iproute2, util-linux)"
        script = "ip link add pods type bridge && ip link add pod1 type veth peer name eth0"
        tried = subprocess.run([*PodNetwork.inside(), "sh", "-c", script], capture_output=True, text=True, check=False)
        return None if tried.returncode == 0 else f"no network namespaces here: {tried.stderr.strip()}"

    @staticmethod
    def inside() -> list[str]:
        """What a command is run by to be in a network namespace of its own."""
        return ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--net"]

    def address(self, number: int) -> str:
        return f"{self._NET}.{number}"

    def command(self, number: int) -> list[str]:
        """What a pod's command is run by. It waits for its cable: a process can be given one only when it is there."""
        script = 'until [ -e "$0" ]; do sleep 0.02; done; exec "$@"'
        return ["unshare", "--net", "sh", "-c", script, str(self._mark(number))]

    def attach(self, number: int, pod: Pod) -> None:
        pid = pod.container.pid
        ours, end_s = Path("/proc/self/ns/net").readlink(), time.monotonic() + WAIT_S
        while Path(f"/proc/{pid}/ns/net").readlink() == ours:
            if time.monotonic() > end_s:
                raise ScenarioError(f"{pod.name} has no network of its own after {WAIT_S:.0f} s: {pod.log}")
            time.sleep(LOOK_S)
        _ip("link", "add", f"pod{number}", "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        _ip("link", "set", f"pod{number}", "master", "pods", "up")
        _ip("address", "add", f"{self.address(number)}/24", "dev", "eth0", inside=pid)
        _ip("link", "set", "lo", "up", inside=pid)
        _ip("link", "set", "eth0", "up", inside=pid)
        self._mark(number).touch()

    def cut(self, number: int) -> None:
        """Nothing that this pod sends arrives any more, and nothing that is sent to it. Nobody is told."""
        _ip("link", "set", f"pod{number}", "nomaster")

    def _mark(self, number: int) -> Path:
        return self._marks / str(number)


def _ip(*words: Any, inside: int | None = None) -> None:
    enter = [] if inside is None else ["nsenter", f"--net=/proc/{inside}/ns/net"]
    done = subprocess.run([*enter, "ip", *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ScenarioError(f"ip {' '.join(map(str, words))}: {done.stderr.strip()}")
