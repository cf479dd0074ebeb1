"""Several pods under one controller of the stand-in: an indexed Job, a StatefulSet, an elastic PyTorchJob.

Containers are small shells, as in test_kubelet.py.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from migrator.testing import IndexedJob, Kubelet, Pod, PyTorchJob, StandInError, StatefulSet
from tests.pods.test_kubelet import STAYS, a_pytorchjob, claim, pre_stop, spec, up
from tests.support.harness import until

MEETS = {
    "env": [
        {"name": "PET_RDZV_ENDPOINT", "value": "many-0.many.default:29400"},
        {"name": "PET_RDZV_CONF", "value": "a=1"},
    ]
}
TELLS = f"env | grep -E '^(PET_|JOB_|HOSTNAME)'; {STAYS}"


def indexed(script: str, *, job: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    counts = {"completionMode": "Indexed", "completions": 3, "parallelism": 3, "podReplacementPolicy": "Failed"}
    template = {"spec": spec(script, **more)}
    return {"kind": "Job", "metadata": {"name": "many"}, "spec": {**counts, **(job or {}), "template": template}}


def stateful(script: str, *, of: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    template = {"spec": {**spec(script, **more), "restartPolicy": "Always"}}
    counts = {"replicas": 2, "podManagementPolicy": "Parallel"}
    return {"kind": "StatefulSet", "metadata": {"name": "many"}, "spec": {**counts, **(of or {}), "template": template}}


def told(pod: Pod) -> dict[str, str]:
    return dict(re.findall(r"^(\w+)=(.*)$", up(pod).log, re.M))


def test_pods_of_an_indexed_job_have_numbers_and_one_place_to_meet(kubelet: Kubelet) -> None:
    """Only the pod that the endpoint names may serve the store; the port is a free one, for the job's whole life."""
    job: IndexedJob = kubelet.apply(indexed(TELLS, **MEETS))

    said = [told(pod) for pod in job.wait_for_start(1)]

    assert [one["HOSTNAME"] for one in said] == ["many-0", "many-1", "many-2"]
    assert [one["JOB_COMPLETION_INDEX"] for one in said] == ["0", "1", "2"]
    assert [one["PET_RDZV_CONF"] for one in said] == ["a=1", "a=1,is_host=0", "a=1,is_host=0"]
    (endpoint,) = {one["PET_RDZV_ENDPOINT"] for one in said}
    assert re.fullmatch(r"127\.0\.0\.1:\d+", endpoint)
    assert len({one["PET_LOCAL_ADDR"] for one in said}) == 3

    job.rank(1).delete()

    again = told(until_replaced(job, 1))
    assert (again["PET_RDZV_ENDPOINT"], again["JOB_COMPLETION_INDEX"]) == (endpoint, "1")
    assert again["PET_LOCAL_ADDR"] not in {one["PET_LOCAL_ADDR"] for one in said}, "to torchrun it is another node"


def until_replaced(job: IndexedJob | StatefulSet | PyTorchJob, number: int, pods: int = 2) -> Pod:
    name = job.rank(number).name
    until(lambda: sum(pod.name == name for pod in job.pods) == pods, f"another {name}")
    return job.rank(number)


def test_an_indexed_job_is_complete_when_each_number_has_succeeded(kubelet: Kubelet) -> None:
    """A pod that failed is made again under its number; one that succeeded is not."""
    main = "[ $HOSTNAME != many-1 -o -e /shared/been ] && exit 0; touch /shared/been; exit 1"
    job: IndexedJob = kubelet.apply(indexed(main, **claim()))

    job.wait()

    assert sorted(pod.name for pod in job.pods) == ["many-0", "many-1", "many-1", "many-2"]


def test_an_indexed_job_gives_up(kubelet: Kubelet) -> None:
    """`backoffLimit` counts the failures of all numbers; evictions may be ignored, as in any Job."""
    rules = [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}]
    job: IndexedJob = kubelet.apply(indexed(STAYS, job={"backoffLimit": 0, "podFailurePolicy": {"rules": rules}}))
    for pod in job.wait_for_start(1):
        up(pod)

    job.rank(0).evict()
    up(until_replaced(job, 0))
    assert job.failed is None

    job.rank(2).delete()
    with pytest.raises(StandInError, match="more than 0 pods failed"):
        job.wait()


@pytest.mark.parametrize("policy", ["Failed", "TerminatingOrFailed"])
def test_a_pod_of_an_indexed_job_is_replaced_when_the_policy_says(kubelet: Kubelet, policy: str) -> None:
    """After the end of the old one, or beside it."""
    job: IndexedJob = kubelet.apply(indexed(STAYS, job={"podReplacementPolicy": policy}, **pre_stop("sleep 0.3")))
    old = [up(pod) for pod in job.wait_for_start(1)][1]

    old.delete()

    new = up(until_replaced(job, 1))
    assert old.container.ended_s is not None
    assert (new.container.began_s < old.container.ended_s) == (policy == "TerminatingOrFailed")


def test_a_stateful_set_keeps_its_names_and_is_never_complete(kubelet: Kubelet) -> None:
    """A container that ended is started again in place, a pod that was deleted is made again; `workers` is its size."""
    main = f"[ -e /shared/done ] || {{ touch /shared/done; exit 0; }}; {TELLS}"
    job: StatefulSet = kubelet.apply(stateful(main, **claim()), workers=1)
    (pod,) = job.wait_for_start(2)
    up(pod)
    assert (pod.name, pod.restarts, job.is_complete) == ("many-0", 1, False)

    pod.delete()

    again = up(until_replaced(job, 0))
    assert (again.name, again.restarts) == ("many-0", 0)
    assert len(job.delete()) == 1
    assert len(job.pods) == 2


def test_an_elastic_pytorchjob_is_told_where_to_meet(kubelet: Kubelet) -> None:
    """What the operator gives torchrun; worker 0 serves the store, and its success is that of the job."""
    document = a_pytorchjob(STAYS, f"env | grep PET_; {STAYS}", policy="OnFailure")
    del document["spec"]["pytorchReplicaSpecs"]["Master"]
    document["spec"]["elasticPolicy"] = {
        "minReplicas": 1,
        "maxReplicas": 4,
        "nProcPerNode": 2,
        "maxRestarts": 7,
        "rdzvBackend": "c10d",
        "rdzvConf": [{"key": "join_timeout", "value": "60"}],
    }
    job: PyTorchJob = kubelet.apply(document, workers=2)

    said = [told(pod) for pod in job.wait_for_start(1)]

    assert [pod.name for pod in job.pods] == ["ranks-worker-0", "ranks-worker-1"]
    same = {"PET_NNODES": "1:4", "PET_NPROC_PER_NODE": "2", "PET_MAX_RESTARTS": "7", "PET_RDZV_BACKEND": "c10d"}
    assert all(same.items() <= one.items() for one in said)
    assert [one["PET_RDZV_CONF"] for one in said] == ["join_timeout=60", "join_timeout=60,is_host=0"]
    assert len({one["PET_RDZV_ENDPOINT"] for one in said}) == 1


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (indexed("true", job={"parallelism": 2}), "Job many: parallelism is 2 and completions is 3"),
        (indexed("true", restartPolicy="Always"), "Job many: restartPolicy Always is not allowed in a Job"),
        (stateful("true", of={"podManagementPolicy": "OrderedReady"}), "set podManagementPolicy: Parallel"),
        (stateful("true", of={"volumeClaimTemplates": [{}]}), "volumeClaimTemplates are not read here"),
    ],
)
def test_what_is_not_run_here_is_refused(kubelet: Kubelet, document: dict[str, Any], why: str) -> None:
    """When it is applied."""
    with pytest.raises(StandInError, match=why):
        kubelet.apply(document)
