"""The manifests in yamls/ are what Kubernetes takes, and what the code and the examples mean.

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
from tests.support.harness import ROOT

YAMLS = ROOT / "yamls"
NAMES = ["job.yaml", "pvc.yaml", "pytorchjob.yaml", "torchrun.yaml"]
# The oldest whose podReplacementPolicy is on by default, and all that came after it.
VERSIONS = [version for version in map(major_minor, all_versions()) if int(version.split(".")[1]) >= 29]

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
    """One file: its text, and the one document in it."""

    name: str
    text: str
    document: Any

    @property
    def kind(self) -> str:
        return str(self.document["kind"])

    @property
    def replicas(self) -> dict[str, Any]:
        return dict(self.document["spec"]["pytorchReplicaSpecs"]) if self.kind == "PyTorchJob" else {}

    @property
    def pods(self) -> dict[str, Any]:
        """The spec of each kind of pod that is made of it."""
        if self.kind == "PyTorchJob":
            return {replica: spec["template"]["spec"] for replica, spec in self.replicas.items()}
        return {"pod": self.document["spec"]["template"]["spec"]} if self.kind == "Job" else {}

    @property
    def containers(self) -> Iterator[tuple[str, Any, Any]]:
        """Where it is, its pod, and the container. Each of them trains."""
        for where, pod in self.pods.items():
            for container in pod["containers"]:
                yield f"{where}/{container['name']}", pod, container


def read(name: str, text: str | None = None) -> Manifest:
    text = (YAMLS / name).read_text() if text is None else text
    return Manifest(name, text, yaml.load(text, Loader=_Loader))


def variables(container: Any) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container.get("env", [])}


def words(container: Any) -> list[str]:
    return [*container.get("command", []), *container.get("args", [])]


# Each validation reads the definitions of a version again, some megabytes of them.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)


def fits_the_schemas(manifest: Manifest, versions: list[str] = VERSIONS) -> list[str]:
    """Kubernetes knows each field and each type, also those of the pods that an operator makes."""
    parts = [manifest.document]
    if manifest.kind == "PyTorchJob":
        parts = [{"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": pod} for pod in manifest.pods.values()]
    wrong = []
    for part in parts:
        for version in versions:
            try:
                kubernetes_validate.validate(part, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                wrong.append(f"{version}: {'.'.join(map(str, error.absolute_path))}: {error.message}")
    return wrong


def fits_the_operator(manifest: Manifest) -> list[str]:
    """What the training operator refuses: it comes as a resource of its own, which the schemas do not have."""
    if manifest.kind != "PyTorchJob":
        return []
    document, wrong = manifest.document, []
    allowed = {
        "": (document, {"apiVersion", "kind", "metadata", "spec"}),
        "spec": (document["spec"], {"nprocPerNode", "pytorchReplicaSpecs", "runPolicy"}),
        "pytorchReplicaSpecs": (manifest.replicas, {"Master", "Worker"}),
    } | {where: (spec, {"replicas", "restartPolicy", "template"}) for where, spec in manifest.replicas.items()}
    wrong += [f"{where}: {key} is unknown" for where, (part, known) in allowed.items() for key in set(part) - known]
    if document["apiVersion"] != "kubeflow.org/v1":
        wrong.append(f"apiVersion is {document['apiVersion']}")
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", document["metadata"]["name"]):
        wrong.append("the name is none of a Service")
    for where, spec in manifest.replicas.items():
        if spec["restartPolicy"] not in ("Always", "ExitCode", "Never", "OnFailure"):
            wrong.append(f"{where}: restartPolicy {spec['restartPolicy']}")
        if [container["name"] for container in manifest.pods[where]["containers"]] != ["pytorch"]:
            wrong.append(f"{where}: no container of the name that the operator looks for")
        if "restartPolicy" in manifest.pods[where]:
            wrong.append(f"{where}: the operator overwrites the pod's restartPolicy")
        if spec["replicas"] < 1 or (where == "Master" and spec["replicas"] > 1):
            wrong.append(f"{where}: {spec['replicas']} replicas")
    return wrong


def starts_again_after_a_loss(manifest: Manifest) -> list[str]:
    """Each container that left after a signal is started again, and none beside the one that still saves."""
    left_with = settings.read({}, {}).exit_code
    wrong = []
    for where, spec in manifest.replicas.items():
        # It makes 1 of the code its ranks left with.
        code = 1 if words(manifest.pods[where]["containers"][0])[0] == "torchrun" else left_with
        if spec["restartPolicy"] == "Never" or (spec["restartPolicy"] == "ExitCode" and code < 128):
            wrong.append(f"{where}: {spec['restartPolicy']} does not start a container again that ended with {code}")
    if manifest.kind == "Job":
        spec = manifest.document["spec"]
        if manifest.pods["pod"].get("restartPolicy") != "Never":
            wrong.append("podFailurePolicy needs restartPolicy: Never")
        if spec.get("podReplacementPolicy") != "Failed":
            wrong.append("the new pod starts beside the old one; and podFailurePolicy allows nothing but Failed")
        if spec.get("backoffLimit", 6) < 50:
            wrong.append("a long training may lose more pods than backoffLimit")
        rules = [rule for rule in spec["podFailurePolicy"]["rules"] if rule["action"] == "Ignore"]
        conditions = [one for rule in rules for one in rule.get("onPodConditions", [])]
        if {"type": "DisruptionTarget", "status": "True"} not in conditions:
            wrong.append("a disruption counts as a failure")
        codes = [rule["onExitCodes"] for rule in rules if "onExitCodes" in rule]
        if {"containerName": "train", "operator": "In", "values": [left_with]} not in codes:
            wrong.append(f"the exit code {left_with} counts as a failure")
        if {one.get("containerName") for one in codes} - {c["name"] for c in manifest.pods["pod"]["containers"]}:
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
    claim = read("pvc.yaml").document["metadata"]["name"]
    wrong = []
    for where, pod, container in manifest.containers:
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", [])}
        wrong += [f"{where}: no volume {name!r}" for name in mounts.values() if name not in volumes]
        wrong += [f"{where}: nobody mounts {name!r}" for name in volumes if name not in mounts.values()]
        claims = {name: volume.get("persistentVolumeClaim", {}).get("claimName") for name, volume in volumes.items()}
        wrong += [f"{where}: there is no claim {name!r}" for name in claims.values() if name not in (None, claim)]
        root = variables(container).get("MIGRATOR_CKPT")
        if claims.get(mounts.get(root, "")) != claim:
            wrong.append(f"{where}: MIGRATOR_CKPT={root} is on no claim")
        results = [word.partition("=")[2] for word in words(container) if word.startswith("--weights=")]
        if not results or not results[0].startswith(f"{root}/"):
            wrong.append(f"{where}: the result is lost with the pod: {results}")
    return wrong


def runs_the_hooks(manifest: Manifest) -> list[str]:
    """Both, on each container that trains, under the names under which the package puts them into an image."""
    wrong = []
    for where, _, container in manifest.containers:
        for hook, script in zip(("preStop", "postStart"), SCRIPTS, strict=True):
            command = container.get("lifecycle", {}).get(hook, {}).get("exec", {}).get("command")
            if command != ["sh", f"/hooks/{script}"] or not (ROOT / "hooks" / script).is_file():
                wrong.append(f"{where}: {hook} is {command}")
    line = "RUN pip install migrator scikit-learn && python -m migrator.hooks /hooks"
    if manifest.pods and line not in manifest.text:
        wrong.append("nothing says how the hooks get into the image")
    return wrong


def runs_an_example(manifest: Manifest) -> list[str]:
    """The script is there, takes these arguments, and no shell stands between it and SIGTERM."""
    wrong = []
    for where, _, container in manifest.containers:
        said = words(container)
        scripts = [word for word in said if word.endswith(".py")]
        if said[0] not in ("python", "torchrun") or len(scripts) != 1 or not scripts[0].startswith("/app/"):
            wrong.append(f"{where}: {said}")
            continue
        example = ROOT / "examples" / scripts[0].removeprefix("/app/")
        if not example.is_file():
            wrong.append(f"{where}: there is no {example.name} in examples/")
            continue
        if f"COPY examples/{example.name} /app/" not in manifest.text:
            wrong.append(f"{where}: nothing says how {example.name} gets into the image")
        taken = re.findall(r"add_argument\(\s*\"(--[\w-]+)\"", example.read_text())
        given = [word.partition("=")[0] for word in said[said.index(scripts[0]) + 1 :]]
        wrong += [f"{where}: {example.name} takes no {option}" for option in given if option not in taken]
    return wrong


def sets_what_exists(manifest: Manifest) -> list[str]:
    """Each variable of ours is one that the trainer or the hooks read, with a value that is allowed."""
    known = {f.metadata["variable"] for f in fields(settings.Settings) if f.metadata} | settings.HOOK_VARIABLES
    wrong = []
    for where, _, container in manifest.containers:
        ours = {name: value for name, value in variables(container).items() if name.startswith("MIGRAT")}
        wrong += [f"{where}: {name} is no variable of ours" for name in sorted(ours.keys() - known)]
        if ours.get("MIGRATOR_JOB") != manifest.document["metadata"]["name"]:
            wrong.append(f"{where}: the job has another name for its ckpts; two jobs could share one")
        try:
            settings.read({}, {name: value for name, value in ours.items() if name in known})
        except SettingsError as error:
            wrong.append(f"{where}: {error}")
    return wrong


def leaves_restarts_to_the_pod(manifest: Manifest) -> list[str]:
    """torchrun's own would start ranks again in the pod that goes; and it has to be told how many there are."""
    wrong = []
    for where, _, container in manifest.containers:
        said = words(container)
        if said[0] != "torchrun":
            continue
        if any("max-restarts" in word for word in said):
            wrong.append(f"{where}: torchrun starts ranks again by itself")
        if not re.fullmatch(r"[1-9]\d*", str(manifest.document["spec"].get("nprocPerNode"))):
            wrong.append(f"{where}: nobody says how many ranks a pod has")
    return wrong


def lets_the_ranks_have_the_grace(manifest: Manifest) -> list[str]:
    """torchrun has a time of its own between SIGTERM and SIGKILL, 30 s unless it is told."""
    wrong = []
    for where, pod, container in manifest.containers:
        told = variables(container).get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
        if words(container)[0] == "torchrun" and told != str(pod.get("terminationGracePeriodSeconds")):
            wrong.append(f"{where}: torchrun kills the ranks after {told} s")
    return wrong


def says_how_to_use_it(manifest: Manifest) -> list[str]:
    """The file opens with a comment: the commands to apply and to delete it, of files that exist."""
    head = "".join(line for line in manifest.text.splitlines(keepends=True) if line.startswith("#"))
    wrong = []
    if not manifest.text.startswith("# "):
        wrong.append("no comment at the top")
    applied = re.search(r"^#   kubectl apply -f .*$", head, flags=re.M)
    if not applied or f"yamls/{manifest.name}" not in applied[0]:
        wrong.append("nothing says how to apply it")
    if "#   kubectl delete " not in head:
        wrong.append("nothing says what happens on delete")
    named = re.findall(r"(?:yamls|examples)/[\w.-]*\w", manifest.text)
    return wrong + [f"{path} does not exist" for path in named if not (ROOT / path).exists()]


RULES: list[Callable[[Manifest], list[str]]] = [
    fits_the_schemas,
    fits_the_operator,
    starts_again_after_a_loss,
    tells_the_grace,
    mounts_what_there_is,
    runs_the_hooks,
    runs_an_example,
    sets_what_exists,
    leaves_restarts_to_the_pod,
    lets_the_ranks_have_the_grace,
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
    """`kubectl apply -f yamls/` and the rules above see the same."""
    assert sorted(path.name for path in YAMLS.iterdir()) == NAMES


def test_each_job_has_its_own_name() -> None:
    """They share a volume: two with one name would go on from each other's ckpts, and overwrite their results."""
    jobs = [read(name) for name in NAMES if name != "pvc.yaml"]
    names = [job.document["metadata"]["name"] for job in jobs]
    results = {word for job in jobs for _, _, container in job.containers for word in words(container) if "=/" in word}
    assert len(set(names)) == len(names) == len(results)


def test_the_volume_can_be_mounted_by_pods_on_several_nodes() -> None:
    """Two of the jobs have several pods."""
    assert "ReadWriteMany" in read("pvc.yaml").document["spec"]["accessModes"]


BREAKS: list[tuple[Callable[[Manifest], list[str]], str, str, str]] = [
    (fits_the_schemas, "pvc.yaml", "accessModes", "accesModes"),
    (fits_the_schemas, "pvc.yaml", "storage: 20Gi", "storage: [20]"),
    (fits_the_schemas, "job.yaml", "backoffLimit: 100", "backoffLimits: 100"),
    (fits_the_schemas, "job.yaml", "- action: Ignore", "- actions: Ignore"),
    (fits_the_schemas, "job.yaml", 'value: "30"', "value: 30"),
    (fits_the_schemas, "job.yaml", "      restartPolicy: Never", "      restartPolicies: Never"),
    (fits_the_schemas, "pytorchjob.yaml", "mountPath: /ckpts", "path: /ckpts"),
    (fits_the_schemas, "pytorchjob.yaml", "template: *pod", "template: {spec: {containers: [{image: x}]}}"),
    (fits_the_schemas, "torchrun.yaml", "preStop:", "prestop:"),
    (fits_the_operator, "pytorchjob.yaml", "kubeflow.org/v1\n", "kubeflow.org/v2\n"),
    (fits_the_operator, "pytorchjob.yaml", "pytorchReplicaSpecs:", "runPolicies: {}\n  pytorchReplicaSpecs:"),
    (fits_the_operator, "pytorchjob.yaml", "    Worker:", "    Helper:"),
    (fits_the_operator, "pytorchjob.yaml", "name: pytorch ", "name: train "),
    (fits_the_operator, "pytorchjob.yaml", "replicas: 1", "replicas: 2"),
    (fits_the_operator, "pytorchjob.yaml", "name: train-ddp\n", "name: 1-train\n"),
    (fits_the_operator, "pytorchjob.yaml", "restartPolicy: OnFailure\n", "restartPolicy: OnExitCode\n"),
    (fits_the_operator, "pytorchjob.yaml", "template: *pod", "restarts: 3\n      template: *pod"),
    (fits_the_operator, "torchrun.yaml", "nprocPerNode:", "procsPerNode:"),
    (fits_the_operator, "torchrun.yaml", "        spec:\n", "        spec:\n          restartPolicy: Never\n"),
    (starts_again_after_a_loss, "job.yaml", "restartPolicy: Never\n", "restartPolicy: OnFailure\n"),
    (starts_again_after_a_loss, "job.yaml", "Policy: Failed", "Policy: TerminatingOrFailed"),
    (starts_again_after_a_loss, "job.yaml", "backoffLimit: 100", "backoffLimit: 6"),
    (starts_again_after_a_loss, "job.yaml", "type: DisruptionTarget", "type: Ready"),
    (starts_again_after_a_loss, "job.yaml", "values: [143]", "values: [137]"),
    (starts_again_after_a_loss, "job.yaml", "containerName: train", "containerName: main"),
    (starts_again_after_a_loss, "pytorchjob.yaml", "restartPolicy: OnFailure #", "restartPolicy: Never #"),
    (starts_again_after_a_loss, "torchrun.yaml", "restartPolicy: OnFailure", "restartPolicy: ExitCode"),
    (tells_the_grace, "job.yaml", 'value: "30"', 'value: "60"'),
    (tells_the_grace, "job.yaml", "terminationGracePeriodSeconds: 30", "terminationGracePeriodSeconds: 300"),
    (tells_the_grace, "pytorchjob.yaml", "MIGRATOR_GRACE_S", "MIGRATOR_GRACE"),
    (tells_the_grace, "torchrun.yaml", "terminationGracePeriodSeconds: 60", "hostIPC: true"),
    (mounts_what_there_is, "job.yaml", "claimName: ckpts", "claimName: ckpt"),
    (mounts_what_there_is, "job.yaml", "- name: ckpts", "- name: volume"),
    (mounts_what_there_is, "job.yaml", "persistentVolumeClaim: {claimName: ckpts}", "emptyDir: {}"),
    (mounts_what_there_is, "job.yaml", "value: /ckpts}", "value: /data}"),
    (mounts_what_there_is, "pytorchjob.yaml", "mountPath: /ckpts", "mountPath: /data"),
    (mounts_what_there_is, "torchrun.yaml", "--weights=/ckpts/", "--weights="),
    (runs_the_hooks, "job.yaml", "/hooks/preStop.sh", "/hooks/prestop.sh"),
    (runs_the_hooks, "job.yaml", '{command: ["sh", "/hooks/preStop.sh"]}', "{command: []}"),
    (runs_the_hooks, "job.yaml", "postStart: #", "preStart: #"),
    (runs_the_hooks, "pytorchjob.yaml", "template: *pod", "template: {spec: {containers: [{name: pytorch}]}}"),
    (runs_the_hooks, "torchrun.yaml", "python -m migrator.hooks /hooks", "true"),
    (runs_an_example, "job.yaml", "/app/plain.py", "/app/plane.py"),
    (runs_an_example, "job.yaml", '["python", "/app/plain.py"]', '["sh", "-c", "python /app/plain.py"]'),
    (runs_an_example, "job.yaml", "--epochs=30", "--epoch=30"),
    (runs_an_example, "pytorchjob.yaml", "COPY examples/ddp.py", "COPY examples/plain.py"),
    (sets_what_exists, "job.yaml", "MIGRATOR_JOB", "MIGRATOR_NAME"),
    (sets_what_exists, "job.yaml", "value: train}", "value: train-ddp}"),
    (sets_what_exists, "pytorchjob.yaml", 'value: "60"', 'value: "1m"'),
    (sets_what_exists, "torchrun.yaml", "MIGRATOR_CKPT", "MIGRATOR_CKPTS"),
    (leaves_restarts_to_the_pod, "torchrun.yaml", '"torchrun", ', '"torchrun", "--max-restarts=3", '),
    (leaves_restarts_to_the_pod, "torchrun.yaml", 'nprocPerNode: "2"', 'nprocPerNode: "auto"'),
    (lets_the_ranks_have_the_grace, "torchrun.yaml", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "SHUTDOWN_TIMEOUT"),
    (
        lets_the_ranks_have_the_grace,
        "torchrun.yaml",
        "terminationGracePeriodSeconds: 60",
        "terminationGracePeriodSeconds: 90",
    ),
    (says_how_to_use_it, "pvc.yaml", "kubectl apply -f yamls/pvc.yaml", "kubectl apply"),
    (says_how_to_use_it, "job.yaml", "#   kubectl delete", "#   delete"),
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
