"""The schemas that operators publish for their jobs (CRDs), for manifests that Kubernetes itself does not know.

They are not part of this repository. `KUBERNETES_CRDS` names a directory of files like
`kubeflow.org_pytorchjobs.yaml`; the default is `../shared/crds` beside the checkout.

As strict as the API server with `fieldValidation: Strict`: a field that the schema does
not have is an error. The rules in CEL (`x-kubernetes-validations`) are not evaluated.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.support.harness import ROOT

DIRECTORY = Path(os.environ.get("KUBERNETES_CRDS") or ROOT.parent / "shared" / "crds")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a file has up to 9,000 lines


def why_not() -> str | None:
    """Why there is nothing to compare with; None if there is."""
    if any(DIRECTORY.glob("*.yaml")):
        return None
    return f"no published schemas in {DIRECTORY}; KUBERNETES_CRDS names a directory with them"


def problems(document: dict[str, Any]) -> list[str]:
    """What does not fit the published schema of this kind. `LookupError` if there is none."""
    schema = _schema(document["apiVersion"], document["kind"])
    errors = jsonschema.Draft202012Validator(schema).iter_errors(document)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message[:300]}" for error in errors]


@functools.cache
def _schema(api_version: str, kind: str) -> dict[str, Any]:
    group, _, version = api_version.partition("/")
    for path in sorted(DIRECTORY.glob(f"{group}_*.yaml")):
        for crd in yaml.load_all(path.read_text(), Loader=_LOADER):
            if crd is None or crd["spec"]["names"]["kind"] != kind:
                continue
            for one in crd["spec"]["versions"]:
                if one["name"] == version and one["served"]:
                    schema: dict[str, Any] = one["schema"]["openAPIV3Schema"]
                    _close(schema)
                    # The API server knows what a metadata of the whole object may have.
                    schema["properties"]["metadata"] = {"type": "object"}
                    return schema
    raise LookupError(f"no published schema for {kind} {api_version} in {DIRECTORY}")


def _close(schema: dict[str, Any]) -> None:
    """Refuse fields that are not listed, wherever the API server would drop them."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    properties, additional = schema.get("properties", {}), schema.get("additionalProperties")
    if schema.get("type") == "object" and additional is None:
        schema["additionalProperties"] = False
    for one in (*properties.values(), additional, schema.get("items")):
        if isinstance(one, dict):
            _close(one)
