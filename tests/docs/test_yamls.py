"""The manifests in yamls/ are what Kubernetes and the operators take, and what the code and the examples mean.

The schemas do not know that two numbers have to be equal, or that a mount needs
its volume. Such rules are functions here, each with what it finds wrong. A test
of its own breaks copies of the files, so that each rule is seen to find something.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate.utils import all_versions, major_minor

from migrator import settings
from migrator.errors import SettingsError
from migrator.hooks import SCRIPTS
from tests.support import published_schemas
from tests.support.harness import ROOT

YAMLS = ROOT / "yamls"
JOBS = [
    "elastic-pytorchjob.yaml",
    "elasticjob.yaml",
    "indexed-job.yaml",
    "job.yaml",
    "kubedl.yaml",
    "pytorchjob-migration.yaml",
    "pytorchjob.yaml",
    "statefulset.yaml",
    "torchrun.yaml",
    "trainjob.yaml",
]
NAMES = sorted([*JOBS, "priorityclass.yaml", "pvc.yaml"])
# The oldest whose podReplacementPolicy is on by default, and all that came after it.
VERSIONS = [version for version in map(major_minor, all_versions()) if int(version.split(".")[1]) >= 29]
# Where the templates of pods are in each kind.
TEMPLATES = {
    "Job": "spec.template",
    "StatefulSet": "spec.template",
    "PyTorchJob": "spec.pytorchReplicaSpecs.*.template",
    "TrainingRuntime": "spec.template.spec.replicatedJobs.*.template.spec.template",
    "ElasticJob": "spec.replicaSpecs.*.template",
}
# The name that the operator gives its container, by which it finds it again.
CONTAINERS = {"PyTorchJob": "pytorch", "TrainingRuntime": "node", "ElasticJob": "main"}
# The label by which a controller marks the pods of a job.
LABELS = {
    "Job": "job-name",
    "PyTorchJob": "training.kubeflow.org/job-name",
    "ElasticJob": "elasticjob.dlrover/name",
}
BUILT_IN = re.compile(r"v1|(batch|apps|policy|scheduling\.k8s\.io)/v1")
AGENTS = ("torchrun", "dlrover-run")

each_file = pytest.mark.parametrize("name", NAMES)


class _Loader(yaml.SafeLoader):
    """As strict as kubectl: PyYAML alone takes the last of two equal keys without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"twice: {twice}", node.start_mark)
        return super().construct_mapping(node, deep)


@dataclass(frozen=True)
class Manifest:
    """One file: its text, and the documents in it."""

    name: str
    text: str
    documents: list[Any]

    def of_kind(self, kind: str) -> list[Any]:
        return [one for one in self.documents if one["kind"] == kind]

    @property
    def job(self) -> Any:
        """The document that the pods are made of; empty if there is none."""
        return next((one for one in self.documents if one["kind"] in TEMPLATES), {})

    @property
    def kind(self) -> str:
        return str(self.job.get("kind"))

    @property
    def replicas(self) -> dict[str, Any]:
        """Of a PyTorchJob: the specification of each kind of replica."""
        return dict(self.job["spec"]["pytorchReplicaSpecs"]) if self.kind == "PyTorchJob" else {}

    @property
    def batch_job(self) -> Any:
        """The specification of the Job that controls the pods; empty if none does."""
        if self.kind == "TrainingRuntime":
            return self.job["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
        return self.job["spec"] if self.kind == "Job" else {}

    @property
    def pods(self) -> dict[str, Any]:
        """The spec of each kind of pod that is made of it."""
        return {where: template["spec"] for where, template in self.templates.items()}

    @property
    def templates(self) -> dict[str, Any]:
        return dict(found_at(self.job, TEMPLATES[self.kind].split("."))) if self.job else {}

    @property
    def containers(self) -> Iterator[tuple[str, Any, Any]]:
        """Where it is, its pod, and the container. Each of them trains."""
        for where, pod in self.pods.items():
            for container in pod["containers"]:
                yield f"{where}/{container['name']}", pod, container


def found_at(document: Any, path: list[str], where: str = "pod") -> Iterator[tuple[str, Any]]:
    """What the path leads to; a `*` leads to all, each under its name."""
    if not path:
        yield where, document
    elif path[0] == "*":
        named = document.items() if isinstance(document, dict) else ((one["name"], one) for one in document)
        for name, one in named:
            yield from found_at(one, path[1:], name)
    else:
        yield from found_at(document[path[0]], path[1:], where)


def read(name: str, text: str | None = None) -> Manifest:
    text = (YAMLS / name).read_text() if text is None else text
    return Manifest(name, text, list(yaml.load_all(text, Loader=_Loader)))


def variables(container: Any) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "") for variable in container.get("env", [])}


def words(container: Any) -> list[str]:
    return [*container.get("command", []), *container.get("args", [])]


def is_elastic(manifest: Manifest) -> bool:
    """It goes on while pods are missing."""
    said = [
        word for _, _, container in manifest.containers for word in (*words(container), *variables(container).values())
    ]
    return "elasticPolicy" in manifest.job.get("spec", {}) or any(re.search(r"(^|=)\d+:\d+$", word) for word in said)


# Each validation reads the definitions of a version again, some megabytes of them.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)


def fits_the_schemas(manifest: Manifest, versions: list[str] = VERSIONS) -> list[str]:
    """Kubernetes knows each field and each type, also those of the pods that an operator makes."""
    parts = []
    for document in manifest.documents:
        if BUILT_IN.fullmatch(document["apiVersion"]):
            parts.append(document)
        elif document["kind"] in TEMPLATES:
            pods = found_at(document, TEMPLATES[document["kind"]].split("."))
            parts += [{"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": pod["spec"]} for _, pod in pods]
    wrong = []
    for part in parts:
        for version in versions:
            try:
                kubernetes_validate.validate(part, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                wrong.append(f"{version}: {'.'.join(map(str, error.absolute_path))}: {error.message}")
    return wrong


def fits_the_published_schema(manifest: Manifest) -> list[str]:
    """The operator knows each field and each type of its own jobs."""
    theirs = [one for one in manifest.documents if not BUILT_IN.fullmatch(one["apiVersion"])]
    if theirs and (why := published_schemas.why_not()):
        pytest.skip(f"LOUD: {why}")
    wrong = []
    for document in theirs:
        try:
            wrong += published_schemas.problems(document)
        except LookupError as error:
            wrong.append(str(error))
    return wrong


def fits_the_operator(manifest: Manifest) -> list[str]:
    """What the controllers ask for and no schema says."""
    wrong = []
    for where, pod in manifest.pods.items():
        wanted = CONTAINERS.get(manifest.kind)
        if wanted and [container["name"] for container in pod["containers"]] != [wanted]:
            wrong.append(f"{where}: no container of the name that the operator looks for")
    for where, spec in manifest.replicas.items():
        if spec["restartPolicy"] not in ("Always", "ExitCode", "Never", "OnFailure"):
            wrong.append(f"{where}: restartPolicy {spec['restartPolicy']}")
        if "restartPolicy" in manifest.pods[where]:
            wrong.append(f"{where}: the operator overwrites the pod's restartPolicy")
        if spec["replicas"] < 1 or (where == "Master" and spec["replicas"] > 1):
            wrong.append(f"{where}: {spec['replicas']} replicas")
        if where not in ("Master", "Worker"):
            wrong.append(f"{where}: the operator has no such replicas")
    if manifest.kind == "PyTorchJob" and (set(manifest.replicas) == {"Worker"}) != is_elastic(manifest):
        wrong.append("an elastic job has Workers only, any other one a Master too")
    if manifest.job and not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", manifest.job["metadata"]["name"]):
        wrong.append("the name is none of a Service")
    if manifest.kind == "TrainingRuntime":
        labels = manifest.job["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["metadata"]["labels"]
        if labels.get("trainer.kubeflow.org/trainjob-ancestor-step") != "trainer":
            wrong.append("nothing says that these pods train")
        reference = {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "TrainingRuntime",
            "name": manifest.job["metadata"]["name"],
        }
        if [one["spec"]["runtimeRef"] for one in manifest.of_kind("TrainJob")] != [reference]:
            wrong.append("no TrainJob uses the runtime")
    if manifest.kind == "StatefulSet":
        spec = manifest.job["spec"]
        if spec["selector"]["matchLabels"] != spec["template"]["metadata"]["labels"]:
            wrong.append("the selector does not find the pods")
        if spec["serviceName"] not in [one["metadata"]["name"] for one in manifest.of_kind("Service")]:
            wrong.append(f"there is no Service {spec['serviceName']}")
        if spec.get("podManagementPolicy") != "Parallel":
            wrong.append("a pod is started when the one before is ready, and that one waits for all")
    if manifest.kind == "Job" and manifest.job["spec"].get("completionMode") == "Indexed":
        spec = manifest.job["spec"]
        if spec["completions"] != spec["parallelism"]:
            wrong.append("not all pods run at once")
    return wrong


def starts_again_after_a_loss(manifest: Manifest) -> list[str]:
    """Each container that left after a signal is started again, and none beside the one that still saves."""
    left_with = settings.read({}, {}).exit_code
    has_agent = any(words(container)[0] in AGENTS for _, _, container in manifest.containers)
    # The agent makes 1 of the code its ranks left with.
    code = 1 if has_agent else left_with
    wrong = []
    for where, spec in manifest.replicas.items():
        if spec["restartPolicy"] == "Never" or (spec["restartPolicy"] == "ExitCode" and code < 128):
            wrong.append(f"{where}: {spec['restartPolicy']} does not start a container again that ended with {code}")
    if manifest.kind == "StatefulSet" and manifest.pods["pod"].get("restartPolicy", "Always") != "Always":
        wrong.append("a StatefulSet has restartPolicy Always")
    if manifest.kind == "ElasticJob" and manifest.job["spec"]["replicaSpecs"]["worker"].get("restartCount", 0) < 50:
        wrong.append("a long training may lose more pods than restartCount")
    if spec := manifest.batch_job:
        pods = list(manifest.pods.values())
        if {pod.get("restartPolicy") for pod in pods} != {"Never"}:
            wrong.append("podFailurePolicy needs restartPolicy: Never")
        if spec.get("podReplacementPolicy") != "Failed":
            wrong.append("the new pod starts beside the old one; and podFailurePolicy allows nothing but Failed")
        if spec.get("backoffLimit", 6) < (500 if has_agent else 50):
            wrong.append("a long training may lose more pods than backoffLimit")
        rules = [rule for rule in spec["podFailurePolicy"]["rules"] if rule["action"] == "Ignore"]
        conditions = [one for rule in rules for one in rule.get("onPodConditions", [])]
        if {"type": "DisruptionTarget", "status": "True"} not in conditions:
            wrong.append("a disruption counts as a failure")
        codes = [rule["onExitCodes"] for rule in rules if "onExitCodes" in rule]
        if not has_agent and {"containerName": "train", "operator": "In", "values": [left_with]} not in codes:
            wrong.append(f"the exit code {left_with} counts as a failure")
        if {one.get("containerName") for one in codes} - {c["name"] for pod in pods for c in pod["containers"]}:
            wrong.append("a rule names a container that the pod does not have")
    return wrong


def tells_the_grace(manifest: Manifest) -> list[str]:
    """The process cannot ask how long it has: the variable says what the pod says."""
    return [
        f"{where}: {variables(container).get('MIGRATOR_GRACE_S')!r}, {pod.get('terminationGracePeriodSeconds')!r}"
        for where, pod, container in manifest.containers
        if variables(container).get("MIGRATOR_GRACE_S") != str(pod.get("terminationGracePeriodSeconds"))
        or pod["terminationGracePeriodSeconds"] < 1
    ]


def mounts_what_there_is(manifest: Manifest) -> list[str]:
    """Each mount has its volume, each volume its claim in pvc.yaml, and the ckpts lie on one that outlives the pod."""
    claim = read("pvc.yaml").documents[0]["metadata"]["name"]
    wrong = []
    for where, pod, container in manifest.containers:
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", [])}
        wrong += [f"{where}: no volume {name!r}" for name in mounts.values() if name not in volumes]
        wrong += [f"{where}: nobody mounts {name!r}" for name in volumes if name not in mounts.values()]
        claims = {name: volume.get("persistentVolumeClaim", {}).get("claimName") for name, volume in volumes.items()}
        wrong += [f"{where}: there is no claim {name!r}" for name in claims.values() if name not in (None, claim)]
        env = variables(container)
        root = env.get("MIGRATOR_CKPT") or str(Path(env.get("MIGRATION_CKPT_PATH", "")).parent)
        if claims.get(mounts.get(root, "")) != claim:
            wrong.append(f"{where}: MIGRATOR_CKPT={root} is on no claim")
        for word in words(container):
            if word.startswith("--weights=") and not word.startswith("--weights=$(MIGRATOR_CKPT)/"):
                wrong.append(f"{where}: the result is lost with the pod, or it is not in S3 with the ckpts: {word}")
    return wrong


def has_places_of_its_own(manifest: Manifest) -> list[str]:
    """The signal file, temporary files and shared memory are on volumes of this pod, which it can write."""
    wrong = []
    for where, pod, container in manifest.containers:
        empty = {volume["name"]: volume["emptyDir"] for volume in pod.get("volumes", []) if "emptyDir" in volume}
        mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", [])}
        env = variables(container)
        signal = env.get("MIGRATOR_SIGNAL") or env.get("MIGRATION_SIGNAL_PATH", "")
        if mounts.get(str(Path(signal).parent)) not in empty:
            wrong.append(f"{where}: the signal file {signal!r} is on no emptyDir")
        if mounts.get("/tmp") not in empty or env.get("HOME") != "/tmp":
            wrong.append(f"{where}: no place for temporary files")
        if empty.get(mounts.get("/dev/shm", ""), {}).get("medium") != "Memory":
            wrong.append(f"{where}: loader workers have 64 MiB of /dev/shm")
        wrong += [f"{where}: {name} may fill the node" for name, one in empty.items() if "sizeLimit" not in one]
    return wrong


def runs_the_hooks(manifest: Manifest) -> list[str]:
    """Both, on each container that trains, from the ConfigMap that kustomize makes of hooks/."""
    generated = yaml.safe_load((ROOT / "hooks" / "kustomization.yaml").read_text())["configMapGenerator"]
    files = {one["name"]: one["files"] for one in generated}
    wrong = []
    for where, pod, container in manifest.containers:
        maps = {v["name"]: v["configMap"]["name"] for v in pod.get("volumes", []) if "configMap" in v}
        mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", [])}
        there = files.get(maps.get(mounts.get("/hooks", ""), ""), [])
        for hook, script in zip(("preStop", "postStart"), SCRIPTS, strict=True):
            command = container.get("lifecycle", {}).get(hook, {}).get("exec", {}).get("command")
            if command != ["sh", f"/hooks/{script}"] or script not in there or not (ROOT / "hooks" / script).is_file():
                wrong.append(f"{where}: {hook} is {command}, and the ConfigMap has {there}")
    return wrong


def runs_an_example(manifest: Manifest) -> list[str]:
    """The script is in the image, takes these arguments, and no shell stands between it and SIGTERM."""
    image = (ROOT / "examples" / "Dockerfile").read_text()
    wrong = []
    for where, _, container in manifest.containers:
        said = words(container)
        scripts = [word for word in said if word.endswith(".py")]
        if said[0] not in ("python", *AGENTS) or len(scripts) != 1 or not scripts[0].startswith("/app/"):
            wrong.append(f"{where}: {said}")
            continue
        example = ROOT / "examples" / scripts[0].removeprefix("/app/")
        if not example.is_file():
            wrong.append(f"{where}: there is no {example.name} in examples/")
            continue
        if not re.search(rf"^COPY .*examples/{re.escape(example.name)} .*/app/$", image, re.M):
            wrong.append(f"{where}: {example.name} is not in the image")
        taken = re.findall(r"add_argument\(\s*\"(--[\w-]+)\"", example.read_text())
        given = [word.partition("=")[0] for word in said[said.index(scripts[0]) + 1 :]]
        wrong += [f"{where}: {example.name} takes no {option}" for option in given if option not in taken]
        if container["image"] != "your-registry/train:latest":
            wrong.append(f"{where}: yamls/kustomization.yaml changes the name your-registry/train")
    return wrong


def sets_what_exists(manifest: Manifest) -> list[str]:
    """Each variable of ours is one that the trainer or the hooks read, with a value that is allowed."""
    known = {f.metadata["variable"] for f in fields(settings.Settings) if f.metadata}
    known |= settings.HOOK_VARIABLES | settings.ALIASES.keys()
    wrong = []
    for where, _, container in manifest.containers:
        ours = {name: value for name, value in variables(container).items() if name.startswith("MIGRAT")}
        wrong += [f"{where}: {name} is no variable of ours" for name in sorted(ours.keys() - known)]
        if ours.get("MIGRATOR_JOB") != manifest.job["metadata"]["name"]:
            wrong.append(f"{where}: the job has another name for its ckpts; two jobs could share one")
        try:
            settings.read({}, {name: value for name, value in ours.items() if name in known})
        except SettingsError as error:
            wrong.append(f"{where}: {error}")
    return wrong


def has_restarts_where_they_help(manifest: Manifest) -> list[str]:
    """torchrun's own keep the pods that stay; with a static rendezvous they only help the pod that goes."""
    wrong = []
    for where, _, container in manifest.containers:
        said, env = words(container), variables(container)
        if said[0] not in AGENTS:
            continue
        policy = manifest.job["spec"].get("elasticPolicy", {})
        given = [word.partition("=")[2] for word in said if word.startswith("--max-restarts=")]
        given += [str(value) for value in (env.get("PET_MAX_RESTARTS"), policy.get("maxRestarts")) if value is not None]
        meets = env.get("PET_RDZV_BACKEND") == "c10d" or policy.get("rdzvBackend") == "c10d"
        if meets or said[0] == "dlrover-run":
            if not given or int(given[0]) < 100:
                wrong.append(f"{where}: the restarts of the agents run out: {given}")
            if env.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
                wrong.append(f"{where}: ranks that are restarted may meet those before them")
        elif given:
            wrong.append(f"{where}: torchrun starts ranks again by itself")
        elif manifest.kind == "PyTorchJob" and not re.fullmatch(
            r"[1-9]\d*", str(manifest.job["spec"].get("nprocPerNode"))
        ):
            wrong.append(f"{where}: nobody says how many ranks a pod has")
    return wrong


def finds_its_peers(manifest: Manifest) -> list[str]:
    """torchrun's rendezvous is a Service of that name, which leads to pod 0, whose host name it is too."""
    wrong = []
    for where, _, container in manifest.containers:
        env = variables(container)
        if "PET_RDZV_ENDPOINT" not in env:
            continue
        host, _, port = env["PET_RDZV_ENDPOINT"].partition(":")
        if host != f"{manifest.job['metadata']['name']}-0":
            wrong.append(f"{where}: {host} is not the host name of pod 0")
        services = [one for one in manifest.of_kind("Service") if one["metadata"]["name"] == host]
        if [str(one["port"]) for service in services for one in service["spec"]["ports"]] != [port]:
            wrong.append(f"{where}: no Service {host} with the port {port}")
        if [str(one["containerPort"]) for one in container.get("ports", [])] != [port]:
            wrong.append(f"{where}: the container has another port than {port}")
        name = manifest.job["metadata"]["name"]
        zero = {
            "Job": {"job-name": name, "batch.kubernetes.io/job-completion-index": "0"},
            "StatefulSet": {"statefulset.kubernetes.io/pod-name": f"{name}-0"},
        }[manifest.kind]
        for service in services:
            if service["spec"]["selector"] != zero or not service["spec"].get("publishNotReadyAddresses"):
                wrong.append(f"the Service {host} does not lead to pod 0, or only when it is ready")
        count = manifest.job["spec"].get("completions") or manifest.job["spec"].get("replicas")
        if env.get("PET_NNODES", "").rpartition(":")[2] != str(count):
            wrong.append(f"{where}: torchrun expects {env.get('PET_NNODES')} pods of {count}")
        sources = {
            one["name"]: one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath") for one in container["env"]
        }
        if sources.get("PET_LOCAL_ADDR") != "status.podIP":
            wrong.append(f"{where}: ranks are looked for by a name that only pod 0 has")
    return wrong


def lets_the_ranks_have_the_grace(manifest: Manifest) -> list[str]:
    """torchrun has a time of its own between SIGTERM and SIGKILL, 30 s unless it is told."""
    wrong = []
    for where, pod, container in manifest.containers:
        told = variables(container).get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
        if words(container)[0] in AGENTS and told != str(pod.get("terminationGracePeriodSeconds")):
            wrong.append(f"{where}: torchrun kills the ranks after {told} s")
    return wrong


def is_locked_down(manifest: Manifest) -> list[str]:
    """What the Pod Security Standard `restricted` asks for, a read-only root, and a group that may write the volume."""
    wrong = []
    for where, pod, container in manifest.containers:
        of_pod, of_container = pod.get("securityContext", {}), container.get("securityContext", {})
        wanted = {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000}
        wanted |= {"fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"}}
        if of_pod != wanted:
            wrong.append(f"{where}: the pod's securityContext is {of_pod}")
        wanted = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        if of_container != wanted:
            wrong.append(f"{where}: the container's securityContext is {of_container}")
        shared = [key for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key)]
        wrong += [f"{where}: {key}" for key in shared]
    return wrong


def has_room(manifest: Manifest) -> list[str]:
    """Memory that is requested is what is allowed, with a word on the periodic copy; and a line for GPUs to turn on."""
    wrong = []
    for where, _, container in manifest.containers:
        resources = container.get("resources", {})
        memory = resources.get("limits", {}).get("memory")
        if not memory or memory != resources.get("requests", {}).get("memory") or "cpu" not in resources["requests"]:
            wrong.append(f"{where}: resources are {resources}")
    if manifest.pods and not re.search(
        r"the size of its state once more: a periodic save(.|\n)*# nvidia.com/gpu: 1$", manifest.text, re.M
    ):
        wrong.append("nothing says what a periodic save takes, or where GPUs are asked for")
    return wrong


def says_why_it_ended(manifest: Manifest) -> list[str]:
    """An error before `listening()` is in the pod's status, too."""
    return [
        f"{where}: {container.get('terminationMessagePolicy')}"
        for where, _, container in manifest.containers
        if container.get("terminationMessagePolicy") != "FallbackToLogsOnError"
    ]


def gives_way(manifest: Manifest) -> list[str]:
    """A budget where the job goes on with fewer pods, and a reason where there is none; a priority class to turn on."""
    if not manifest.pods:
        return []
    wrong = []
    name = read("priorityclass.yaml").documents[0]["metadata"]["name"]
    if f"# priorityClassName: {name} #" not in manifest.text and f"# priority: {name} #" not in manifest.text:
        wrong.append("no line for the priority class")
    budgets = manifest.of_kind("PodDisruptionBudget")
    if len(budgets) != is_elastic(manifest):
        wrong.append(f"{len(budgets)} budgets; each drain would interrupt all pods once more, or end the last of them")
    for budget in budgets:
        spec, job = budget["spec"], manifest.job["metadata"]["name"]
        labels = next(iter(manifest.templates.values())).get("metadata", {}).get("labels", {})
        own = {LABELS[manifest.kind]: job} if manifest.kind in LABELS else labels
        if not own.items() <= spec["selector"]["matchLabels"].items():
            wrong.append(f"the budget is for other pods: {spec['selector']}")
        # The API server takes no maxUnavailable for pods of a custom resource.
        if not isinstance(spec.get("minAvailable"), int) or spec.get("unhealthyPodEvictionPolicy") != "AlwaysAllow":
            wrong.append(f"the budget may keep a node from being drained for good: {spec}")
        replicas = sum(one["replicas"] for _, one in found_at(manifest.job, COUNTS[manifest.kind].split(".")))
        if spec.get("minAvailable", 0) >= replicas:
            wrong.append("the budget allows nothing")
    return wrong


COUNTS = {
    "StatefulSet": "spec",
    "PyTorchJob": "spec.pytorchReplicaSpecs.*",
    "ElasticJob": "spec.replicaSpecs.*",
}
"""What has the field `replicas`, in kinds that go on with fewer pods."""


def says_how_to_use_it(manifest: Manifest) -> list[str]:
    """The file opens with a comment: the commands to apply and to delete it, of files that exist."""
    head = "".join(line for line in manifest.text.splitlines(keepends=True) if line.startswith("#"))
    wrong = []
    if not manifest.text.startswith("# "):
        wrong.append("no comment at the top")
    applied = re.search(r"^#   kubectl apply -f .*$", head, flags=re.M)
    if not applied or f"yamls/{manifest.name}" not in applied[0]:
        wrong.append("nothing says how to apply it")
    if manifest.pods and "#   kubectl apply -k hooks " not in head:
        wrong.append("nothing says where the hooks come from")
    if "#   kubectl delete " not in head:
        wrong.append("nothing says what happens on delete")
    named = re.findall(r"(?:yamls|examples|hooks)/[\w.-]*\w", manifest.text)
    named = [path for path in named if f"/{path}" not in manifest.text]
    return wrong + [f"{path} does not exist" for path in named if not (ROOT / path).exists()]


RULES: list[Callable[[Manifest], list[str]]] = [
    fits_the_schemas,
    fits_the_published_schema,
    fits_the_operator,
    starts_again_after_a_loss,
    tells_the_grace,
    mounts_what_there_is,
    has_places_of_its_own,
    runs_the_hooks,
    runs_an_example,
    sets_what_exists,
    has_restarts_where_they_help,
    finds_its_peers,
    lets_the_ranks_have_the_grace,
    is_locked_down,
    has_room,
    says_why_it_ended,
    gives_way,
    says_how_to_use_it,
]


@each_file
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_each_manifest_keeps_each_rule(name: str, rule: Callable[[Manifest], list[str]]) -> None:
    """What a rule asks for is its docstring."""
    assert rule(read(name)) == []


def test_the_schemas_of_several_versions_are_compared() -> None:
    """An empty list of versions would be fine with anything."""
    assert len(VERSIONS) >= 5


def test_there_is_no_other_file() -> None:
    """The rules above see all of them."""
    assert sorted(path.name for path in YAMLS.iterdir()) == sorted([*NAMES, "kustomization.yaml", "s3"])


def test_each_job_has_its_own_name() -> None:
    """They share a volume: two with one name would go on from each other's ckpts, and overwrite their results."""
    jobs = [read(name) for name in JOBS]
    names = [job.job["metadata"]["name"] for job in jobs]
    results = [
        {word for _, _, container in job.containers for word in words(container) if ")/" in word} for job in jobs
    ]
    assert len(set(names)) == len(names)
    written = [result for result in results if result]
    assert len({result for one in written for result in one}) == len(written) == len(jobs) - 1


def test_the_volume_can_be_mounted_by_pods_on_several_nodes() -> None:
    """Most of the jobs have several pods."""
    assert "ReadWriteMany" in read("pvc.yaml").documents[0]["spec"]["accessModes"]


BREAKS: list[tuple[Callable[[Manifest], list[str]], str, str, str]] = [
    (fits_the_schemas, "pvc.yaml", "accessModes", "accesModes"),
    (fits_the_schemas, "pvc.yaml", "storage: 20Gi", "storage: [20]"),
    (fits_the_schemas, "priorityclass.yaml", "value: -100", "priority: -100"),
    (fits_the_schemas, "job.yaml", "backoffLimit: 100", "backoffLimits: 100"),
    (fits_the_schemas, "job.yaml", "- action: Ignore", "- actions: Ignore"),
    (fits_the_schemas, "job.yaml", 'value: "30"', "value: 30"),
    (fits_the_schemas, "job.yaml", "      restartPolicy: Never", "      restartPolicies: Never"),
    (fits_the_schemas, "indexed-job.yaml", "publishNotReadyAddresses", "publishUnreadyAddresses"),
    (fits_the_schemas, "statefulset.yaml", "minAvailable: 2", "minAvailables: 2"),
    (fits_the_schemas, "pytorchjob.yaml", "mountPath: /ckpts", "path: /ckpts"),
    (fits_the_schemas, "pytorchjob.yaml", "template: *pod", "template: {spec: {containers: [{image: x}]}}"),
    (fits_the_schemas, "torchrun.yaml", "preStop:", "prestop:"),
    (fits_the_schemas, "trainjob.yaml", "sizeLimit: 2Gi", "limit: 2Gi"),
    (fits_the_schemas, "elasticjob.yaml", "fsGroup: 1000", "fsgroup: 1000"),
    (fits_the_published_schema, "pytorchjob.yaml", "kubeflow.org/v1\n", "kubeflow.org/v2\n"),
    (fits_the_published_schema, "pytorchjob.yaml", "pytorchReplicaSpecs:", "restarts: 3\n  pytorchReplicaSpecs:"),
    (fits_the_published_schema, "torchrun.yaml", 'nprocPerNode: "2"', "nprocPerNode: 2"),
    (fits_the_published_schema, "torchrun.yaml", "nprocPerNode:", "procsPerNode:"),
    (fits_the_published_schema, "elastic-pytorchjob.yaml", "rdzvBackend:", "rendezvousBackend:"),
    (fits_the_published_schema, "elastic-pytorchjob.yaml", 'value: "600"', "value: 600"),
    (fits_the_published_schema, "pytorchjob-migration.yaml", "annotations:", "annotation:"),
    (fits_the_published_schema, "trainjob.yaml", "numProcPerNode: 1", 'numProcPerNode: "1"'),
    (fits_the_published_schema, "trainjob.yaml", "replicatedJobs:", "replicas:"),
    (fits_the_published_schema, "trainjob.yaml", "runtimeRef:", "runtime:"),
    (fits_the_published_schema, "kubedl.yaml", "  cleanPodPolicy:", "  enableElastic: true\n  cleanPodPolicy:"),
    (fits_the_published_schema, "elasticjob.yaml", "restartCount: 100", 'restartCount: "100"'),
    (fits_the_operator, "pytorchjob.yaml", "    Worker:", "    Helper:"),
    (fits_the_operator, "pytorchjob.yaml", "name: pytorch ", "name: train "),
    (fits_the_operator, "pytorchjob.yaml", "replicas: 1", "replicas: 2"),
    (fits_the_operator, "pytorchjob.yaml", "name: train-ddp\n", "name: 1-train\n"),
    (fits_the_operator, "pytorchjob.yaml", "restartPolicy: OnFailure\n", "restartPolicy: OnExitCode\n"),
    (fits_the_operator, "torchrun.yaml", "        spec:\n", "        spec:\n          restartPolicy: Never\n"),
    (fits_the_operator, "elastic-pytorchjob.yaml", "    Worker:", "    Master:"),
    (fits_the_operator, "trainjob.yaml", "trainjob-ancestor-step: trainer", "trainjob-ancestor-step: node"),
    (fits_the_operator, "trainjob.yaml", "name: train-job}", "name: another}"),
    (fits_the_operator, "trainjob.yaml", "name: node # the", "name: train # the"),
    (fits_the_operator, "elasticjob.yaml", "name: main ", "name: pytorch "),
    (fits_the_operator, "statefulset.yaml", "serviceName: train-set-0", "serviceName: train-set"),
    (fits_the_operator, "statefulset.yaml", "labels: {app: train-set}", "labels: {app: another}"),
    (fits_the_operator, "statefulset.yaml", "podManagementPolicy: Parallel", "podManagementPolicy: OrderedReady"),
    (fits_the_operator, "indexed-job.yaml", "parallelism: 3", "parallelism: 2"),
    (starts_again_after_a_loss, "job.yaml", "restartPolicy: Never\n", "restartPolicy: OnFailure\n"),
    (starts_again_after_a_loss, "job.yaml", "Policy: Failed", "Policy: TerminatingOrFailed"),
    (starts_again_after_a_loss, "job.yaml", "backoffLimit: 100", "backoffLimit: 6"),
    (starts_again_after_a_loss, "job.yaml", "type: DisruptionTarget", "type: Ready"),
    (starts_again_after_a_loss, "job.yaml", "values: [143]", "values: [137]"),
    (starts_again_after_a_loss, "job.yaml", "containerName: train", "containerName: main"),
    (starts_again_after_a_loss, "indexed-job.yaml", "backoffLimit: 1000", "backoffLimit: 100"),
    (starts_again_after_a_loss, "indexed-job.yaml", "Policy: Failed", "Policy: TerminatingOrFailed"),
    (starts_again_after_a_loss, "trainjob.yaml", "backoffLimit: 1000", "backoffLimit: 3"),
    (starts_again_after_a_loss, "trainjob.yaml", "restartPolicy: Never\n", "restartPolicy: OnFailure\n"),
    (starts_again_after_a_loss, "statefulset.yaml", "restartPolicy: Always", "restartPolicy: OnFailure"),
    (starts_again_after_a_loss, "elasticjob.yaml", "restartCount: 100", "restartCount: 3"),
    (starts_again_after_a_loss, "pytorchjob.yaml", "restartPolicy: OnFailure #", "restartPolicy: Never #"),
    (starts_again_after_a_loss, "torchrun.yaml", "restartPolicy: OnFailure", "restartPolicy: ExitCode"),
    (starts_again_after_a_loss, "elastic-pytorchjob.yaml", "restartPolicy: OnFailure", "restartPolicy: ExitCode"),
    (starts_again_after_a_loss, "kubedl.yaml", "restartPolicy: OnFailure #", "restartPolicy: Never #"),
    (tells_the_grace, "job.yaml", 'value: "30"', 'value: "60"'),
    (tells_the_grace, "job.yaml", "terminationGracePeriodSeconds: 30", "terminationGracePeriodSeconds: 300"),
    (tells_the_grace, "pytorchjob.yaml", "MIGRATOR_GRACE_S", "MIGRATOR_GRACE"),
    (tells_the_grace, "torchrun.yaml", "terminationGracePeriodSeconds: 60", "hostIPC: true"),
    (tells_the_grace, "trainjob.yaml", "terminationGracePeriodSeconds: 60", "terminationGracePeriodSeconds: 45"),
    (mounts_what_there_is, "job.yaml", "claimName: ckpts", "claimName: ckpt"),
    (mounts_what_there_is, "job.yaml", "- name: ckpts", "- name: volume"),
    (mounts_what_there_is, "job.yaml", "persistentVolumeClaim: {claimName: ckpts}", "emptyDir: {}"),
    (mounts_what_there_is, "job.yaml", "value: /ckpts}", "value: /data}"),
    (mounts_what_there_is, "pytorchjob.yaml", "mountPath: /ckpts", "mountPath: /data"),
    (mounts_what_there_is, "torchrun.yaml", "--weights=$(MIGRATOR_CKPT)/", "--weights="),
    (mounts_what_there_is, "pytorchjob-migration.yaml", "/ckpts/migration.pth", "/migration.pth"),
    (has_places_of_its_own, "job.yaml", "value: /run/migrator/signal", "value: /ckpts/signal"),
    (has_places_of_its_own, "job.yaml", "mountPath: /tmp}", "mountPath: /var/tmp}"),
    (has_places_of_its_own, "statefulset.yaml", "mountPath: /dev/shm", "mountPath: /shm"),
    (has_places_of_its_own, "kubedl.yaml", "medium: Memory, sizeLimit: 512Mi", "sizeLimit: 512Mi"),
    (has_places_of_its_own, "trainjob.yaml", "{sizeLimit: 2Gi}", "{}"),
    (has_places_of_its_own, "pytorchjob-migration.yaml", "/run/migrator/signal", "/ckpts/signal"),
    (runs_the_hooks, "job.yaml", "/hooks/preStop.sh", "/hooks/prestop.sh"),
    (runs_the_hooks, "job.yaml", '{command: ["sh", "/hooks/preStop.sh"]}', "{command: []}"),
    (runs_the_hooks, "job.yaml", "postStart: #", "preStart: #"),
    (runs_the_hooks, "pytorchjob.yaml", "template: *pod", "template: {spec: {containers: [{name: pytorch}]}}"),
    (runs_the_hooks, "torchrun.yaml", "name: migrator-hooks", "name: hooks"),
    (runs_the_hooks, "elasticjob.yaml", "mountPath: /hooks", "mountPath: /hook"),
    (runs_an_example, "job.yaml", "/app/plain.py", "/app/plane.py"),
    (runs_an_example, "job.yaml", '["python", "/app/plain.py"]', '["sh", "-c", "python /app/plain.py"]'),
    (runs_an_example, "job.yaml", "--epochs=30", "--epoch=30"),
    (runs_an_example, "job.yaml", "/app/plain.py", "/app/elastic.py"),
    (runs_an_example, "job.yaml", "your-registry/train:latest", "your-registry/job:latest"),
    (sets_what_exists, "job.yaml", "MIGRATOR_JOB", "MIGRATOR_NAME"),
    (sets_what_exists, "job.yaml", "value: train}", "value: train-ddp}"),
    (sets_what_exists, "pytorchjob.yaml", 'value: "60"', 'value: "1m"'),
    (sets_what_exists, "torchrun.yaml", "MIGRATOR_CKPT", "MIGRATOR_CKPTS"),
    (has_restarts_where_they_help, "torchrun.yaml", '"torchrun", ', '"torchrun", "--max-restarts=3", '),
    (has_restarts_where_they_help, "torchrun.yaml", 'nprocPerNode: "2"', 'nprocPerNode: "auto"'),
    (has_restarts_where_they_help, "indexed-job.yaml", "PET_MAX_RESTARTS", "MAX_RESTARTS"),
    (has_restarts_where_they_help, "statefulset.yaml", 'value: "1000"', 'value: "3"'),
    (has_restarts_where_they_help, "elastic-pytorchjob.yaml", "maxRestarts: 1000", "maxRestarts: 3"),
    (has_restarts_where_they_help, "elasticjob.yaml", "--max-restarts=1000", "--max-restarts=3"),
    (has_restarts_where_they_help, "elasticjob.yaml", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "STORE"),
    (finds_its_peers, "indexed-job.yaml", '"train-indexed-0:29400"', '"train-indexed:29400"'),
    (finds_its_peers, "indexed-job.yaml", 'job-completion-index: "0"', 'job-completion-index: "1"'),
    (finds_its_peers, "indexed-job.yaml", "port: 29400", "port: 29500"),
    (finds_its_peers, "indexed-job.yaml", "containerPort: 29400", "containerPort: 29500"),
    (finds_its_peers, "indexed-job.yaml", 'PET_NNODES, value: "3"', 'PET_NNODES, value: "2"'),
    (finds_its_peers, "statefulset.yaml", "replicas: 3", "replicas: 4"),
    (finds_its_peers, "statefulset.yaml", "publishNotReadyAddresses: true", "publishNotReadyAddresses: false"),
    (finds_its_peers, "statefulset.yaml", "status.podIP", "metadata.name"),
    (lets_the_ranks_have_the_grace, "torchrun.yaml", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "SHUTDOWN_TIMEOUT"),
    (lets_the_ranks_have_the_grace, "torchrun.yaml", "PeriodSeconds: 60", "PeriodSeconds: 90"),
    (lets_the_ranks_have_the_grace, "elasticjob.yaml", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "SHUTDOWN_TIMEOUT"),
    (is_locked_down, "job.yaml", "runAsNonRoot: true", "runAsNonRoot: false"),
    (is_locked_down, "job.yaml", "readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false"),
    (is_locked_down, "statefulset.yaml", "fsGroup: 1000", "fsGroup: 0"),
    (
        is_locked_down,
        "pytorchjob-migration.yaml",
        "          containers:",
        "          hostIPC: true\n          containers:",
    ),
    (has_room, "job.yaml", "memory: 2Gi}", "memory: 1Gi}"),
    (has_room, "job.yaml", "# nvidia.com/gpu: 1", ""),
    (has_room, "trainjob.yaml", "a periodic save copies it", "with room"),
    (says_why_it_ended, "job.yaml", "FallbackToLogsOnError", "File"),
    (says_why_it_ended, "kubedl.yaml", "terminationMessagePolicy: FallbackToLogsOnError", "tty: false"),
    (gives_way, "job.yaml", "# priorityClassName: preemptible-training", "# priorityClassName: batch"),
    (gives_way, "statefulset.yaml", "minAvailable: 2", "minAvailable: 3"),
    (gives_way, "statefulset.yaml", "minAvailable: 2", "maxUnavailable: 1"),
    (gives_way, "statefulset.yaml", 'PET_NNODES, value: "2:3"', 'PET_NNODES, value: "3"'),
    (gives_way, "statefulset.yaml", "matchLabels: {app: train-set}", "matchLabels: {app: train}"),
    (gives_way, "elastic-pytorchjob.yaml", "job-name: train-elastic", "job-name: train"),
    (gives_way, "elastic-pytorchjob.yaml", "AlwaysAllow", "IfHealthyBudget"),
    (gives_way, "elasticjob.yaml", "kind: PodDisruptionBudget", "kind: ConfigMap"),
    (says_how_to_use_it, "pvc.yaml", "kubectl apply -f yamls/pvc.yaml", "kubectl apply"),
    (says_how_to_use_it, "job.yaml", "#   kubectl delete", "#   delete"),
    (says_how_to_use_it, "job.yaml", "#   kubectl apply -k hooks", "#   apply hooks"),
    (says_how_to_use_it, "job.yaml", "# One pod", "\n# One pod"),
    (says_how_to_use_it, "job.yaml", "-f yamls/pvc.yaml", "-f yamls/volume.yaml"),
]


@pytest.mark.parametrize(("rule", "name", "old", "new"), BREAKS)
def test_each_rule_finds_what_is_broken(
    rule: Callable[[Manifest], list[str]], name: str, old: str, new: str, tmp_path: Path
) -> None:
    """A rule that finds nothing in a broken copy would keep nobody from breaking the file."""
    copy = tmp_path / name
    copy.write_text((YAMLS / name).read_text().replace(old, new))
    assert copy.read_text() != (YAMLS / name).read_text()

    assert rule(read(name, copy.read_text())) != []


def test_a_key_given_twice_is_found() -> None:
    """kubectl refuses it; read leniently the first of the two would vanish."""
    with pytest.raises(yaml.constructor.ConstructorError, match="twice"):
        read("job.yaml", read("job.yaml").text.replace("  template:", "  suspend: true\n  suspend: true\n  template:"))


def test_each_rule_is_broken_somewhere() -> None:
    """The list of breaks knows all rules."""
    assert {rule.__name__ for rule, *_ in BREAKS} == {rule.__name__ for rule in RULES}
