"""`python -m migrator.grace`: the number, the parts it is made of, and what is asked of whom."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from migrator import grace
from migrator.ckpt import generations
from migrator.ckpt.manifest import Manifest
from migrator.ckpt.names import ckpt_name, file_in, manifest_name, part_name
from migrator.ckpt.part_writer import write_part
from migrator.grace import State, parse_bytes, plan
from migrator.storage.bandwidth import Bandwidth
from migrator.storage.posix import PosixStorage
from tests.support.harness import ROOT


def planned(size: int = 3_000_000_000, *, ranks: int = 1, took_s: float | None = None, **more: float) -> grace.Plan:
    speed = Bandwidth(256_000_000, (1.28, 0.8, 1.0), 0.01)
    step_s, margin = more.get("step_s", grace.STEP_S), more.get("margin", grace.MARGIN)
    return plan(State(size, 1, "as given", took_s), speed, step_s=step_s, is_given=False, ranks=ranks, margin=margin)


# The formula.


def test_the_number_is_that_of_the_worked_example() -> None:
    """3 GB at 200 MB/s, one process: docs/grace.md computes the same."""
    found = planned()

    assert found.bytes_per_s == 2e8
    assert {part.name: part.seconds for part in found.parts} == {
        "notice is seen": 0.25, "safe point": 1.0, "ranks agree": 0.0, "write": 15.0, "commit": 0.04
    }  # fmt: skip
    assert found.sum_s == pytest.approx(16.29)
    assert found.grace_s == 27  # 1.5 * 16.29 + 2 = 26.4


@pytest.mark.parametrize(
    ("longer", "more"),
    [
        (planned(6_000_000_000), 22),
        (planned(step_s=11.0), 15),
        (planned(margin=2.0), 8),
        (planned(ranks=1024), 6),
        (planned(took_s=30.0), 22),
    ],
)
def test_each_part_makes_it_longer(longer: grace.Plan, more: int) -> None:
    """More bytes, a longer step, more ranks, a save of the job that was slower than what was measured now."""
    assert longer.grace_s == 27 + more


def test_a_save_that_was_quicker_than_the_place_is_now_changes_nothing() -> None:
    """The slower one counts."""
    assert planned(took_s=1.0).grace_s == planned().grace_s


def test_a_save_that_just_fits_is_not_warned_of() -> None:
    """`save_too_long` begins at 0.7 of the grace: with the margin a save stays below."""
    for size in (10**6, 10**9, 10**12):
        found = planned(size)
        assert found.sum_s < 0.7 * found.grace_s


def test_a_small_state_has_a_least_grace() -> None:
    """A number of one second would be spent before the hook has started."""
    assert planned(1000, step_s=0.01).grace_s == grace.LEAST_S


# What is printed.


def test_the_lines_to_paste_are_yaml_with_one_number() -> None:
    """Where kubelet, this package and torchrun read it, all three the same."""
    spec = yaml.safe_load(planned().to_yaml())

    (container,) = spec["containers"]
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    assert spec["terminationGracePeriodSeconds"] == 27
    assert env == {"MIGRATOR_GRACE_S": "27", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "27"}


def test_the_table_shows_each_part_and_the_yaml() -> None:
    """One line each, and what is assumed is called so."""
    text = planned(ranks=2).to_text()

    assert "state      3 GB, as given\n" in text
    assert "bandwidth  200 MB/s, slowest of 3 files of 256 MB\n" in text
    for name in ("notice is seen", "safe point", "ranks agree", "write", "commit", "notice to commit", "grace"):
        assert re.search(rf"^{name} +[\d.]+", text, re.MULTILINE), name
    assert "assumed, see --step-s" in text
    assert planned().to_text() in (ROOT / "docs" / "grace.md").read_text()
    assert text.endswith(planned(ranks=2).to_yaml())


# The size.


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("3GB", 3 * 10**9),
        ("1.5 GiB", 3 << 29),
        ("250000000", 250_000_000),
        ("2e9", 2 * 10**9),
        ("7kb", 7000),
        ("12 B", 12),
        ("0.5TiB", 1 << 39),
    ],
)
def test_a_number_of_bytes_is_read(text: str, size: int) -> None:
    """With or without a unit, as people write it."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["train.py", "GB", "3 apples", "3PB", "-1GB", "3 ib", "", "1e400"])
def test_anything_else_is_no_number_of_bytes(text: str) -> None:
    """It may be a script."""
    assert parse_bytes(text) is None


def committed(root: Path, *, step: int, elements: int, took_s: object = 2.0, ranks: int = 2) -> Manifest:
    storage = PosixStorage(root, "job")
    ckpt = ckpt_name(1, step)
    part = write_part(storage, file_in(ckpt, part_name(0, 1)), {"w": torch.ones(elements)})
    written = {} if took_s is None else {"took_s": took_s}
    manifest = Manifest(1, step, "job", ranks, (part,), {}, written=written)
    storage.put(manifest_name(ckpt), manifest.to_bytes(), exclusive=True)
    return manifest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    generations.claim(PosixStorage(tmp_path, "job"), fresh=False, about={})
    committed(tmp_path, step=10, elements=100)
    return tmp_path


@pytest.mark.parametrize("took_s", [2.0, None, "x", True, 0, -1.0, 10**400])
def test_the_newest_ckpt_shows_its_size_its_ranks_and_its_time(root: Path, took_s: object) -> None:
    """The time if it was noted."""
    manifest = committed(root, step=20, elements=300, took_s=took_s)
    found = grace.newest(PosixStorage(root, "job"))

    assert found.size == manifest.bytes + len(manifest.to_bytes())
    assert found.ranks == 2
    assert found.took_s == (2.0 if took_s == 2.0 else None)
    assert manifest.ckpt in found.how


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = grace.main(["--probes=1", "--probe-mb=1", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("below", ["", "job", f"job/{ckpt_name(1, 10)}"])
def test_a_root_a_job_or_a_ckpt_is_named(root: Path, capsys: pytest.CaptureFixture[str], below: str) -> None:
    """Whatever somebody has at hand."""
    code, out, err = run(capsys, "--json", "--job=job", root / below)

    assert code == 0, err
    found = json.loads(out)
    assert found["ranks"] == 2
    assert found["bytes"] == grace.newest(PosixStorage(root, "job")).size
    assert found["terminationGracePeriodSeconds"] >= grace.LEAST_S


def test_nothing_is_left_on_the_root(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And nothing of the job has changed."""

    def contents() -> dict[str, bytes]:
        return {str(path): path.read_bytes() if path.is_file() else b"" for path in root.rglob("*")}

    before = contents()
    code, out, err = run(capsys, "--ckpt", root, "3MB")

    assert code == 0, err
    assert "as given" in out
    assert contents() == before


def test_the_settings_of_the_pod_are_read(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the container no option is needed."""
    monkeypatch.setenv("MIGRATOR_CKPT", str(root))
    monkeypatch.setenv("MIGRATOR_JOB", "job")

    assert run(capsys)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--ckpt", "ROOT"], r"there is no ckpt in \S+/default, .* Give the size"),
        (["--ckpt", "ROOT/missing", "3GB"], r"ROOT/missing is no directory: mount the volume"),
        (["--ckpt", "ROOT", "3 apples"], r"'3 apples' is neither a number of bytes"),
        (["--ckpt", "ROOT", "missing.py"], r"there is no script missing.py"),
        (["--ckpt", "ROOT", "3GB", "--lr=1"], r"behind a number of bytes is more: --lr=1"),
        (["--ckpt", "ROOT", "ROOT"], r"two roots: ROOT and --ckpt ROOT"),
        (["--ckpt", "ftp://x", "3GB"], r"no storage for ftp"),
        (["--ckpt", "memory://x", "3GB"], r"memory of this process"),
    ],
)
def test_what_cannot_be_answered_is_said(
    root: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    """What was found, what was expected, and what to do; on stderr."""
    code, out, err = run(capsys, *(text.replace("ROOT", str(root)) for text in arguments))

    assert (code, out) == (1, "")
    assert re.search(why.replace("ROOT", re.escape(str(root))), err), err


@pytest.mark.parametrize("option", ["--ranks=0", "--margin=-1", "--step-s=0", "--probes=x", "--nonsense"])
def test_an_option_that_makes_no_sense_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the usage, as other commands do."""
    with pytest.raises(SystemExit) as ended:
        grace.main([option, "3GB"])

    assert ended.value.code == 2
    assert "usage: python -m migrator.grace" in capsys.readouterr().err
