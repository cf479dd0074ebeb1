"""The page on Kubernetes says what the manifests have."""

from __future__ import annotations

import re
from typing import Any

import pytest
from kubernetes_validate.utils import all_versions, major_minor

from tests.docs.test_pages import table
from tests.docs.test_yamls import AGENTS, JOBS, NAMES, Manifest, fits_the_schemas, is_elastic, read, words
from tests.support.harness import ROOT

PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
FIELDS = {row[0]: row[1].split()[0] for row in table(PAGE, "field", "since", "without it")}
OLDEST = min(map(major_minor, all_versions()), key=lambda version: int(version.split(".")[1]))


def without(part: Any, fields: set[str]) -> Any:
    if isinstance(part, dict):
        return {key: without(value, fields) for key, value in part.items() if key not in fields}
    return [without(one, fields) for one in part] if isinstance(part, list) else part


def test_each_kind_of_job_is_in_the_table() -> None:
    """With what it is started by, and whether it goes on with fewer pods."""
    rows = table(PAGE, "file", "kind", "pods", "when a pod goes", "needs")
    files = {re.sub(r"\[(.*?)\]\(.*", r"\1", row[0]): row for row in rows}

    assert sorted(files) == sorted(JOBS)
    for name, row in files.items():
        manifest = read(name)
        assert row[2].startswith("from ") == is_elastic(manifest), name
        assert (row[3] == "the others go on") == is_elastic(manifest), name
        agents = {words(container)[0] for _, _, container in manifest.containers} & set(AGENTS)
        assert all(agent in row[1] for agent in agents), name


def test_an_older_cluster_takes_the_manifests_without_these_fields() -> None:
    """They are all that it does not know."""
    for name in NAMES:
        manifest = read(name)
        shorter = Manifest(name, "", [without(document, set(FIELDS)) for document in manifest.documents])
        assert fits_the_schemas(shorter, [OLDEST]) == [], name


@pytest.mark.parametrize("field", [*FIELDS])
def test_a_field_is_used_and_not_older_than_the_page_says(field: str) -> None:
    """Known to the version in the table; one version of schemas may know it earlier, as a feature that is off."""
    uses = [name for name in NAMES if re.search(rf"\b{field}:", read(name).text)]

    assert uses
    others = set(FIELDS) - {field}
    for name in uses:
        manifest = read(name)
        shorter = Manifest(name, "", [without(document, others) for document in manifest.documents])
        assert fits_the_schemas(shorter, [FIELDS[field]]) == [], name


def test_the_times_are_those_of_the_manifests() -> None:
    """30 s for one pod, 60 s for several; DLRover's pods have 30 s."""
    for name in JOBS:
        (grace,) = {pod["terminationGracePeriodSeconds"] for pod in read(name).pods.values()}
        has_one = name in ("job.yaml", "pytorchjob-migration.yaml")
        assert grace == (30 if has_one or name == "elasticjob.yaml" else 60), name
    assert "30 s for one pod and 60 s for several" in PAGE
