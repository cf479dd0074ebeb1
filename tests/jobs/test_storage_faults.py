"""What happens to a job when the place for its ckpts misbehaves: nothing is lost, and the message says what to do."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.support.harness import ROOT, Job

SMALL = ROOT / "tests" / "support" / "scripts" / "small.py"


@pytest.fixture
def small(job: Job) -> Job:
    return job.use(SMALL)


def saved_at(job: Job, *steps: int) -> None:
    """Lives of the job that were stopped after these steps, one after the other."""
    for step in steps:
        life = job.run(STOP_AT=str(step))
        assert life.wait() == 143, life.text


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def part_of(job: Job, name: str) -> Path:
    return next((job.root / "default" / name).glob("*.safetensors"))


def manifest_of(job: Job, name: str) -> Path:
    return job.root / "default" / name / "manifest.json"


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda job, name: flip(part_of(job, name), -5), id="a bit of a tensor flipped"),
        pytest.param(lambda job, name: flip(part_of(job, name), 30), id="a bit of the part's header flipped"),
        pytest.param(lambda job, name: flip(manifest_of(job, name), 200), id="a bit of the manifest flipped"),
        pytest.param(lambda job, name: flip(manifest_of(job, name), 14), id="a bit of the manifest's digest flipped"),
        pytest.param(lambda job, name: os.truncate(part_of(job, name), 4100), id="the part truncated"),
        pytest.param(lambda job, name: os.truncate(manifest_of(job, name), 100), id="the manifest truncated"),
        pytest.param(lambda job, name: os.truncate(manifest_of(job, name), 0), id="the manifest empty"),
        pytest.param(lambda job, name: part_of(job, name).unlink(), id="the part missing"),
        pytest.param(lambda job, name: manifest_of(job, name).unlink(), id="the manifest missing"),
    ],
)
def test_damage_to_the_newest_ckpt_leads_back_to_the_one_before(small: Job, damage) -> None:  # type: ignore[no-untyped-def]
    """A damaged ckpt is named and left in place, the one before it is loaded, and training ends as it would have."""
    undisturbed = small.run(MIGRATOR_CKPT=str(small.directory / "undisturbed"))
    assert undisturbed.wait() == 0
    saved_at(small, 10, 20)
    older, newest = small.ckpts()
    damage(small, newest)

    life = small.run()

    assert life.wait() == 0, life.text
    assert f"loaded {older}" in life.text
    assert "begins at 10" in life.text
    assert (small.root / "default" / newest).is_dir()
    assert life.text.splitlines()[-1] == undisturbed.text.splitlines()[-1]
    if manifest_of(small, newest).exists():
        assert life.events("ckpt_bad")[0]["ckpt"] == newest


def test_no_usable_ckpt_is_an_error_and_not_a_start_at_zero(small: Job) -> None:
    """If every ckpt is damaged the job ends with a list of what is wrong with each, and none is deleted."""
    saved_at(small, 10, 20)
    for name in small.ckpts():
        flip(part_of(small, name), -5)

    life = small.run()

    assert life.wait() == 1
    assert "NoUsableCkpt: none of the 2 ckpts" in life.text
    assert all(name in life.text.split("NoUsableCkpt: ")[-1] for name in small.ckpts())
    assert "MIGRATOR_RESUME=never" in life.text
    assert "step 1 " not in life.text
    assert len(small.ckpts()) == 2


def test_what_does_not_fit_is_refused_with_all_differences_at_once(job: Job) -> None:
    """A ckpt of another model is refused before anything is touched, and the message lists every difference."""
    script = """
        import torch, os
        from torch import nn
        from migrator import migrator
        width = int(os.environ["WIDTH"])
        model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
        optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.1)
        migrator.register("model", model)
        migrator.register("optimizer", optimizer)
        migrator.register({extra!r}, {{"x": 1}})
        migrator.listening()
        before = [p.clone() for p in model.parameters()]
        try:
            if migrator.resume:
                migrator.load_ckpt()
        finally:
            print("untouched", all(torch.equal(a, b) for a, b in zip(before, model.parameters())))
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        migrator.save_ckpt()
    """
    first = job.write(script.format(optimizer="SGD", extra="metrics")).run(WIDTH="8")
    assert first.wait() == 0, first.text

    second = job.write(script.format(optimizer="Adam", extra="ema")).run(WIDTH="9")

    assert second.wait() == 1
    message = second.text.split("CkptMismatch: ")[1]
    for line in (
        "in the ckpt, not registered: metrics",
        "registered, not in the ckpt: ema",
        "model/0.weight: shape is (9, 4) here, (8, 4) there",
        "model/1.weight: shape is (2, 9) here, (2, 8) there",
        "optimizer: is a Adam here, a SGD there",
        "MIGRATOR_RESUME=never",
    ):
        assert line in message
    assert "untouched True" in second.text


def test_a_run_that_ignores_its_ckpt_ends_at_its_first_step(small: Job) -> None:
    """A script that does not load although it could is stopped before any work is spent; `never` says it is meant."""
    saved_at(small, 10)

    careless = small.run(RESUME="no")
    assert careless.wait() == 1
    assert "ResumeIgnored" in careless.text
    assert "step 1 " not in careless.text
    assert len(small.ckpts()) == 1

    meant = small.run(RESUME="no", MIGRATOR_RESUME="never", STOP_AT="5")
    assert meant.wait() == 143, meant.text
    assert meant.events("other_lineage")[0]["ckpts"] in small.ckpts()
    goes_on = small.run()
    assert goes_on.wait() == 0, goes_on.text
    assert "begins at 5" in goes_on.text


def test_another_lineage_is_named_and_never_deleted(small: Job) -> None:
    """After a new start the old ckpts stay, however many new ones are made, and the log names them."""
    saved_at(small, 10)
    (old,) = small.ckpts()
    fresh = small.run(MIGRATOR_RESUME="never", MIGRATOR_EVERY="5", MIGRATOR_KEEP="1")
    assert fresh.wait() == 0, fresh.text
    assert fresh.events("other_lineage")[0]["ckpts"] == old
    assert old in small.ckpts()

    again = small.run(STEPS="70")
    assert again.wait() == 0, again.text
    assert old in small.ckpts()


def test_the_newest_ckpts_are_kept_and_older_ones_deleted_after_the_next_commit(small: Job) -> None:
    """Two ckpts stay by default, over several lives; the next life's first commit retires what earlier lives left."""
    saved_at(small, 10, 20, 30, 40)
    assert [name[-2:] for name in small.ckpts()] == ["30", "40"]

    life = small.run(MIGRATOR_KEEP="1", MIGRATOR_EVERY="5")
    assert life.wait() == 0
    assert len(small.ckpts()) == 1
    leftovers = [path.name for path in (small.root / "default").iterdir() if path.name != "generations"]
    assert leftovers == small.ckpts()


def test_a_part_opens_with_the_safetensors_library(small: Job) -> None:
    """The model's tensors are there for every tool, under their own names."""
    saved_at(small, 10)
    with safe_open(part_of(small, small.ckpts()[0]), "pt") as part:
        assert {"model/0.weight", "model/0.bias", "model/1.running_mean"} <= set(part.keys())
        assert part.get_tensor("model/0.weight").shape == (16, 8)


def test_a_root_that_is_a_file_is_refused_with_the_way_out(small: Job) -> None:
    """The message names the path, what is wrong with it, and the variable to set."""
    small.root.write_text("not a directory")
    life = small.run()
    assert life.wait() == 1
    message = life.text.split("StorageForeignError: ")[1]
    assert str(small.root) in message
    assert "MIGRATOR_CKPT" in message
    assert small.root.read_text() == "not a directory"


def test_a_root_without_rights_is_refused_with_the_way_out(job: Job) -> None:
    """A job that may not write there learns it in listening(), not in its last thirty seconds."""
    if os.getuid() != 0:
        pytest.skip("LOUD: becoming another user takes root")
    job.root.mkdir(mode=0o700)
    pod = job.directory / "pod"
    pod.mkdir()
    pod.chmod(0o777)
    for parent in [job.directory, *job.directory.parents]:
        parent.chmod(parent.stat().st_mode | 0o011)
    body = SMALL.read_text()
    job.write("import os\nos.setgroups([]); os.setgid(65534); os.setuid(65534)\n" + body)

    life = job.run()

    assert life.wait() == 1
    message = life.text.split("StorageAccessError: ")[1]
    assert "Permission denied" in message
    assert "right to write" in message


@pytest.fixture
def tiny_volume(job: Job) -> Iterator[Path]:
    """A file system of eight megabytes as the root of the ckpts."""
    job.root.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", job.root], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"LOUD: no tmpfs can be mounted here: {mounted.stderr.decode()}")
    yield job.root
    job.end()
    subprocess.run(["umount", job.root], check=True)


def fill(volume: Path) -> Path:
    """Take every byte that is left."""
    filler = volume / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 12))
    return filler


def test_a_full_disk_fails_the_save_and_leaves_the_ckpt_before(small: Job, tiny_volume: Path) -> None:
    """Full disk while leaving: the answer says so, the ckpt before is untouched and loads, no half is left."""
    saved_at(small, 10)
    (before,) = small.ckpts()
    life = small.run(EVERY_STEP_S="0.01", STEPS="100000", MIGRATOR_GRACE_S="2")
    life.wait_for(r"^step 12 ")
    filler = fill(tiny_volume)
    life.kill()

    assert life.wait() == 143, life.text
    answer = small.signal.read_text()
    assert answer.startswith("init\n")
    assert "No space left on device" in answer
    assert f"the ckpt before is untouched: {before}" in answer
    assert life.events("save_retry")
    filler.unlink()
    assert small.ckpts() == [before]
    last = small.run()
    assert last.wait() == 0, last.text
    assert "begins at 10" in last.text


def test_a_disk_that_gets_room_again_within_the_grace_takes_the_save_after_all(small: Job, tiny_volume: Path) -> None:
    """A failure that may pass is tried again until the deadline."""
    life = small.run(EVERY_STEP_S="0.01", STEPS="100000")
    life.wait_for(r"^step 3 ")
    filler = fill(tiny_volume)
    life.kill()
    life.wait_for("save_retry")
    filler.unlink()
    assert life.wait() == 143, life.text
    assert small.signal.read_text().startswith("resume\n")
    assert len(small.ckpts()) == 1


def test_a_failing_periodic_save_does_not_end_training(small: Job, tiny_volume: Path) -> None:
    """The run goes on to its end with exit code 0, every failure is reported, the ckpt before is untouched."""
    saved_at(small, 10)
    (before,) = small.ckpts()
    life = small.run(MIGRATOR_EVERY="50", STEPS="300", EVERY_STEP_S="0.005")
    life.wait_for("begins at 10")
    fill(tiny_volume)

    assert life.wait() == 0, life.text
    failed = life.events("save_failed")
    assert len(failed) >= 2
    assert failed[0]["before"] == before
    assert small.ckpts() == [before]


def test_a_volume_that_turns_read_only_fails_at_once_and_truthfully(small: Job, tiny_volume: Path) -> None:
    """A failure that will not pass is not retried until the deadline: the answer comes at once."""
    life = small.run(EVERY_STEP_S="0.01", STEPS="100000")
    life.wait_for(r"^step 3 ")
    subprocess.run(["mount", "-o", "remount,ro", tiny_volume], check=True)
    life.kill()
    assert life.wait(10.0) == 143, life.text
    assert life.events("save_retry") == []
    assert "Read-only file system" in small.signal.read_text()


def test_a_commit_whose_last_sync_failed_is_not_reported_as_a_failed_save(small: Job) -> None:
    """The manifest appeared, making its name durable failed once: the next try does it, and says saved."""
    fault = """
import errno, os
real, left = os.fsync, [1]
def fsync(fd):
    if left[0] and os.path.exists(f"/proc/self/fd/{fd}/manifest.json"):
        left[0] -= 1
        raise OSError(errno.EIO, "Input/output error")
    real(fd)
os.fsync = fsync
"""
    small.script = small.directory / "faulty.py"
    small.script.write_text(fault + SMALL.read_text())

    life = small.run(STOP_AT="10")

    assert life.wait() == 143, life.text
    assert small.signal.read_text().startswith("resume\nckpt=000001-000000000010\n")
    assert life.events("save_failed") == []
    assert "begins at 10" in small.use(SMALL).run().wait_for("begins at .*")[0]


def test_a_save_asked_for_that_fails_raises_with_the_reason(job: Job) -> None:
    """`save_ckpt()` returns only when durable; otherwise the script hears why."""
    job.write("""
        import resource, torch
        from migrator import migrator, SaveFailed
        model = torch.nn.Linear(1000, 100)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        migrator.register("model", model)
        migrator.listening()
        model(torch.ones(1, 1000)).sum().backward()
        optimizer.step()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))
        try:
            migrator.save_ckpt()
        except SaveFailed as error:
            print("heard:", error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        optimizer.step()
        print("saved:", migrator.save_ckpt())
    """)
    life = job.run()
    assert life.wait() == 0, life.text
    assert re.search(r"heard: .*File too large", life.text)
    assert "saved: 000001-000000000002" in life.text


def test_a_save_or_load_longer_than_a_second_tells_how_far_it_is(job: Job) -> None:
    """Percent, bytes, rate and grace left, as log lines where there is no terminal."""
    job.use(SMALL).env["BIG"] = str(200 << 20)
    job.script = job.directory / "slow.py"
    slow = """
import time
from migrator.ckpt import digests as blocks, tensor_file as parts
from migrator.storage import posix as storage
import migrator.save.progress as progress
progress.QUIET_S, progress.LINE_EVERY_S = 0.0, 0.0
"""
    job.script.write_text(slow + SMALL.read_text())
    first = job.run(STOP_AT="2")
    assert first.wait() == 143, first.text
    line = first.events("saving")[0]
    assert {"percent", "bytes", "mb_per_s", "grace_left_s"} <= line.keys()
    second = job.run(STEPS="3")
    assert second.wait() == 0, second.text
    assert {"percent", "bytes", "mb_per_s"} <= second.events("loading")[0].keys()
    shutil.rmtree(job.root)


def test_a_crash_goes_on_from_the_last_periodic_ckpt(small: Job) -> None:
    """SIGKILL without notice loses the steps since the last periodic save, and nothing else."""
    undisturbed = small.run(MIGRATOR_CKPT=str(small.directory / "undisturbed"))
    assert undisturbed.wait() == 0
    life = small.run(MIGRATOR_EVERY="10", CRASH_AT="39", EVERY_STEP_S="0.01")
    assert life.wait() == -9
    newest = int(small.ckpts()[-1][-3:])
    assert newest == 30
    last = small.run()
    assert last.wait() == 0, last.text
    assert f"begins at {newest}" in last.text
    assert last.text.splitlines()[-1] == undisturbed.text.splitlines()[-1]


LIMITED = """
import resource, sys
from pathlib import Path
from migrator.errors import StorageError
from migrator.storage.posix import PosixStorage
storage = PosixStorage(Path(sys.argv[1]), "job")
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    with storage.upload("ckpt/part") as file:
        file.write([memoryview(bytes(6_000)), memoryview(bytes(6_000))])
        file.finish()
except StorageError as error:
    print(error)
"""


def test_a_write_that_is_cut_short_by_the_system_fails_and_leaves_nothing(tmp_path: Path) -> None:
    """A real limit: the first call moves a part of the bytes, the next one fails."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert "File too large" in done.stdout
    assert list((tmp_path / "job" / "ckpt").iterdir()) == []
