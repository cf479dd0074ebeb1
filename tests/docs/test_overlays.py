"""What `kubectl apply -k yamls` makes of each job, with its ckpts on the claim and in S3.

Rendered by kustomize itself: the one inside kubectl, or the program of that name. The
file that a user edits, yamls/kustomization.yaml, is edited as its comments say.
"""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from migrator import roots
from tests.docs.test_yamls import (
    JOBS,
    VERSIONS,
    YAMLS,
    Manifest,
    fits_the_published_schema,
    fits_the_schemas,
    variables,
)
from tests.support.harness import ROOT

CLAIMED, IN_S3 = "the claim", "S3"
# Its variable names a file, and so no bucket.
WITH_S3 = [name for name in JOBS if name != "pytorchjob-migration.yaml"]

pytestmark = pytest.mark.processes


@pytest.fixture(scope="session")
def kustomize() -> list[str]:
    for command in (["kubectl", "kustomize"], ["kustomize", "build"]):
        if shutil.which(command[0]):
            return command
    pytest.skip("LOUD: neither kubectl nor kustomize is installed")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what kustomize reads."""
    for name in ("yamls", "hooks"):
        shutil.copytree(ROOT / name, tmp_path / name)
    return tmp_path


def change(file: Path, pattern: str, by: str) -> None:
    text, count = re.subn(pattern, by, file.read_text(), flags=re.M)
    assert count == 1, f"{file.name} has {count} places for {pattern}"
    file.write_text(text)


def choose(tree: Path, name: str, storage: str = CLAIMED) -> Path:
    """What a user changes: the four lines with a number."""
    file = tree / "yamls" / "kustomization.yaml"
    change(file, r"^  - \S+ # 1\.", f"  - {name} # 1.")
    if storage == IN_S3:
        change(file, r"^  - \S+ # 2\..*\n", "")
        change(file, r"^# (components: .*) # 3\.", r"\1 # 3.")
    change(file, r"newName: \S+ # 4\.", "newName: registry.example/mine # 4.")
    return file


def build(kustomize: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*kustomize, str(directory)], capture_output=True, text=True, check=False, timeout=60)


def rendered(kustomize: list[str], tree: Path, name: str) -> Manifest:
    done = build(kustomize, tree / "yamls")
    assert done.returncode == 0, done.stderr
    return Manifest(name, done.stdout, list(yaml.safe_load_all(done.stdout)))


def named(manifest: Manifest, kind: str) -> dict[str, Any]:
    return {one["metadata"]["name"]: one for one in manifest.of_kind(kind)}


@pytest.mark.parametrize(
    ("name", "storage"), [*((name, CLAIMED) for name in JOBS), *((name, IN_S3) for name in WITH_S3)]
)
def test_each_job_is_rendered_with_all_that_its_pods_name(
    kustomize: list[str], tree: Path, name: str, storage: str
) -> None:
    """It fits the schemas, has the user's image, and each ConfigMap, Secret and claim that it names is there."""
    choose(tree, name, storage)

    made = rendered(kustomize, tree, name)

    assert fits_the_schemas(made, [VERSIONS[0], VERSIONS[-1]]) == []
    assert fits_the_published_schema(made) == []
    # Nothing of the file is lost on the way.
    own = list(yaml.safe_load_all((YAMLS / name).read_text()))
    assert {one["kind"] for one in own} <= {one["kind"] for one in made.documents}
    assert len(list(made.containers)) >= 1
    for where, pod, container in made.containers:
        assert container["image"] == "registry.example/mine:latest", where
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        maps = {volume["configMap"]["name"] for volume in volumes.values() if "configMap" in volume}
        claims = {v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v}
        secrets = {source["secretRef"]["name"] for source in container.get("envFrom", [])}
        assert maps == set(named(made, "ConfigMap"))
        assert claims == set(named(made, "PersistentVolumeClaim"))
        assert secrets == set(named(made, "Secret"))
        assert (len(claims), len(secrets)) == ((1, 0) if storage == CLAIMED else (0, 1))


@pytest.mark.parametrize("name", WITH_S3)
def test_in_s3_the_bucket_is_the_only_root(kustomize: list[str], tree: Path, name: str) -> None:
    """It comes from the Secret, which s3.env fills; nothing else of the container is different."""
    choose(tree, name)
    before = {where: container for where, _, container in rendered(kustomize, tree, name).containers}
    shutil.rmtree(tree / "yamls")
    shutil.copytree(YAMLS, tree / "yamls")
    choose(tree, name, IN_S3)
    made = rendered(kustomize, tree, name)

    (secret,) = named(made, "Secret").values()
    values = {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}
    assert values["MIGRATOR_CKPT"] == "s3://your-bucket/jobs"
    assert roots.root(values["MIGRATOR_CKPT"]) == values["MIGRATOR_CKPT"]
    assert {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= values.keys()
    for where, _, container in made.containers:
        assert "MIGRATOR_CKPT" not in variables(container)
        assert {**variables(container), "MIGRATOR_CKPT": "/ckpts"} == variables(before[where])
        same = set(container) - {"env", "envFrom", "volumeMounts"}
        assert {key: container[key] for key in same} == {key: before[where][key] for key in same}


def test_a_manifest_that_was_changed_is_not_patched_in_the_wrong_place(kustomize: list[str], tree: Path) -> None:
    """Each patch looks at the name before it removes what is there."""
    choose(tree, "job.yaml", IN_S3)
    change(tree / "yamls" / "job.yaml", r"^          env:$", "          env:\n            - {name: FIRST, value: mine}")

    done = build(kustomize, tree / "yamls")

    assert done.returncode != 0
    assert "env/0/name" in done.stderr


def test_the_job_that_names_a_file_is_refused_in_s3(kustomize: list[str], tree: Path) -> None:
    """Rather than left with a claim that is not there."""
    choose(tree, "pytorchjob-migration.yaml", IN_S3)

    assert build(kustomize, tree / "yamls").returncode != 0


def test_as_it_stands_it_is_the_job_on_the_claim(kustomize: list[str], tree: Path) -> None:
    """The first command of a reader works without an edit."""
    made = rendered(kustomize, tree, "job.yaml")

    assert sorted(one["kind"] for one in made.documents) == ["ConfigMap", "Job", "PersistentVolumeClaim"]


def test_the_hooks_in_the_configmap_are_those_of_the_package(kustomize: list[str], tree: Path) -> None:
    """Byte for byte, under a name that does not change with them."""
    done = build(kustomize, tree / "hooks")

    assert done.returncode == 0, done.stderr
    (made,) = yaml.safe_load_all(done.stdout)
    assert (made["kind"], made["metadata"]["name"]) == ("ConfigMap", "migrator-hooks")
    assert made["data"] == {path.name: path.read_text() for path in (ROOT / "hooks").glob("*.sh")}


def test_the_files_that_kustomize_reads_are_there() -> None:
    """Seen without kustomize as well."""
    for directory in ("hooks", "yamls", "yamls/s3"):
        read = yaml.safe_load((ROOT / directory / "kustomization.yaml").read_text())
        generated = [*read.get("configMapGenerator", []), *read.get("secretGenerator", [])]
        files = [
            *read.get("resources", []),
            *(name for one in generated for name in (*one.get("files", []), *one.get("envs", []))),
        ]
        assert files
        assert [name for name in files if not (ROOT / directory / name).exists()] == []
        if generated:
            assert read["generatorOptions"] == {"disableNameSuffixHash": True}
