"""A script written for the predecessor, pytorchjob-migration, runs unchanged.

What is known to have gone wrong there is tried here, a test each.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from migrator.session import restore
from migrator.state.registry import Registry
from migrator.storage.posix import PosixStorage
from tests.support.harness import ROOT, Job, Process, until

README = """\
# metircs to be recorded
metircs = {'epoch': -1, 'best_epoch': -1, 'best_acc': 0.}

# A migrator helps training models on k8s more secure.
from migration import migrator
migrator.register('model', model)
migrator.register('optimizer', optimizer)
migrator.register('metircs', metircs)
migrator.listening()
if migrator.resume:  # note: migrate_ckpt has higher priority than args.ckpt
    migrator.load_ckpt()  # load ckpt at all ranks
    print('load migration ckpt from epoch {}, metrics: {}'.format(
        metircs['epoch'], metircs))
"""
"""As its README has it. One line of it has to change."""

SNIPPET = README.replace("from migration import migrator\n", "from migrator import migrator\n")

NET = """
import os
import sys
import time
import torch
from torch import nn

class Net(nn.Module):
    '''24 tensors that all grow by the same at each step: any mixture of steps shows.'''

    def __init__(self, width):
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(width) for _ in range(24))

    def forward(self):
        return -sum(layer.sum() for layer in self.layers)
"""

TRAIN = """
del os.environ["MIGRATOR_CKPT"], os.environ["MIGRATOR_SIGNAL"]  # only the predecessor's own are set

torch.manual_seed(0)
model = Net(int(os.environ.get("WIDTH", 1000)))
# wrap
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=float(os.environ.get("MOMENTUM", 0)))
# snippet
for epoch in range(metircs['epoch'] + 1, int(os.environ.get("EPOCHS", 10**6))):
    for _ in range(4):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    metircs['epoch'] = metircs['best_epoch'] = epoch
    metircs['best_acc'] = epoch / 7
    print(f"epoch {epoch}\\n", end="")
print("done", *(float(p[0]) for p in model.parameters()))
"""


def script(*, wrap: str = "", more: str = "", snippet: str = SNIPPET) -> str:
    """A training script around the snippet; `more` is registered besides."""
    text = NET + TRAIN.replace("# wrap\n", wrap)
    if more:
        snippet = snippet.replace("migrator.listening()\n", f"{more}migrator.listening()\n")
    return text.replace("# snippet\n", snippet)


class Old:
    """A job as the predecessor's yaml sets it up: two variables, one a file on the volume, one the signal file."""

    def __init__(self, job: Job) -> None:
        self.job = job.write(script())
        self.volume = job.directory / "volume"
        self.volume.mkdir()
        self.file = self.volume / "migration.pth"
        self.signal = job.directory / "old" / "signal.txt"
        self.signal.parent.mkdir()
        job.env.update(MIGRATION_CKPT_PATH=str(self.file), MIGRATION_SIGNAL_PATH=str(self.signal))

    def run(self, **env: str) -> Process:
        return self.job.run(**env)

    def save(self) -> None:
        """What its hook does: `echo save > $MIGRATION_SIGNAL_PATH`."""
        self.signal.write_text("save\n")

    def word(self) -> str:
        """What its hook waits for: the first word of the file."""
        return (self.signal.read_text().split() or [""])[0]

    def ckpts(self) -> list[str]:
        return sorted(path.parent.name for path in self.volume.glob("default/*/manifest.json"))

    def tensors(self, ckpt: str) -> dict[str, Tensor]:
        """The model in a ckpt, as another program reads it."""
        found = load_file(self.volume / "default" / ckpt / "part-00000-of-00001.safetensors")
        return {key.removeprefix("model/"): value for key, value in found.items() if key.startswith("model/")}

    def stopped(self, after: int, *, by: str = "save", behind_ckpts: int = 0, **env: str) -> Process:
        """A life that was stopped in this epoch or a little later, and not before it made so many ckpts."""
        known = len(self.ckpts())
        run = self.run(**env)
        run.wait_for(f"^epoch {after}$")
        until(lambda: len(self.ckpts()) >= known + behind_ckpts, f"{behind_ckpts} ckpts", context=lambda: run.text)
        if by == "save":
            self.save()
        else:
            run.kill()
        assert run.wait() == 143, run.text
        return run


@pytest.fixture
def old(job: Job) -> Old:
    return Old(job)


def step_of(ckpt: str) -> int:
    return int(ckpt.split("-")[1])


def epoch_of(run: Process) -> int:
    """The epoch that a run says it was loaded from."""
    return int(run.wait_for(r"^load migration ckpt from epoch (-?\d+), metrics: \{")[1])


# It runs unchanged.


def test_the_readme_differs_by_its_import_line_only() -> None:
    """What these tests run is the README's text."""
    ours, theirs = SNIPPET.splitlines(), README.splitlines()

    assert [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b] == [
        ("from migrator import migrator", "from migration import migrator")
    ]


def test_the_readme_is_stopped_and_goes_on(old: Old) -> None:
    """Its variables, its words, its four lines: `init`, `save`, `resume`, and the print shows where it went on."""
    first = old.run()
    first.wait_for("^epoch 5$")
    assert old.word() == "init"
    old.save()
    assert first.wait() == 143, first.text
    assert old.word() == "resume"
    (ckpt,) = old.ckpts()
    assert "load migration ckpt" not in first.text

    second = old.run(EPOCHS=str(step_of(ckpt) // 4 + 5))
    assert second.wait() == 0, second.text
    epoch = epoch_of(second)
    assert epoch == step_of(ckpt) // 4 - 1 >= 5
    metircs = {"epoch": epoch, "best_epoch": epoch, "best_acc": epoch / 7}
    assert f"\nload migration ckpt from epoch {epoch}, metrics: {metircs}\n" in second.text
    assert re.findall(r"^epoch (\d+)$", second.text, re.MULTILINE)[0] == str(epoch + 1)
    assert not old.signal.exists()


def test_its_variables_say_where_things_are(old: Old) -> None:
    """The file's directory is the root, and the signal file is the one that is named; nothing lies elsewhere."""
    run = old.stopped(3)

    assert sorted(path.name for path in old.volume.iterdir()) == ["default"]
    assert f"root={old.volume} " in run.text
    assert f"listening signal={old.signal} " in run.text
    assert not old.job.root.exists()
    assert not old.job.signal.exists()


def test_implied_safe_points_are_told_with_their_price(old: Old) -> None:
    """The four lines alone repeat an interrupted epoch; one line in the log says what would not."""
    run = old.stopped(3)

    (event,) = run.events("implied_safe_points")
    assert "migrator.batches(loader)" in event["means"]


# The file it left.


def net() -> nn.Module:
    found: dict[str, Any] = {"__name__": "net"}
    exec(NET, found)
    made: nn.Module = found["Net"](1000)
    return made


def theirs(old: Old, *, prefix: str = "") -> dict[str, Any]:
    """What the predecessor would have saved after 12 steps in epoch 2."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    for _ in range(12):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    state = {prefix + key: value for key, value in model.state_dict().items()}
    held = {
        "model": state,
        "optimizer": optimizer.state_dict(),
        "metircs": {"epoch": 2, "best_epoch": 1, "best_acc": 0.25},
    }
    torch.save(held, old.file)
    return held


@pytest.mark.parametrize("prefix", ["", "module."])
def test_its_file_is_loaded(old: Old, prefix: str) -> None:
    """Model, momentum and metrics are those of the file, also when it was saved from within DDP; the file stays."""
    held = theirs(old, prefix=prefix)
    before = old.file.read_bytes()
    run = old.run(EPOCHS="4", MOMENTUM="0.5")
    assert run.wait() == 0, run.text

    assert "load migration ckpt from epoch 2, metrics: {'epoch': 2, 'best_epoch': 1, 'best_acc': 0.25}" in run.text
    assert f"loaded_legacy file={old.file}" in run.text
    weight, momentum = held["model"][f"{prefix}layers.0"][0], held["optimizer"]["state"][0]["momentum_buffer"][0]
    for _ in range(4):
        momentum = 0.5 * momentum - 1
        weight = weight - momentum
    assert run.wait_for(r"^done (\S+)")[1] == str(float(weight))
    assert old.file.read_bytes() == before


def test_our_ckpts_come_before_its_file(old: Old) -> None:
    """The file is where the first life begins; later ones go on from what we saved since."""
    theirs(old)
    first = old.stopped(4, MOMENTUM="0.5")
    assert epoch_of(first) == 2
    second = old.run(EPOCHS="1", MOMENTUM="0.5")

    assert second.wait() == 0, second.text
    assert epoch_of(second) >= 4
    assert "loaded_legacy" not in second.text


def test_a_file_that_is_not_loaded_is_an_error(old: Old) -> None:
    """A script that ignores it would train from the start: told before its first step."""
    theirs(old)
    old.job.write(script(snippet=SNIPPET.replace("if migrator.resume:", "if False:")))
    run = old.run()

    assert run.wait() == 1
    assert f"ResumeIgnored: there is a ckpt to go on from ({old.file} " in run.text
    assert "epoch 0" not in run.text
    assert old.run(MIGRATOR_RESUME="never", EPOCHS="1").wait() == 0


def test_a_file_that_does_not_fit_is_refused_with_all_differences(old: Old) -> None:
    """Names and shapes; nothing is half loaded, and what to do stands there."""
    held = theirs(old)
    held["model"]["layers.0"] = torch.zeros(7)
    held["scheduler"] = {}
    del held["metircs"]
    torch.save(held, old.file)
    run = old.run()

    assert run.wait() == 1
    for line in (
        f"CkptMismatch: {old.file} does not fit what is registered:",
        "in the file, not registered: scheduler",
        "registered, not in the file: metircs",
        "model/layers.0: shape is (1000,) here, (7,) there",
    ):
        assert line in run.text


class Evil:
    """A pickle that leaves a file behind when somebody loads it."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._trace),)


@pytest.mark.parametrize("how", ["torch.save", "plain pickle"])
def test_a_malicious_file_runs_no_code(old: Old, how: str) -> None:
    """It is refused by name, before anything in it has run."""
    trace = old.job.directory / "was here"
    held = {"model": net().state_dict(), "optimizer": Evil(trace), "metircs": {}}
    if how == "torch.save":
        torch.save(held, old.file)
    else:
        old.file.write_bytes(pickle.dumps(Evil(trace)))
    run = old.run()

    assert run.wait() == 1
    assert f"CkptCorrupt: {old.file} is not a file that can be loaded without running code from it" in run.text
    assert "Move it away to start without it." in run.text
    assert not trace.exists()
    with old.file.open("rb") as file:  # it does work on those who load it trustingly
        if how == "plain pickle":
            pickle.load(file)
            assert trace.exists()


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_a_half_written_file_of_theirs_is_named(old: Old, size: int) -> None:
    """It never starts over silently; without it, or knowingly, the job starts."""
    theirs(old)
    os.truncate(old.file, size)
    run = old.run()

    assert run.wait() == 1
    assert f"CkptCorrupt: {old.file} " in run.text
    assert old.run(MIGRATOR_RESUME="never", EPOCHS="1").wait() == 0
    old.file.unlink()
    assert "done" in old.run(EPOCHS="1", MIGRATOR_JOB="moved").wait_for("^done")[0]


# What went wrong there.


def test_a_save_is_never_torn(old: Old) -> None:
    """In the middle of steps, again and again: its 24 tensors held 21 different steps, ours hold one."""
    env = {"WIDTH": "100000", "MIGRATOR_EVERY": "2", "MIGRATOR_KEEP": "1000"}
    epoch, step = -1, 0
    for by in ("save", "SIGTERM", "save"):
        known = set(old.ckpts())
        old.stopped(step // 4 + 2, by=by, behind_ckpts=2, **env)

        made = [ckpt for ckpt in old.ckpts() if ckpt not in known]
        assert len(made) > 1
        for ckpt in made:
            tensors = old.tensors(ckpt)
            assert len(tensors) == 24
            held = {float(value) for tensor in tensors.values() for value in (tensor.min(), tensor.max())}
            assert held == {step_of(ckpt)}
            # An epoch that was interrupted is repeated from its start.
            assert metircs_of(old, ckpt)["epoch"] == epoch + (step_of(ckpt) - step) // 4
        epoch, step = metircs_of(old, made[-1])["epoch"], step_of(made[-1])


def metircs_of(old: Old, ckpt: str) -> dict[str, Any]:
    manifest = json.loads((old.volume / "default" / ckpt / "manifest.json").read_bytes())
    found: dict[str, Any] = manifest["manifest"]["objects"]["metircs"]["tree"]
    return found


def test_a_stale_save_does_not_overwrite_a_good_ckpt(old: Old) -> None:
    """A restarted container finds the old `save`: theirs saved fresh weights over everything."""
    old.stopped(5)
    (ckpt,) = old.ckpts()
    files = {path: path.read_bytes() for path in (old.volume / "default" / ckpt).iterdir()}

    # An hour old: it is history, and the job goes on from the good ckpt.
    old.save()
    os.utime(old.signal, (1e9, 1e9))
    epoch = step_of(ckpt) // 4 - 1
    run = old.run(EPOCHS=str(epoch + 100))
    assert run.wait() == 0, run.text
    assert epoch_of(run) == epoch

    # Quite new: perhaps a rank started again in a dying pod. It leaves, and saves nothing in place of what is there.
    old.job.write(script(snippet=SNIPPET.replace("if migrator.resume:", "time.sleep(60)\nif migrator.resume:")))
    old.save()
    again = old.run()
    assert again.wait() == 143, again.text
    assert old.word() == "resume"
    assert f"ckpt={ckpt}\n" in old.signal.read_text()
    assert {path: path.read_bytes() for path in files} == files
    assert old.ckpts() == [ckpt]


def test_a_crash_after_a_resume_does_not_start_at_0(old: Old) -> None:
    """Theirs forgot the ckpt once it was loaded; ours stays until a newer one is durable."""
    old.stopped(5)
    (ckpt,) = old.ckpts()
    for _ in range(2):
        crashed = old.run()
        crashed.wait_for(f"^epoch {step_of(ckpt) // 4 + 2}$")
        crashed.kill(signal.SIGKILL)
        assert crashed.wait() == -signal.SIGKILL
    last = old.run(EPOCHS="1")

    assert last.wait() == 0, last.text
    assert epoch_of(last) == step_of(ckpt) // 4 - 1
    assert last.wait_for(r"^done (\S+)")[1] == str(float(step_of(ckpt)))


def test_a_half_written_ckpt_does_not_fail_every_restart(old: Old) -> None:
    """It is named and left where it is, and the one before is loaded; at each restart until there is a newer one."""
    old.stopped(5)
    good = old.ckpts()[-1]
    old.stopped(step_of(good) // 4 + 5)
    half = old.ckpts()[-1]
    part = old.volume / "default" / half / "part-00000-of-00001.safetensors"
    os.truncate(part, part.stat().st_size // 2)

    for _ in range(2):
        run = old.run(EPOCHS="1")
        assert run.wait() == 0, run.text
        assert run.events("ckpt_bad")[0]["ckpt"] == half
        assert epoch_of(run) == step_of(good) // 4 - 1
    assert part.exists()


def test_lists_are_restored(old: Old) -> None:
    """Theirs restored what has load_state_dict, and dicts."""
    more = "losses, seen = [], set()\nmigrator.register('losses', losses)\nmigrator.register('seen', seen)\n"
    text = script(more=more).replace("    print(f", "    losses.append(epoch * 0.5)\n    seen.add(epoch)\n    print(f")
    old.job.write(text.replace('print("done",', 'print("lists", losses, seen)\nprint("done",'))
    old.stopped(5)
    epoch = step_of(old.ckpts()[0]) // 4 - 1
    run = old.run(EPOCHS="1")

    assert run.wait() == 0, run.text
    epochs = range(epoch + 1)
    assert f"lists {[epoch * 0.5 for epoch in epochs]} {set(epochs)}" in run.text


def test_a_second_save_holds_one_step_of_model_and_momentum(old: Old) -> None:
    """Theirs mixed the new model with the old momentum; each of ours is what that many steps make."""
    after = 3
    for _ in range(3):
        run = old.stopped(after, MOMENTUM="0.5")
        after = int(re.findall(r"^epoch (\d+)$", run.text, re.MULTILINE)[-1]) + 3

        ckpt = old.ckpts()[-1]
        model, other = net(), net()
        optimizer, expected = (torch.optim.SGD(m.parameters(), lr=1.0, momentum=0.5) for m in (model, other))
        registry = Registry()
        for name, value in {"model": model, "optimizer": optimizer, "metircs": {}}.items():
            registry.add(name, value)
        restore.load(PosixStorage(old.volume, "default"), ckpt, registry)
        for _ in range(step_of(ckpt)):
            expected.zero_grad()
            other().backward()
            expected.step()
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, two)
            assert torch.equal(optimizer.state[one]["momentum_buffer"], expected.state[two]["momentum_buffer"])


DDP = """
torch.distributed.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=0, world_size=1)
model = nn.parallel.DistributedDataParallel(model)
"""


@pytest.mark.parametrize("wrap", [DDP, "model = nn.DataParallel(model)\n"], ids=["DDP", "DataParallel"])
def test_keys_carry_no_module(old: Old, wrap: str) -> None:
    """What was saved from within a wrapper loads without it, and the other way round."""
    old.job.write(script(wrap=wrap))
    old.stopped(3)
    (ckpt,) = old.ckpts()
    assert sorted(old.tensors(ckpt)) == sorted(f"layers.{i}" for i in range(24))

    old.job.write(script())
    plain = old.stopped(step_of(ckpt) // 4 + 2)
    assert epoch_of(plain) == step_of(ckpt) // 4 - 1
    (old.job.directory / "store").unlink(missing_ok=True)
    old.job.write(script(wrap=wrap))
    wrapped = old.run(EPOCHS="1")
    assert wrapped.wait() == 0, wrapped.text
    assert epoch_of(wrapped) == metircs_of(old, old.ckpts()[-1])["epoch"]


def _can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    done = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, check=False)
    return done.returncode == 0


@pytest.mark.skipif(
    not _can_unshare(), reason="LOUD: PID 1 is not tested: it takes unshare and the right to make a PID namespace"
)
@pytest.mark.parametrize("by", ["SIGTERM", "save"])
def test_pid_1_leaves(old: Old, by: str) -> None:
    """Without a handler the kernel keeps SIGTERM from PID 1: theirs trained on until SIGKILL."""
    out = old.job.directory / "out.txt"
    env = {**os.environ, **old.job.env, "MIGRATOR_CKPT": "", "MIGRATOR_SIGNAL": "", "PYTHONPATH": str(ROOT)}
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, str(old.job.script)]
    with out.open("w") as file:
        outer = subprocess.Popen(command, env=env, cwd=old.job.directory, stdout=file, stderr=file)
    try:
        until(lambda: "\nepoch 3\n" in out.read_text(), "epoch 3", context=out.read_text)
        assert "pids=1\n" in old.signal.read_text()
        if by == "save":
            old.save()
        else:
            (inner,) = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
            os.kill(int(inner), signal.SIGTERM)
        assert outer.wait(60) == 143, out.read_text()
    finally:
        outer.kill()
        outer.wait()
    assert old.word() == "resume"
    assert len(old.ckpts()) == 1
