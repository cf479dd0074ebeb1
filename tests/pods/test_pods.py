"""What can happen to a pod, with a real trainer as process 1 of it and the real hook.

Lost are steps that were trained and are not in the ckpt from which the next life goes on. They are counted in what the
trainer printed. What that next life ends with is always compared with a run that was never stopped, to the last bit.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from migrator.notice.signal_file import INIT, RESUME, SAVE, Signal, SignalFile
from migrator.testing import Job as PodJob
from migrator.testing import Kubelet, Pod, PyTorchJob, Stop, isolation
from tests.support import chance
from tests.support.harness import DEADLINE_S, ROOT, ForkServer, Job, events_in, until
from tests.support.rank_history import RankStory, assert_ranks_as_if_nothing_had_happened, unstopped_ranks, whole_steps
from tests.support.rank_processes import free_port

pytest_plugins = ["migrator.testing.fixtures"]

SCRIPT = ROOT / "tests" / "support" / "scripts" / "podded.py"
PYTHON = [sys.executable, str(SCRIPT)]
ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
SIGNAL = "/tmp/migrator/signal"
INTERVAL = 5
PERIODIC = {"MIGRATOR_EVERY": str(INTERVAL), "KEEP_PACE": "1"}
"""Saves each fifth step, and no step is so quick that a save takes longer."""


def shell(script: str) -> list[str]:
    """The trainer's line in a shell, as many images have it."""
    return ["sh", "-c", script.format(python=" ".join(PYTHON))]


class Training:
    """One job on one volume: its lives, in pods and after them, and what they trained."""

    def __init__(self, kubelet: Kubelet, job: Job, reference: RankStory) -> None:
        self.kubelet = kubelet
        self.volume = kubelet.volume("ckpts")
        self.story = RankStory()
        self._job = job.use(SCRIPT)
        self._job.root = self.volume
        self._reference = reference

    def before(self, step: int = 20, **env: str) -> str:
        """A first life, stopped at about this step; the ckpt that it left."""
        life = self._job.run(env=env)
        life.wait_for(f"^trained {step} ")
        life.kill()
        assert life.wait() == 143, life.text
        assert self.add(life.text) == 0
        return self.newest

    def pod(
        self, argv: Sequence[str] = PYTHON, *, until_step: int = 0, env: Mapping[str, str] | None = None, **more: Any
    ) -> Pod:
        """A life in a pod, which has trained this step when this returns."""
        pod = self.kubelet.run(argv, env={**ENV, **(env or {})}, **more)
        if until_step:
            pod.wait_for_log(f"^trained {until_step} ")
        return pod

    def go(self) -> None:
        """From now on steps take no time, and nobody holds."""
        (self.volume / "go").touch()

    def add(self, *ranks: str) -> int:
        """One more life: what its ranks wrote. How many of the steps before it were lost."""
        trained = max(self.story.steps, default=0)
        return trained - self.story.add(ranks)

    def lost(self, *lives: str, **env: str) -> int:
        """The steps lost by these lives together, told by one more that goes on to the end."""
        lost = sum(self.add(life) for life in lives)
        self.go()
        last = self._job.run(env=env)
        assert last.wait() == 0, last.text
        lost += self.add(last.text)
        self.check_end()
        return lost

    def check_end(self) -> None:
        """The last life came to the end, and nothing shows that there were several."""
        assert_ranks_as_if_nothing_had_happened(self.story, self._reference)

    @property
    def ckpts(self) -> list[str]:
        """Oldest first. Each is whole: all its bytes were read."""
        assert whole_steps(self._job)
        return self._job.ckpts()

    @property
    def newest(self) -> str:
        return self.ckpts[-1]


@pytest.fixture(scope="session")
def references(
    fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[int], RankStory]]:
    """The job on so many ranks as nobody stops it."""
    job = Job(fork_server, tmp_path_factory.mktemp("references")).use(SCRIPT)
    found: dict[int, RankStory] = {}

    def reference(ranks: int) -> RankStory:
        if ranks not in found:
            found[ranks] = unstopped_ranks(job, ranks, STEP_S="0")
        return found[ranks]

    yield reference
    job.end()


@pytest.fixture
def training(kubelet: Kubelet, job: Job, references: Callable[[int], RankStory]) -> Training:
    """The job on one rank."""
    return Training(kubelet, job, references(1))


@pytest.fixture
def training_on_two(kubelet: Kubelet, job: Job, references: Callable[[int], RankStory]) -> Training:
    """The job on two ranks."""
    return Training(kubelet, job, references(2))


def signal_of(pod: Pod, path: str = SIGNAL) -> Signal:
    """What the signal file of its container says."""
    found = SignalFile(pod.path(path)).read()
    assert found is not None, pod.log
    return found


def manifest(kind: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": "train"}, "spec": spec}


def pod_spec(
    argv: Sequence[str] = PYTHON, *, env: Mapping[str, str] | None = None, empty_dir: str = "", **more: Any
) -> dict[str, Any]:
    """The `spec:` of a pod, as yamls/ has it; `empty_dir` is one for the signal file."""
    env = {**ENV, "MIGRATOR_CKPT": "/ckpts", **(env or {})}
    mounts = [("ckpts", "/ckpts")]
    volumes: list[dict[str, Any]] = [{"name": "ckpts", "persistentVolumeClaim": {"claimName": "ckpts"}}]
    if empty_dir:
        env["MIGRATOR_SIGNAL"] = f"{empty_dir}/signal"
        mounts.append(("run", empty_dir))
        volumes.append({"name": "run", "emptyDir": {}})
    container = {
        "name": "train",
        "command": list(argv),
        "env": [{"name": name, "value": value} for name, value in env.items()],
        "lifecycle": {"preStop": {"exec": {"command": ["sh", "/hooks/preStop.sh"]}}},
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts],
    }
    return {"containers": [container], "volumes": volumes, "restartPolicy": "Never", **more}


def container_text(pod: Pod, number: int, pattern: str) -> str:
    """What the container of this number, from 1, wrote, as soon as a line of it matches."""

    def found() -> str:
        text = pod.containers[number - 1].text if len(pod.containers) >= number else ""
        return text if re.search(pattern, text, re.MULTILINE) else ""

    text: str = until(found, f"{pattern!r} in container {number}", context=lambda: pod.log)
    return text


def assert_saved_in_time(stop: Stop, code: int = 143) -> None:
    """The hook said so, and nobody had to be killed."""
    assert (stop.hook.code, stop.hook.text, stop.exit_code, stop.kill_s) == (0, "", code, None), stop


# Deleted.


def test_a_deleted_pod_loses_nothing(training: Training) -> None:
    """preStop saves, the trainer leaves with 143, and the next pod ends as a run that was never stopped."""
    pod = training.pod(until_step=10)

    stop = pod.delete()

    assert_saved_in_time(stop)
    ckpt = training.newest
    step = int(ckpt.rpartition("-")[2])
    said = signal_of(pod)
    assert (said.word, said.fields["ckpt"], said.fields["step"]) == (RESUME, ckpt, str(step))
    assert stop.message.startswith(f"migrator: saved: ckpt {ckpt}, step {step}, ")
    log = (training.volume / "preStop.log").read_text()
    assert re.fullmatch(r"stop: .*\n(?:\S+ ){3}saving ckpts\.\.\.\n(?:\S+ ){3}finish ckpts!\n", log), log
    training.go()
    replacement = training.pod()
    assert replacement.wait().exit_code == 0
    training.add(pod.log)
    assert training.add(replacement.log) == 0
    training.check_end()


@pytest.mark.parametrize(
    "argv",
    chance.some(
        "as process 1", [pytest.param(PYTHON, id="python"), pytest.param(shell("exec {python}"), id="exec")], 0.5
    ),
)
def test_sigterm_alone_loses_nothing(training: Training, argv: list[str]) -> None:
    """Without a hook process 1 hears SIGTERM itself, also where a shell has made room for it by `exec`."""
    pod = training.pod(argv, until_step=10, pre_stop=None)

    stop = pod.delete()

    assert (stop.exit_code, stop.is_term_heard, stop.kill_s, stop.hooks) == (143, True, None, ())
    assert stop.message.startswith(f"migrator: saved: ckpt {training.newest}, ")
    assert training.lost(pod.log) == 0


@pytest.mark.parametrize(
    "at_once",
    chance.some("hooks", [pytest.param(False, id="one after the other"), pytest.param(True, id="at once")], 0.5),
)
def test_two_hooks_save_once(training: Training, at_once: bool) -> None:
    """kubelet may call preStop again after a restart of its own: one save, and both hooks say that it is there."""
    # Process 1 is another one, so that the container is still there when the second hook comes late.
    pod = training.pod(shell("{python}; code=$?; sleep 1; exit $code"), until_step=10)

    stop = pod.delete(hooks=2, at_once=at_once)

    assert [(hook.code, hook.text) for hook in stop.hooks] == [(0, ""), (0, "")]
    assert (stop.exit_code, stop.kill_s) == (143, None)
    assert len(events_in(pod.log, "committed")) == 1
    assert training.lost(pod.log) == 0


def test_a_pod_that_is_deleted_after_the_load_keeps_the_ckpt(training: Training) -> None:
    """In warm-up, before its first step, there is nothing new to save; the hook hears of the ckpt that was loaded."""
    ckpt = training.before()
    pod = training.pod(env={"HOLD": "load"})
    pod.wait_for_log("^holds load$")

    stop = pod.delete()

    assert_saved_in_time(stop)
    said = signal_of(pod)
    assert (said.word, said.fields["ckpt"]) == (RESUME, ckpt)
    assert stop.message.startswith(f"migrator: nothing was trained since it was loaded: ckpt {ckpt}, ")
    assert training.ckpts == [ckpt]
    assert training.lost(pod.log) == 0


def test_a_pod_that_is_deleted_before_listening_waits_out_its_grace(training: Training) -> None:
    """Nobody listens yet, which the hook says at once. Without a handler process 1 does not hear SIGTERM."""
    ckpt = training.before()
    pod = training.pod(env={"HOLD": "import"}, grace_s=2)
    pod.wait_for_log("^holds import$")

    stop = pod.delete()

    assert stop.hook.code == 3
    assert stop.hook.text.startswith("preStop: no trainer listens: there is no signal file at ")
    assert (stop.exit_code, stop.is_term_heard, stop.message) == (137, False, "")
    assert stop.kill_s is not None
    assert stop.kill_s >= 2
    assert training.ckpts == [ckpt]
    assert training.lost() == 0


def test_a_pod_that_is_deleted_before_listening_trains_nothing(training: Training) -> None:
    """Neither hook nor SIGTERM reach it while it imports, but the request stays: it leaves before its first step."""
    ckpt = training.before()
    pod = training.pod(env={"HOLD": "import"})
    pod.wait_for_log("^holds import$")

    with ThreadPoolExecutor(1) as pool:
        deleted = pool.submit(pod.delete)
        # SIGTERM is sent when the hook has ended, which is a moment after its last line.
        until(lambda: pod._stopping is not None and pod._stopping.term_s is not None, "SIGTERM to be sent")
        training.go()
        stop = deleted.result(DEADLINE_S)

    assert "no trainer listens" in prestop_log(training)
    assert (stop.hook.code, stop.exit_code, stop.is_term_heard, stop.kill_s) == (3, 143, False, None), pod.log
    assert "begins to listen" in pod.log
    assert not events_in(pod.log, "generation_claimed")
    assert not re.search("^(resumed|trained) ", pod.log, re.MULTILINE)
    assert stop.message.startswith(
        f"migrator: nothing was trained yet; this ckpt was about to be loaded: ckpt {ckpt}, "
    )
    assert training.lost() == 0


def prestop_log(training: Training) -> str:
    log = training.volume / "preStop.log"
    return log.read_text() if log.exists() else ""


def test_a_request_to_a_container_is_nothing_to_the_next_one(training: Training) -> None:
    """It was left open in an emptyDir, and the container started again in place before its deadline."""
    if isolation() is not None:
        pytest.skip(f"LOUD: containers with a process 1 of their own are not tested: {isolation()}")
    spec = pod_spec(env={"HOLD": "import"}, empty_dir="/run/train", restartPolicy="OnFailure")
    pod: Pod = training.kubelet.apply(manifest("Pod", spec))
    pod.wait_for_log("^holds import$")

    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(pod.fail_liveness)
        until(lambda: "no trainer listens" in prestop_log(training), "the hook to end")
        pod.crash()
        assert stopped.result(DEADLINE_S).exit_code == 137
    pod.wait_for_log("^holds import$", count=2)
    asked = signal_of(pod, "/run/train/signal")
    training.go()

    assert asked.word == SAVE
    assert pod.wait().exit_code == 0, pod.log
    assert pod.restarts == 1
    training.add(pod.log)
    training.check_end()
    assert float(asked.fields["deadline"]) > time.time()


def test_a_finished_pod_has_no_hook(training: Training) -> None:
    """It ends with 0 and takes the signal file away; a hook of a pod that is deleted then calls nobody."""
    training.go()
    pod = training.pod()
    assert pod.wait().exit_code == 0

    stop = pod.delete()

    assert (stop.exit_code, stop.reason, stop.hooks) == (0, "Completed", ())
    assert not pod.path(SIGNAL).exists()
    training.add(pod.log)
    training.check_end()


def test_the_hook_of_a_finished_trainer_says_so(training: Training) -> None:
    """Where the container outlives the trainer the hook ends with 3, at once, and nothing is saved."""
    training.go()
    pod = training.pod(shell("{python}; sleep 100"), grace_s=2)
    pod.wait_for_log("^final ")
    until(lambda: not pod.path(SIGNAL).exists(), "the trainer to end", context=lambda: pod.log)

    stop = pod.delete()

    assert stop.hook.code == 3
    assert "no trainer listens: there is no signal file" in stop.hook.text
    assert stop.hook.took_s < 1.5
    assert list(training.volume.glob("*/*/manifest.json")) == []


# A shell as process 1.


def test_a_shell_without_a_hook_loses_what_was_not_saved_now_and_then(training: Training) -> None:
    """It passes no SIGTERM on, so the trainer trains until it is killed; the last periodic ckpt is there."""
    pod = training.pod(shell("{python}; true"), until_step=12, pre_stop=None, grace_s=2, env=PERIODIC)

    stop = pod.delete()

    assert (stop.exit_code, stop.is_term_heard) == (137, False)
    assert not events_in(pod.log, "signal")
    assert training.ckpts
    assert training.lost(pod.log) <= INTERVAL


def test_a_shell_that_hides_the_exit_code_ends_a_job_half_way(training: Training) -> None:
    """With the hook nothing is lost, but a Job takes the shell's 0 for the end of the training: the trap to know of."""
    template = pod_spec(shell("{python}; true"))
    job: PodJob = training.kubelet.apply(manifest("Job", {"template": {"spec": template}}))
    job.pod.wait_for_log("^trained 10 ")

    stop = job.pods[0].delete()

    assert_saved_in_time(stop, code=0)
    job.wait()
    assert not re.search("^final ", job.pods[0].log, re.MULTILINE)
    assert training.lost(job.pods[0].log) == 0


def test_a_shell_that_passes_the_exit_code_on_lets_a_job_go_on(training: Training) -> None:
    """`exit $?` behind the trainer: the pod ends with 143, the Job starts another one, and only that one's 0 counts."""
    template = pod_spec(shell("{python}; exit $?"))
    spec = {"template": {"spec": template}, "podReplacementPolicy": "Failed"}
    job: PodJob = training.kubelet.apply(manifest("Job", spec))
    job.pod.wait_for_log("^trained 10 ")

    stop = job.pods[0].delete()
    training.go()

    assert_saved_in_time(stop)
    job.wait()
    first, second = job.pods
    assert second.wait().exit_code == 0
    training.add(first.log)
    assert training.add(second.log) == 0
    training.check_end()


# Killed.


@pytest.mark.parametrize(("kill", "reason"), [("crash", "Error"), ("oom", "OOMKilled"), ("lose", "NodeLost")])
def test_a_kill_without_notice_loses_an_interval_at_most(training: Training, kill: str, reason: str) -> None:
    """Crash, out of memory, loss of the node: no hook is called, and the last periodic ckpt counts."""
    pod = training.pod(until_step=12, env=PERIODIC)

    stop: Stop = getattr(pod, kill)()

    assert (stop.exit_code, stop.reason, stop.hooks) == (137, reason, ())
    assert training.ckpts
    assert training.lost(pod.log) <= INTERVAL


def test_a_restart_in_place_is_not_confused_by_the_old_signal_file(training: Training) -> None:
    """An emptyDir keeps the file of the life that crashed. The next one, process 1 as well, makes it its own."""
    spec = pod_spec(env=PERIODIC, empty_dir="/run/train", restartPolicy="Always")
    pod: Pod = training.kubelet.apply(manifest("Pod", spec))
    pod.wait_for_log("^trained 12 ")
    old = pod.path("/run/train/signal").stat().st_mtime_ns
    assert signal_of(pod, "/run/train/signal").word == INIT

    pod.crash()
    container_text(pod, 2, "^trained 17 ")
    assert pod.path("/run/train/signal").stat().st_mtime_ns > old
    stop = pod.delete()

    assert_saved_in_time(stop)
    crashed, deleted = (container.text for container in pod.containers)
    assert [event["source"] for event in events_in(deleted, "signal")] == ['"signal file"']
    assert signal_of(pod, "/run/train/signal").fields["ckpt"] == training.newest
    training.add(crashed)
    assert training.add(deleted) <= INTERVAL
    assert training.lost() == 0


def test_a_liveness_restart_loses_nothing(training: Training) -> None:
    """kubelet calls preStop for it too. The next life finds `resume` in an emptyDir, and trains all the same."""
    spec = pod_spec(empty_dir="/run/train", restartPolicy="OnFailure")
    pod: Pod = training.kubelet.apply(manifest("Pod", spec))
    pod.wait_for_log("^trained 10 ")

    stop = pod.fail_liveness()

    assert_saved_in_time(stop)
    assert signal_of(pod, "/run/train/signal").word == RESUME
    container_text(pod, 2, r"^trained \d+ ")
    assert signal_of(pod, "/run/train/signal").word == INIT
    training.go()
    assert pod.wait().exit_code == 0
    assert pod.restarts == 1
    first, second = (container.text for container in pod.containers)
    assert not events_in(second, "signal")
    training.add(first)
    assert training.add(second) == 0
    training.check_end()


# The save does not work.


def test_a_grace_shorter_than_the_save_leaves_the_ckpt_before(training: Training) -> None:
    """The hook says that there was no answer, the trainer is killed in mid-write, and no byte of it is ever loaded."""
    ckpt = training.before(BIG_MB="8")
    slow = {"BIG_MB": "8", "MB_PER_S": "1"}
    pod = training.pod(until_step=30, grace_s=2, env=slow)

    stop = pod.delete()

    assert stop.hook.code == 5
    assert re.fullmatch(
        r"preStop: no answer from the trainer within [12]\.\d s of a grace of 2 s(: written .*)?\n", stop.hook.text
    )
    assert (stop.exit_code, stop.is_term_heard) == (137, True)
    assert re.fullmatch(rf"migrator: told to leave by signal file, .* \(the ckpt before: {ckpt}\)", stop.message)
    (torn,) = training.volume.glob("*/*/.part-*.tmp")
    assert 0 < torn.stat().st_size < 8_000_000
    assert training.ckpts == [ckpt]
    trained = int(re.findall(r"^trained (\d+) ", pod.log, re.MULTILINE)[-1])
    assert training.lost(pod.log, BIG_MB="8") == trained - int(ckpt.rpartition("-")[2])


@pytest.fixture
def small_volume(training: Training) -> Iterator[Path]:
    """The volume is a file system of its own, of 1 MB."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", training.volume], check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"LOUD: no file system can be mounted here: {done.stderr}")
    yield training.volume
    training.kubelet.close()
    subprocess.run(["umount", "-l", training.volume], check=True)


def remount(volume: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", volume], check=True)


def fill(volume: Path) -> None:
    with (volume / "full").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


@pytest.mark.parametrize(
    ("break_it", "mend", "reason"),
    [
        (fill, lambda volume: (volume / "full").unlink(), "No space left on device"),
        (lambda volume: remount(volume, "ro"), lambda volume: remount(volume, "rw"), "Read-only file system"),
    ],
    ids=["full", "read-only"],
)
def test_a_save_that_fails_is_told_and_leaves_the_ckpt_before(
    training: Training, small_volume: Path, break_it: Any, mend: Any, reason: str
) -> None:
    """Hook and termination message say why. The pod leaves all the same, to be started again."""
    ckpt = training.before()
    # Half of it goes to trying again, the rest is for a busy machine to leave in.
    pod = training.pod(until_step=30, grace_s=8)
    break_it(small_volume)

    stop = pod.delete()
    mend(small_volume)

    assert stop.hook.code == 6
    told = rf"cannot [^:]* {re.escape(str(small_volume))}\S*: {reason}.* \(the ckpt before is untouched: {ckpt}\)"
    assert re.search(rf"^preStop: the trainer could not save: {told}$", stop.hook.text, re.MULTILINE), stop
    assert re.fullmatch(f"migrator: not saved: {told}", stop.message), stop
    assert signal_of(pod).word == INIT
    assert (stop.exit_code, stop.kill_s) == (143, None)
    assert training.ckpts == [ckpt]
    trained = int(re.findall(r"^trained (\d+) ", pod.log, re.MULTILINE)[-1])
    assert training.lost(pod.log) == trained - int(ckpt.rpartition("-")[2])


# Jobs.


def test_a_replacement_that_starts_before_prestop_waits_for_the_save(training: Training) -> None:
    """A Job's new pod finds the old one saving: it waits and goes on from that ckpt. 143 does not complete the Job."""
    spec = {"template": {"spec": pod_spec(env={"HOLD": "write"})}}
    job: PodJob = training.kubelet.apply(manifest("Job", spec))
    old = job.pod
    old.wait_for_log("^trained 10 ")

    with ThreadPoolExecutor(1) as pool:
        deleted = pool.submit(old.delete)
        new = job.wait_for_pod(2)
        old.wait_for_log("^holds write$")
        new.wait_for_log("waiting_for_leaving")
        assert not job.is_complete
        training.go()
        assert_saved_in_time(deleted.result(DEADLINE_S))

    job.wait()
    assert [pod.stops[-1].exit_code for pod in job.pods] == [143, 0]
    training.add(old.log)
    assert training.add(new.log) == 0
    training.check_end()


def test_a_gang_of_a_pytorchjob_is_saved_by_the_hook_of_one_pod(training_on_two: Training) -> None:
    """One pod is deleted, all ranks leave with 143, all are started again, and the job completes."""
    training = training_on_two
    replica = {"restartPolicy": "ExitCode", "template": {"spec": pod_spec()}}
    replicas = {"Master": {"replicas": 1, **replica}, "Worker": {"replicas": 1, **replica}}
    job: PyTorchJob = training.kubelet.apply(manifest("PyTorchJob", {"pytorchReplicaSpecs": replicas}))
    first = [job.master, *job.workers]
    for pod in first:
        pod.wait_for_log("^trained 10 ")

    stop = first[1].delete()
    training.go()

    assert_saved_in_time(stop)
    assert first[0].wait().exit_code == 143
    second = job.wait_for_start(2)
    job.wait()
    assert [pod.wait().exit_code for pod in second] == [0, 0]
    training.add(*(pod.log for pod in first))
    assert training.add(*(pod.log for pod in second)) == 0
    training.check_end()


def test_pods_with_the_network_of_their_node_are_pods_of_their_own(training_on_two: Training, tmp_path: Path) -> None:
    """With `hostNetwork` both have the node's name, and the path of the signal file is the same in all containers."""
    if isolation() is not None:
        pytest.skip(f"LOUD: pods with a file system of their own are not tested: {isolation()}")
    training = training_on_two
    node = tmp_path / "node"
    node.mkdir()
    env = {"HOSTNAME": "node-7", "MIGRATOR_SIGNAL": f"{node}/signal", "BIND": "1"}
    replica = {"replicas": 1, "restartPolicy": "ExitCode", "template": {"spec": pod_spec(env=env)}}
    spec = {"pytorchReplicaSpecs": {"Master": replica, "Worker": replica}}
    job: PyTorchJob = training.kubelet.apply(manifest("PyTorchJob", spec))
    pods = [job.master, *job.workers]
    for pod in pods:
        pod.wait_for_log("^trained 10 ")
    assert [event["pod"] for pod in pods for event in events_in(pod.log, "ranks")] == ["1", "1"]

    stop = pods[1].delete()

    assert_saved_in_time(stop)
    assert pods[0].wait().exit_code == 143
    assert int(training.newest.rpartition("-")[2]) >= 10


def test_a_gang_of_which_one_pod_was_told_before_listening_trains_nothing(training_on_two: Training) -> None:
    """It comes to the meeting of the ranks and leaves with all of them, before a step is trained."""
    training = training_on_two
    replica = {"replicas": 1, "restartPolicy": "Never", "template": {"spec": pod_spec(env={"HOLD": "import"})}}
    spec = {"pytorchReplicaSpecs": {"Master": replica, "Worker": replica}}
    job: PyTorchJob = training.kubelet.apply(manifest("PyTorchJob", spec))
    pods = [job.master, *job.workers]
    for pod in pods:
        pod.wait_for_log("^holds import$")

    with ThreadPoolExecutor(1) as pool:
        deleted = pool.submit(pods[1].delete)
        until(lambda: "no trainer listens" in prestop_log(training), "the hook to end")
        training.go()
        stop = deleted.result(DEADLINE_S)

    assert (stop.hook.code, stop.exit_code, stop.kill_s) == (3, 143, None), pods[1].log
    assert pods[0].wait().exit_code == 143
    for pod in pods:
        assert not re.search("^(resumed|trained) ", pod.log, re.MULTILINE), pod.log
    assert list(training.volume.glob("*/generations/*.json")) == []


def test_two_pods_of_torchrun_are_saved_by_the_hook_of_one(training_on_two: Training) -> None:
    """One pod is deleted: both ranks save one step and both agents end. Started again they end as never stopped."""
    training = training_on_two

    def start() -> list[Pod]:
        port = free_port()
        options = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
        agent = [sys.executable, "-m", "torch.distributed.run", *options]
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return [
            training.pod([*agent, f"--node-rank={number}", str(SCRIPT)], name=f"node-{number}", env=env)
            for number in range(2)
        ]

    first = start()
    for pod in first:
        pod.wait_for_log("^trained 10 ")

    stop = first[1].delete()
    training.go()

    assert (stop.hook.code, stop.hook.text, stop.kill_s) == (0, "", None)
    # torchrun makes 1 of its rank's 143; now and then its agent aborts at its very end.
    assert {stop.exit_code, first[0].wait().exit_code} <= {1, 128 + 6}
    assert len(training.ckpts) == 1
    second = start()
    assert [pod.wait().exit_code for pod in second] == [0, 0]
    training.add(*(pod.log for pod in first))
    assert training.add(*(pod.log for pod in second)) == 0
    training.check_end()
