"""The node that holds torchrun's rendezvous store (`--rdzv-backend=c10d`) goes: what becomes of the others.

torch 2.13: their agents cannot form a group without the store, and end with 1, however many restarts are left. So a
job survives that only if all of it is started again, or if the store lies outside of the nodes that train.
"""

from __future__ import annotations

import re
import sys
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from migrator.notice.signal_file import RESUME
from migrator.testing import Kubelet, PyTorchJob
from tests.pods.test_pods import manifest, pod_spec
from tests.ranks.test_torchrun import AGENT_STOPPED, AS_IT_IS, resumed, saved_step, steps_of, two_nodes, workers_of
from tests.support.harness import ROOT, Job, until
from tests.support.rank_processes import free_port
from tests.support.torchruns import IMPATIENT, Torchrun

pytest_plugins = ["migrator.testing.fixtures"]
STORE = """
import signal
import sys
from datetime import timedelta
from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("serves")
signal.pause()
"""


def delete_pod(run: Torchrun) -> int:
    """The hook, then SIGTERM, as kubelet does it; the step that was saved."""
    run.ask(grace_s=20)
    answer = run.answer()
    assert answer is not None
    assert answer.word == RESUME, run.text
    run.terminate()
    assert run.wait() in AGENT_STOPPED, run.text
    return int(answer.fields["step"])


def test_the_other_agents_end_too_and_all_of_it_goes_on_when_started_again(job: Job) -> None:
    """Restarts do not help: there is nobody to meet at. What was trained is saved, so nothing is lost."""
    job.write(AS_IT_IS)
    host, other = two_nodes(job, max_restarts=3)

    step = delete_pod(host)

    assert other.wait() == 1, other.text
    assert saved_step(job) == step
    assert max(steps_of(worker.text)[-1:] or [0] for run in (host, other) for worker in workers_of(run)) == [step]

    again = job.torchrun(nproc=2, EPOCHS="1")
    assert again.wait() == 0, again.text
    assert {resumed(worker.text) for worker in again.lives[0]} == {step}


def test_a_store_outside_of_the_nodes_keeps_the_job_alive(job: Job) -> None:
    """As a small pod of its own that nobody takes away, or etcd: whichever node goes, the others go on."""
    port = free_port()
    script = job.write(STORE).script
    served = script.rename(script.with_name("store.py"))
    store = job.use(served).run(str(port))
    store.wait_for("^serves$")
    job.write(AS_IT_IS)
    rdzv, more = f"127.0.0.1:{port}", {"EPOCHS": "2", "SAMPLES": "300"}
    one = job.torchrun(nproc=1, nnodes="2:2", max_restarts=3, rdzv=rdzv, **more)
    # The second one would begin without the first one, which would then begin in the middle.
    seen = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    until(lambda: seen.check(["torch.rendezvous.tests"]), "the first agent waits for the second one")
    two = job.torchrun(nproc=1, nnodes="1:2", max_restarts=3, rdzv=rdzv, pod=1, **more)
    for run in (one, two):
        run.wait_for("^trained 3 ")
    dying, staying = (one, two) if one.lives[0][0].rank == 0 else (two, one)

    step = delete_pod(dying)

    assert staying.wait() == 0, f"{dying.text}\n{staying.text}"
    last = staying.lives[-1]
    assert [(worker.rank, worker.size) for worker in last] == [(0, 1)]
    assert resumed(last[0].text) == step


def test_the_operator_starts_all_of_it_again(kubelet: Kubelet) -> None:
    """`restartPolicy: OnFailure`: the master's pod, with the store, is made anew, the worker's agent started again."""
    port = free_port()

    def replica(is_host: int) -> dict[str, Any]:
        options = [
            *("--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=tests"),
            *(f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf=is_host={is_host},{IMPATIENT}"),
            # Nodes are told apart by address and pid, and both agents are process 1.
            f"--local-addr=127.0.0.{2 - is_host}",
        ]
        script = str(ROOT / "tests" / "support" / "scripts" / "podded.py")
        argv = [sys.executable, "-m", "torch.distributed.run", *options, script]
        spec = pod_spec(argv, env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
        del spec["restartPolicy"]
        return {"replicas": 1, "restartPolicy": "OnFailure", "template": {"spec": spec}}

    spec = {"pytorchReplicaSpecs": {"Master": replica(1), "Worker": replica(0)}}
    job: PyTorchJob = kubelet.apply(manifest("PyTorchJob", spec))
    master, worker = job.wait_for_start(1)
    for pod in (master, worker):
        pod.wait_for_log("^trained 10 ")

    stop = master.delete()
    (kubelet.volume("ckpts") / "go").touch()
    job.wait()

    assert (stop.hook.code, stop.kill_s) == (0, None)
    assert worker.stops[0].exit_code == 1
    for text in (master.log + job.master.log, worker.log):
        begun = [int(step) for step in re.findall(r"^resumed (\d+)$", text, re.MULTILINE)]
        steps = [int(step) for step in re.findall(r"^trained (\d+) ", text, re.MULTILINE)]
        assert begun[0] == 0
        assert begun[-1] >= 10
        assert steps == list(range(1, steps[-1] + 1)), "no step was lost, and none trained twice"
