"""What the script registered stays its own: it can be copied, pickled and compiled as without us."""

from __future__ import annotations

from tests.support.harness import Job

COPIES = """
import copy
import io
import pickle
import sys
import warnings
import torch
from torch import nn
from migrator import migrator

warnings.simplefilter("error")
warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch.jit's own
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
migrator.register("model", model)
migrator.register("optimizer", optimizer)
migrator.register("scheduler", scheduler)
x = torch.randn(16, 4)


def train():
    optimizer.zero_grad()
    model(x).pow(2).sum().backward()
    optimizer.step()
    scheduler.step()


def copied(when):
    for thing in (model, optimizer, scheduler):
        copy.deepcopy(thing)
        assert b"migrator" not in pickle.dumps(thing), thing
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert b"migrator" not in buffer.getvalue()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    torch.jit.script(model)(x)
    torch.jit.trace(model.eval(), x)
    model.train()
    print("copied", when)


migrator.listening()
copied("behind listening()")
train()
copied("behind a step")
train()
copied("behind another step")
train()
if sys.argv[1:] == ["batches"]:
    for _ in migrator.batches(range(2)):
        copied("in the loop")
        train()
    copied("behind the loop")
else:
    phases, hooks = [], torch.nn.modules.module._global_forward_pre_hooks
    for prepare in (lambda: model[0], model.eval, model.train):
        prepare()(torch.randn(16, 4))
        phases.append((migrator._session.gate.phase.name, len(hooks)))
    print("phases", phases)
print("hooks", torch.nn.modules.module._global_forward_pre_hooks, model._forward_pre_hooks, model._forward_hooks)
"""


def test_a_registered_model_can_be_copied_pickled_and_scripted(job: Job) -> None:
    """At any moment, with safe points that are implied and with those of a loop."""
    job.write(COPIES)
    implied, marked = job.run(), job.run("batches", MIGRATOR_JOB="other", MIGRATOR_SIGNAL=str(job.directory / "signal"))
    assert implied.wait() == 0, implied.text
    assert marked.wait() == 0, marked.text

    assert implied.text.count("\ncopied ") == 3
    assert marked.text.count("\ncopied ") == 6
    assert implied.events("implied_safe_points")
    assert "phases [('DIRTY', 1), ('DIRTY', 1), ('CLEAN', 0)]" in implied.text, "a safe point is a step's end"
    assert "hooks OrderedDict() OrderedDict() OrderedDict()" in marked.text
