"""The rows of the fault table: what is done to the job, and what other systems document about the same.

A row is an entry of `SCENARIOS`: a function that takes the job through its faults, and texts. The function makes the
pods, makes each fault by a method of the job that notes when it was (`preempt`, `lose`, or `fault()` first), and waits
for what has to follow. `faults.py` lets the job train to its end, counts, and compares with the aim.

What is said of other systems is in the documents that `SOURCES` names, and nowhere else. None of them says how many
steps or samples such a fault costs.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from faults_job import EVERY, PodNetwork, ScenarioError, TrainingJob, slowed

FAULT_STEP = 4 * EVERY + 6
"""Where the fault comes: in the middle of an epoch, some steps after a periodic save, so that something can be lost."""
NOT_DOCUMENTED = "not documented"
SOURCES = {
    "DLRover": (
        "dlrover/docs/tech_report/fault_tolerance_exps.md",
        "dlrover/docs/blogs/stabilize_llm_training_cn.md",
        "dlrover/docs/blogs/flash_checkpoint.md",
        "dlrover/docs/design/diagnosis-system.md",
        "dlrover/docs/design/dlrover-overview.md",
    ),
    "ElasticDL": (
        "elasticdl/docs/designs/dynamic_data_sharding.md",
        "elasticdl/docs/designs/allreduce_based_horovod.md",
        "elasticdl/docs/benchmark/allreduce/report.md",
    ),
    "torchelastic": (
        "docs.pytorch.org/docs/stable/elastic/run.html",
        "docs.pytorch.org/docs/stable/elastic/train_script.html",
        "docs.pytorch.org/docs/stable/elastic/rendezvous.html",
        "docs.pytorch.org/docs/stable/elastic/timer.html",
        "discuss.pytorch.org/t/131806",
    ),
    "KubeDL": (
        "kubedl/docs/tutorial/torchelasticjob.md",
        "kubedl/controllers/pytorch/elastic_scale.go",
    ),
}
"""Of each system, the files of its repository or the pages on which its column is based."""


@dataclass(frozen=True)
class Documented:
    """What each system says about it."""

    dlrover: str = NOT_DOCUMENTED
    elasticdl: str = NOT_DOCUMENTED
    torchelastic: str = NOT_DOCUMENTED
    kubedl: str = NOT_DOCUMENTED

    @property
    def texts(self) -> list[str]:
        """In the order of `SOURCES`."""
        return [self.dlrover, self.elasticdl, self.torchelastic, self.kubedl]


@dataclass(frozen=True)
class Scenario:
    """One row."""

    name: str
    what: str
    """What is done, in a sentence for the page."""
    is_announced: bool
    """A notice comes first, and no step may be lost; otherwise at most those since the last periodic save."""
    run: Callable[[TrainingJob], None]
    documented: Documented
    nodes: str = "3:4"
    """How few and how many nodes a group has, as for torchrun."""
    needs_network: bool = False
    """Its pods have a network that can be cut."""

    @property
    def lost_at_most(self) -> int:
        """Steps, for each fault."""
        return 0 if self.is_announced else EVERY


def begun(job: TrainingJob, pods: int = 4) -> None:
    job.start(pods)
    job.wait_for_step(FAULT_STEP)


# Announced.


def preempted(job: TrainingJob) -> None:
    begun(job)
    job.preempt(job.pods[2])
    job.add()
    job.wait_for_group(4)


def straggler(job: TrainingJob) -> None:
    job.start(4)
    pod, slow_from = job.pods[2], 2 * EVERY + 6
    job.wait_for_step(slow_from)
    lives = len(job.history.lives)
    with slowed(job.rank_pid(pod), runs_s=0.01, stands_s=0.09):
        # Long enough for periodic saves in which the slow rank takes part.
        job.wait_for_step(FAULT_STEP)
        life = job.history.lives[-1]
        if len(job.history.lives) > lives:
            raise ScenarioError(f"the slow rank was taken for a lost one\n{job.story()}")
        before_s = life.step_s(life.begins + 2, slow_from)
        slow_s = life.step_s(slow_from + 1, FAULT_STEP - 1)
        job.notes.append(f"a step took {1000 * before_s:.0f} ms, and {1000 * slow_s:.0f} ms with the slow rank")
        job.preempt(pod)
    job.add()
    job.wait_for_group(4)


def scaled_up(job: TrainingJob) -> None:
    begun(job, 3)
    job.fault()
    job.add()
    job.wait_for_group(4)


def scaled_down(job: TrainingJob) -> None:
    begun(job)
    job.preempt(job.pods[2])
    job.wait_for_group(3)


def three_of_four(job: TrainingJob) -> None:
    begun(job)
    job.preempt(*job.pods[1:])
    job.wait_for_group(1)
    job.wait_for_step(job.history.step + 3)
    job.fault()
    for _ in range(3):
        job.add()
    job.wait_for_group(4)


def applied_again(job: TrainingJob) -> None:
    begun(job)
    job.preempt(*job.pods)
    job.move("other-host")
    job.start(4)


def coordinator_preempted(job: TrainingJob) -> None:
    begun(job)
    job.preempt(job.pods[0])
    job.add(serves=True)
    job.wait_for_group(4)


# Not announced.


def node_lost(job: TrainingJob) -> None:
    begun(job)
    job.lose(job.pods[2])
    job.add()
    job.wait_for_group(4)


def process_killed(job: TrainingJob) -> None:
    begun(job)
    pid = job.rank_pid(job.pods[2])
    job.fault()
    os.kill(pid, signal.SIGKILL)
    job.wait_for_group(4)


def out_of_memory(job: TrainingJob) -> None:
    begun(job)
    job.fault()
    stop = job.pods[2].oom()
    if (stop.exit_code, stop.reason) != (137, "OOMKilled"):
        raise ScenarioError(f"expected OOMKilled with 137, found {stop}")
    job.wait_for_group(4)


def frozen(job: TrainingJob) -> None:
    begun(job)
    pid = job.rank_pid(job.pods[2])
    job.fault()
    os.kill(pid, signal.SIGSTOP)
    job.wait_for_group(4)


def fault_node(job: TrainingJob) -> None:
    begun(job)
    bad = job.pods[2]
    job.fault()
    bad.crash()
    job.wait_for_group(4)  # its container was started again in place
    job.wait_for_step(job.history.step + 3)
    job.lose(bad)  # and this time its node is taken out of service
    job.wait_for_group(3)
    job.notes.append("the other three go on without it")


def coordinator_lost(job: TrainingJob) -> None:
    begun(job)
    job.lose(job.pods[0])
    job.add(serves=True)
    job.wait_for_group(4)


def network_lost(job: TrainingJob) -> None:
    begun(job)
    pod = job.pods[2]
    job.cut(pod)
    job.wait_for_group(3)
    # What an operator does when the node has not answered for long enough.
    job.take_away(pod)
    job.add()
    job.wait_for_group(4)


SHARD_OF_ELASTICDL = "The others form a new group and go on; the worker's shard is trained again by another one"
COORDINATOR_OF_DLROVER = (
    "The agents meet at the job's master, a pod that does not train. If the master of a job that scales by itself "
    "fails, its statistics are lost, and this is not supported"
)
COORDINATOR_OF_TORCHELASTIC = "With c10d the job ends; with etcd the agents meet again"
COORDINATOR_OF_KUBEDL = "Its tutorial has the agents meet at an etcd server, a pod of its own"

SCENARIOS = [
    Scenario(
        "pod preempted",
        "One of four pods is evicted: preStop, SIGTERM. A new pod takes its place.",
        True,
        preempted,
        Documented(
            dlrover="A new pod takes its place. In the log that is shown the training begins at step 0 with the loss "
            "of new weights (2.30)",
            elasticdl=SHARD_OF_ELASTICDL,
            torchelastic="The others are stopped and started again as a smaller group, from the newest checkpoint of "
            "the script",
            kubedl="Its AIMaster is asked to checkpoint, and the pod is drained when that is done",
        ),
    ),
    Scenario(
        "straggler",
        "One of four ranks gets a tenth of its processor for 20 steps, then its pod is evicted and replaced.",
        True,
        straggler,
        Documented(
            dlrover="Found by a check before the training, by its time (136 s, others 20 to 23 s). The pod ends with "
            "an error and a new one takes its place",
        ),
    ),
    Scenario(
        "scale up 3 to 4",
        "A fourth pod joins three that train.",
        True,
        scaled_up,
        Documented(
            dlrover="All ranks are started again as a group of 4. In the log that is shown the training begins at step "
            "0 with the loss of new weights (2.30)",
            elasticdl="The new worker gets the weights from the oldest one, and shards like the others",
            torchelastic="All ranks are stopped and started again with another RANK and WORLD_SIZE",
            kubedl="Checkpoint first, then all pods are restarted with the new WORLD_SIZE",
        ),
    ),
    Scenario(
        "scale down 4 to 3",
        "One of four pods is evicted and not replaced.",
        True,
        scaled_down,
        Documented(
            dlrover="The agent of one pod is killed; the others load the newest checkpoint of the script, with the "
            "sampler's place in the epoch, as a group of 3",
            elasticdl=SHARD_OF_ELASTICDL,
            torchelastic="All ranks are stopped and started again with another RANK and WORLD_SIZE",
            kubedl="Checkpoint first, then all pods are restarted with the new WORLD_SIZE",
        ),
    ),
    Scenario(
        "3 of 4 preempted, back to 4",
        "Three of four pods are evicted at once. One goes on alone; then three new pods come.",
        True,
        three_of_four,
        Documented(
            dlrover="Goes on with the nodes that are left if there are enough (`--nnodes=3:4`), and grows when new "
            "ones come",
            elasticdl="The number of workers follows what other jobs leave over; the accuracy stays the same",
            torchelastic="Goes on if there are enough nodes (`--nnodes=1:4`), up to `--max-restarts` times",
            kubedl="Between `minReplicas` and `maxReplicas`; goes back to the last size if a new pod stays pending",
        ),
        nodes="1:4",
    ),
    Scenario(
        "all deleted, applied elsewhere",
        "All four pods are deleted at once, then four are made with other names, addresses and another store.",
        True,
        applied_again,
        Documented(),
    ),
    Scenario(
        "coordinator preempted",
        "The pod that serves the c10d store is evicted; a new one takes over its name.",
        True,
        coordinator_preempted,
        Documented(
            dlrover=COORDINATOR_OF_DLROVER,
            torchelastic=COORDINATOR_OF_TORCHELASTIC,
            kubedl=COORDINATOR_OF_KUBEDL,
        ),
    ),
    Scenario(
        "pod killed",
        "The node of one of four pods is lost without notice. A new pod takes its place.",
        False,
        node_lost,
        Documented(
            dlrover="A new pod takes its place, after a check of all nodes; from the newest checkpoint on storage "
            "(every 250 steps in their example)",
            elasticdl=SHARD_OF_ELASTICDL,
            torchelastic="The job manager has to replace the node; all ranks are started again, from the newest "
            "checkpoint of the script",
        ),
    ),
    Scenario(
        "process killed",
        "One of four ranks gets SIGKILL; its agent stays.",
        False,
        process_killed,
        Documented(
            dlrover="The pods stay and all ranks are started again, from a copy in shared memory (every 10 steps in "
            "their example)",
            torchelastic="All ranks are stopped and started again, up to `--max-restarts` times, from the newest "
            "checkpoint of the script",
        ),
    ),
    Scenario(
        "out of memory",
        "One of four containers is killed as a whole (137, OOMKilled), and started again in place.",
        False,
        out_of_memory,
        Documented(
            dlrover="A new pod with twice the memory (4 to 8 GiB), shown for TensorFlow's parameter servers",
        ),
    ),
    Scenario(
        "frozen rank",
        "One of four ranks gets SIGSTOP, and never goes on.",
        False,
        frozen,
        Documented(
            dlrover="A hang is told from CUDA's events or from metrics; then the process is started again or the node "
            "replaced",
            torchelastic="A timer that the script sets (`timer.expires`) has the process killed",
        ),
    ),
    Scenario(
        "fault node",
        "One of four pods crashes, is started again in place, crashes again, and is not started any more.",
        False,
        fault_node,
        Documented(
            dlrover="Found by a check before the training (failed in both rounds), and replaced",
            elasticdl="A shard of a worker that failed goes back to the list of those to do",
            torchelastic="All ranks are started again at each failure, up to `--max-restarts` times",
        ),
    ),
    Scenario(
        "coordinator lost",
        "The pod that serves the c10d store is lost without notice; a new one takes over its name.",
        False,
        coordinator_lost,
        Documented(
            dlrover=COORDINATOR_OF_DLROVER,
            torchelastic=COORDINATOR_OF_TORCHELASTIC,
            kubedl=COORDINATOR_OF_KUBEDL,
        ),
    ),
    Scenario(
        "network lost",
        "One of four pods is cut off: all its packets are lost. It is replaced.",
        False,
        network_lost,
        Documented(
            dlrover="The pod fails and a new one takes its place. In the log that is shown the step begins at 0 with a "
            "loss of trained weights (0.24)",
            elasticdl="A task whose connection timed out goes back to the list of those to do",
            torchelastic="While a group forms, it forms again without the node; later, as for a lost node",
        ),
        needs_network=True,
    ),
]


def why_not(scenario: Scenario) -> str | None:
    """None if it can be run on this machine."""
    return PodNetwork.why_not() if scenario.needs_network else None
