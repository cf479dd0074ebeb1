"""From the yaml: train, delete, look, apply again. What a user of the predecessor did, and of the jobs in yamls/."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from migrator.testing import Kubelet, Pod
from tests.support.harness import ROOT

YAMLS = ROOT / "yamls"
IMAGE = {"/app": ROOT / "examples"}
SAMPLES = 1500
pytestmark = [
    pytest.mark.usefixtures("fork_server"),
    pytest.mark.parametrize("trainers", ["warm", pytest.param("cold", marks=[pytest.mark.cold, pytest.mark.long])]),
]
ENV = {"OMP_NUM_THREADS": "1"}


def steps(kubelet: Kubelet) -> list[dict[str, object]]:
    """What the ranks trained, as they noted it on the volume."""
    found = []
    for file in sorted(kubelet.volume("ckpts").glob("steps*/*.jsonl")):
        found += [json.loads(line) for line in file.read_text().splitlines()]
    return found


def assert_each_sample_once(kubelet: Kubelet, epochs: int) -> None:
    for epoch in range(epochs):
        seen = Counter(i for step in steps(kubelet) if step["epoch"] == epoch for i in step["ids"])
        assert set(seen) == set(range(SAMPLES)), f"epoch {epoch}"
        assert set(seen.values()) == {1}, f"epoch {epoch}"


def saved(pod: Pod) -> str:
    """The ckpt that the pod left with, as its last lines name it."""
    return re.findall(r"leaving ckpt=(\S+)", pod.log)[-1]


def test_the_job_of_one_pod_is_deleted_and_applied_again(kubelet: Kubelet, trainers: str) -> None:
    """Its hook's log, its signal file and its termination message tell of the save; the next apply goes on from it."""
    (kubelet.volume("ckpts") / "steps").mkdir()
    args = ["--epochs=3", "--log=/ckpts/steps/rank-0.jsonl", "--weights=/ckpts/train.pt"]

    first = kubelet.apply(YAMLS / "job.yaml", image=IMAGE, env=ENV, args=args)
    first.pod.wait_for_log("^epoch 0")
    [stop] = first.delete()

    assert (stop.exit_code, stop.hook.code, stop.kill_s) == (143, 0, None)
    assert not first.is_complete
    ckpt = saved(first.pod)
    log = first.pod.path("/ckpts/preStop.log").read_text()
    assert re.fullmatch(r"stop: .*\n(?:\S+ ){3}saving ckpts\.\.\.\n(?:\S+ ){3}finish ckpts!\n", log)
    assert first.pod.path("/ckpts/postStart.log").read_text().startswith("start: ")
    word, *fields = first.pod.path("/tmp/migrator/signal").read_text().splitlines()
    assert word == "resume"
    assert f"ckpt={ckpt}" in fields
    assert ckpt in stop.message

    again = kubelet.apply(YAMLS / "job.yaml", image=IMAGE, env=ENV, args=args)
    again.wait()

    assert f"loaded ckpt={ckpt} " in again.pod.log
    assert again.pod.stops[-1].exit_code == 0
    assert_each_sample_once(kubelet, epochs=3)
    assert kubelet.volume("ckpts").joinpath("train.pt").exists()
    assert kubelet.volume("ckpts").joinpath("preStop.log").read_text() == log, "a pod that finished was asked to save"


@pytest.mark.timeout(240)
def test_one_pod_of_the_pytorchjob_is_deleted_and_then_all_of_it(kubelet: Kubelet, trainers: str) -> None:
    """The loss of one pod is one ckpt and a new start of all three; the last life, with one worker less, ends it."""
    # Long enough for each life to be in the middle of it when the notice comes, on a slow machine too.
    args = ["--epochs=6", "--steps=/ckpts/steps", "--weights=/ckpts/train-ddp.pt"]

    job = kubelet.apply(YAMLS / "pytorchjob.yaml", image=IMAGE, env=ENV, args=args)
    pods = job.wait_for_start(1)
    job.master.wait_for_log("^epoch 0")
    stop = pods[2].delete()
    job.wait_for_start(2)

    assert (stop.exit_code, stop.hook.code) == (143, 0)
    assert [pod.stops[0].exit_code for pod in pods] == [143] * 3
    assert len({saved(pod) for pod in pods}) == 1
    assert job.rank(2) is not pods[2], "a pod that was deleted is another one"
    assert job.master is pods[0], "a container that left is started again in place"

    job.master.wait_for_log(f"loaded ckpt={saved(pods[2])} ")
    stops = job.delete()
    last = kubelet.apply(YAMLS / "pytorchjob.yaml", image=IMAGE, env=ENV, args=args, workers=1)
    last.wait(120)

    assert [stop.exit_code for stop in stops] == [143] * 3
    # All pods hear of it from the first one that was asked. Who leaves before its own hook has asked ends that hook.
    assert {0} <= {stop.hook.code for stop in stops} <= {0, 137}
    assert len(last.pods) == 2
    assert f"loaded ckpt={saved(job.master)} " in last.master.log
    assert_each_sample_once(kubelet, epochs=6)


@pytest.mark.timeout(240)
def test_one_pod_of_the_torchrun_job_is_deleted(kubelet: Kubelet, trainers: str) -> None:
    """The agents end with 1 when their ranks have left; both are started again, and four ranks go on."""
    args = ["--epochs=6", "--steps=/ckpts/steps", "--weights=/ckpts/train-torchrun.pt"]

    job = kubelet.apply(YAMLS / "torchrun.yaml", image=IMAGE, env=ENV, args=args)
    pods = job.wait_for_start(1)
    job.master.wait_for_log("^epoch 0")
    stop = pods[1].delete()
    job.wait_for_start(2)
    job.wait(120)

    assert (stop.exit_code, stop.hook.code) == (1, 0)
    assert len({saved(pod) for pod in pods}) == 1
    assert job.master.log.count(f"loaded ckpt={saved(pods[1])} ") == 2, "two ranks in the pod that stayed"
    assert_each_sample_once(kubelet, epochs=6)
