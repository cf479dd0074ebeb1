"""From the yaml: train, delete, look, apply again. What a user of the predecessor did, and of the jobs in yamls/."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from migrator.testing import Kubelet, Pod
from migrator.testing.s3_server import S3Server, why_not
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


def wait_for_any_log(pods: list[Pod], pattern: str, timeout_s: float = 60, *, after: str = "") -> re.Match[str]:
    """Rank 0 may be in any of the pods. `after`: only what is written behind this counts."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        for pod in list(pods):
            _, mark, text = pod.log.partition(after) if after else ("", "-", pod.log)
            if mark and (match := re.search(pattern, text, re.MULTILINE)):
                return match
        time.sleep(0.02)
    raise AssertionError(f"no pod wrote {pattern!r}:\n" + "\n".join(f"--- {pod.name}\n{pod.log}" for pod in pods))


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
    word, *fields = first.pod.path("/run/migrator/signal").read_text().splitlines()
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


@pytest.mark.timeout(240)
def test_one_pod_of_the_indexed_job_is_deleted(kubelet: Kubelet, trainers: str) -> None:
    """The other two stay: their agents wait for its replacement, and start their ranks again with it."""
    args = ["--epochs=6", "--steps=/ckpts/steps", "--weights=/ckpts/train-indexed.pt"]

    job = kubelet.apply(YAMLS / "indexed-job.yaml", image=IMAGE, env=ENV, args=args)
    pods = job.wait_for_start(1)
    wait_for_any_log(pods, "^epoch 0")
    stop = pods[1].delete()
    job.wait(150)

    assert (stop.exit_code, stop.hook.code) == (1, 0)
    assert [pod.name for pod in job.pods] == [
        "train-indexed-0",
        "train-indexed-1",
        "train-indexed-2",
        "train-indexed-1",
    ]
    assert [pod.restarts for pod in job.pods] == [0] * 4
    assert len({saved(pod) for pod in pods}) == 1
    assert f"loaded ckpt={saved(pods[1])} " in job.pods[3].log
    assert_each_sample_once(kubelet, epochs=6)
    assert kubelet.volume("ckpts").joinpath("train-indexed.pt").exists()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_pod_with_the_store_of_the_indexed_job_is_deleted(kubelet: Kubelet, trainers: str) -> None:
    """All agents end with 1, and all pods are replaced: a high backoffLimit lets the Job go on."""
    args = ["--epochs=6", "--steps=/ckpts/steps", "--weights=/ckpts/train-indexed.pt"]

    job = kubelet.apply(YAMLS / "indexed-job.yaml", image=IMAGE, env=ENV, args=args)
    pods = job.wait_for_start(1)
    wait_for_any_log(pods, "^epoch 0")
    pods[0].delete()
    job.wait(200)

    assert len(job.pods) == 6
    assert {pod.stops[-1].exit_code for pod in pods} == {1}
    assert len({saved(pod) for pod in pods}) == 1
    assert_each_sample_once(kubelet, epochs=6)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["statefulset.yaml", pytest.param("elastic-pytorchjob.yaml", marks=pytest.mark.long)])
def test_one_pod_of_an_elastic_job_is_deleted(kubelet: Kubelet, trainers: str, name: str) -> None:
    """The others keep their containers, and all go on with its replacement."""
    args = ["--epochs=30", "--steps=/ckpts/steps", "--weights=/ckpts/weights.pt"]

    job = kubelet.apply(YAMLS / name, image=IMAGE, env=ENV, args=args)
    pods = job.wait_for_start(1)
    wait_for_any_log(pods, "^epoch 0")
    stop = pods[2].delete()
    wait_for_any_log(job.pods, f"loaded ckpt={saved(pods[2])} ", 150)
    reached = wait_for_any_log(
        job.pods, r"^epoch (\d+): accuracy \S+ on 3 ranks", 150, after=f"loaded ckpt={saved(pods[2])} "
    )
    job.delete()

    assert (stop.exit_code, stop.hook.code) == (1, 0)
    assert [pod.name for pod in job.pods] == [pod.name for pod in pods] + [pods[2].name]
    assert [pod.restarts for pod in job.pods] == [0] * 4
    assert_each_sample_once(kubelet, epochs=int(reached[1]) + 1)


@pytest.mark.timeout(240)
def test_the_job_of_the_predecessor_begins_its_epoch_anew(kubelet: Kubelet, trainers: str) -> None:
    """Its own variables, a signal file on a volume of the pod, and our hook: one stop, one resume."""
    job = kubelet.apply(YAMLS / "pytorchjob-migration.yaml", image=IMAGE, env=ENV, args=["--epochs=60"])
    job.master.wait_for_log("^epoch 3:")
    stop = job.master.delete()
    job.wait_for_start(2)
    job.wait(120)

    assert (stop.exit_code, stop.hook.code) == (143, 0)
    assert "goes on after epoch" in job.master.log
    assert kubelet.volume("ckpts").joinpath("preStop.log").exists()
    assert kubelet.volume("ckpts").joinpath("train-epochs").is_dir()


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_rendered_job_runs_with_its_hooks_and_its_bucket(kubelet: Kubelet, trainers: str, tmp_path: Path) -> None:
    """What kustomize makes of the S3 component: the ConfigMap's hooks, and all of the Secret's variables."""
    if why := why_not():
        pytest.skip(f"LOUD: {why}")
    if not shutil.which("kubectl"):
        pytest.skip("LOUD: kubectl is not installed")
    for name in ("yamls", "hooks"):
        shutil.copytree(ROOT / name, tmp_path / name)
    file = tmp_path / "yamls" / "kustomization.yaml"
    text = re.sub(r"^  - \S+ # 2\..*\n", "", file.read_text(), flags=re.M)
    file.write_text(re.sub(r"^# (components: .*) # 3\.", r"\1 # 3.", text, flags=re.M))
    with S3Server(tmp_path / "s3") as server:
        server.make_bucket("your-bucket")
        settings = {"MIGRATOR_CKPT": "s3://your-bucket/jobs", **server.env()}
        (tmp_path / "yamls" / "s3" / "s3.env").write_text(
            "".join(f"{key}={value}\n" for key, value in settings.items())
        )
        command = ["kubectl", "kustomize", str(tmp_path / "yamls")]
        made = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        (tmp_path / "made.yaml").write_text(made)

        job = kubelet.apply(
            tmp_path / "made.yaml", image=IMAGE, env=ENV, args=["--epochs=3", "--weights=$(MIGRATOR_CKPT)/w.pt"]
        )
        job.pod.wait_for_log("^epoch 0")
        stop = job.pod.delete()
        job.wait(120)

        assert (stop.exit_code, stop.hook.code) == (143, 0)
        assert "loaded ckpt=000001-" in job.pod.log
        assert kubelet.volume("ConfigMap/migrator-hooks").joinpath("preStop.sh").exists()
        assert job.pods[0].path("/run/migrator/preStop.log").exists(), "there is no volume for the log of the hook"
        assert server.request("HEAD", "/your-bucket/jobs/w.pt").status == 200, "the result is in the bucket too"
