"""Every format that was ever written is read: jobs go on from what earlier versions of this package left on a volume.

`tests/golden` holds that; `tests/golden/make_format.py` says how it was made. Ckpts of an older torch are in
`unit/ckpt/test_older_torch.py`.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from migrator.ckpt import generations, rank_record
from migrator.ckpt.codec import _Decoder
from migrator.ckpt.manifest import FORMAT, READERS, Manifest
from migrator.ckpt.names import MANIFEST
from migrator.ckpt.rank_record import RankRecord
from migrator.ckpt.sealed import unseal
from migrator.state import adapters
from migrator.state.adapters import base, comm_hooks
from tests.golden.make_format import RANKS
from tests.support.harness import ROOT, Job

GOLDEN = ROOT / "tests" / "golden"
SCRIPT = GOLDEN / "job.py"
JOBS = sorted(GOLDEN.glob("format-*/*"))
MANIFESTS = sorted(GOLDEN.rglob(MANIFEST))


def payload(kind: str, path: Path) -> dict[str, Any]:
    return unseal(kind, path.read_bytes())


@pytest.mark.parametrize("golden", JOBS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_job_goes_on_with_what_an_earlier_version_left(job: Job, golden: Path) -> None:
    """Every value is what it was, to the last bit, and it trains the rest of the epoch and those behind it."""
    shutil.copytree(golden / "default", job.root / "default")
    assert_goes_on(job.use(SCRIPT), golden)


def assert_goes_on(job: Job, golden: Path) -> None:
    """A life of the job loads what was put where its ckpts are, and ends as the earlier version would have."""
    newest = max(path.parent.name for path in golden.rglob(MANIFEST))
    size = Manifest.from_bytes((golden / "default" / newest / MANIFEST).read_bytes()).ranks
    lives = len(list(golden.glob("default/generations/*.json")))
    job.env |= {"KIND": golden.name, "OUT": str(job.directory)}

    life = job.run() if size == 1 else job.gang(size, pods=size)
    assert life.wait() == (0 if size == 1 else [0] * size), life.text

    for said in (golden / f"{what}-{rank}.json" for what in ("at", "after") for rank in range(size)):
        expected, found = (json.loads(path.read_text()) for path in (said, job.directory / said.name))
        assert differences(expected, found, said.name) == []
    assert re.search(rf"generation_claimed generation={lives + 1} continues={lives} ", life.text), life.text
    assert re.search(rf" loaded ckpt={newest} ", life.text), life.text
    for warning in ("ckpt_bad", "generation_unreadable", "fork", "epoch_repeated", "own_of_another_rank"):
        assert not life.events(warning), life.text


def differences(expected: Any, found: Any, where: str) -> list[str]:
    """Where two structures differ. What a later torch says besides does no harm; what was trained is near enough."""
    if isinstance(expected, dict) and isinstance(found, dict):
        lacks = [f"{where} lacks {key}" for key in expected if key not in found]
        return lacks + [
            line
            for key, item in expected.items()
            if key in found
            for line in differences(item, found[key], f"{where}/{key}")
        ]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        return [
            line
            for i, pair in enumerate(zip(expected, found, strict=True))
            for line in differences(*pair, f"{where}/{i}")
        ]
    is_same = type(expected) is type(found) and expected == found
    if type(expected) is float and type(found) is float:
        is_same = found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    return [] if is_same else [f"{where}: {expected!r:.100} was expected, {found!r:.100} is there"]


def test_every_format_that_is_read_has_a_golden_ckpt() -> None:
    """Who adds a format keeps a ckpt of it, with the records of lives and ranks."""
    assert {payload("manifest", path)["format"] for path in MANIFESTS} == set(READERS)
    lives, ranks = list(GOLDEN.rglob("generations/*.json")), list(GOLDEN.rglob("rank-*.json"))
    assert {payload("generation", path)["format"] for path in lives} == set(range(1, generations.GENERATION_FORMAT + 1))
    assert {payload("rank", path)["format"] for path in ranks} == set(range(1, rank_record.RANK_FORMAT + 1))
    assert {path.name for path in JOBS if path.parent.name == f"format-{FORMAT}"} == set(RANKS)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: "-".join(path.relative_to(GOLDEN).parts[:-1]))
def test_what_was_read_is_written_in_the_same_bytes(path: Path) -> None:
    """What this version writes is the format that the golden ckpts have, if it is the present one."""
    data = path.read_bytes()
    if payload("manifest", path)["format"] == FORMAT:
        assert Manifest.from_bytes(data).to_bytes() == data
    for record in path.parent.glob("rank-*.json"):
        if payload("rank", record)["format"] == rank_record.RANK_FORMAT:
            assert RankRecord.from_bytes(record.read_bytes()).to_bytes() == record.read_bytes()


def test_the_golden_ckpts_have_all_that_a_ckpt_can_hold() -> None:
    """Each kind of object, each node of a tree, and the ways that only large state takes."""
    (of_ranks,) = GOLDEN.glob(f"format-{FORMAT}/two-ranks/default/0*")
    found = [payload("manifest", path) for path in MANIFESTS]
    for module in pkgutil.iter_modules(adapters.__path__):
        importlib.import_module(f"{adapters.__name__}.{module.name}")
    all_kinds = {cls.kind for cls in (*leaves(base.Adapter), comm_hooks.HookState)}
    assert {entry["kind"] for one in found for entry in one["objects"].values()} == all_kinds
    text = "".join(path.read_text() for path in MANIFESTS)
    assert set(re.findall(r'"!":"(\w+)"', text)) == {*_Decoder(lambda stored: stored)._tags, "tensor", "array"}
    ways = ('"strides":[', '"order":"F","stored":', '"tensor","dtype":"float8_e4m3fn"', '"own":{"1":', '"loops":{"')
    assert [way for way in ways if way not in text] == []
    names = {path.name for path in of_ranks.iterdir()}
    assert {"rank-00000.json", "rank-00001.json", "own-of-rank-00000.safetensors"} <= names
    assert {"part-00000-of-00002-rank-00000.safetensors", "part-00001-of-00002-rank-00001.safetensors"} <= names


def leaves(cls: Any) -> list[Any]:
    """The kinds of objects that there are."""
    below = [leaf for sub in cls.__subclasses__() for leaf in (sub, *leaves(sub))]
    return [leaf for leaf in below if hasattr(leaf, "kind") and leaf.__module__.startswith("migrator.")]
