"""What a test puts before the lines of docs/recipes.md: it sees every step from outside, and stops the job.

    began JOB STEP          a life has loaded, or begins at 0
    lost JOB NUMBER DIGEST  a backward pass, and its loss
    trained JOB STEP DIGEST a step of an optimizer, and its parameters and gradients
    final JOB DIGEST        all that is registered, all models, and the random state
    moment NAME             where the job can be stopped, see `ground.py`

How many of them there were is registered beside what the recipe registers, so it comes back with it.
"""

import functools
import hashlib
import os
import sys
import time

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from migrator.api import Migrator
from tests.support.scripts.ground import LONG_S, moment

_seen = {"steps": 0, "backwards": 0, "evaluations": 0}
_registered = {}
_job = "default"
_listening, _load_ckpt, _register, _close = (
    getattr(Migrator, name) for name in ("listening", "load_ckpt", "register", "close")
)
_backward, _eval = torch.Tensor.backward, nn.Module.eval


def _bytes(value):
    if isinstance(value, torch.Tensor):
        return repr((value.dtype, tuple(value.shape))).encode() + value.detach().contiguous().view(-1).numpy().tobytes()
    if isinstance(value, dict):
        return b"".join(repr(key).encode() + _bytes(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return b"".join(_bytes(item) for item in value)
    if hasattr(value, "state_dict"):
        return _bytes(value.state_dict())
    if isinstance(value, torch.Generator):
        return _bytes(value.get_state())
    return repr(getattr(getattr(value, "bit_generator", value), "state", value)).encode()


def _digest(*values):
    return hashlib.sha256(_bytes(values)).hexdigest()[:16]


def _trained(optimizer, *_):
    _seen["steps"] += 1
    values = [[param, param.grad] for group in optimizer.param_groups for param in group["params"]]
    print("trained", _job, _seen["steps"], _digest(values))
    moment(f"{_job} step {_seen['steps']}")


@functools.wraps(_listening)
def _observed_listening(self, **given):
    global _job
    _job = given.get("job", "default")
    _seen.update(dict.fromkeys(_seen, 0))
    _register(self, "seen", _seen)
    _listening(self, every="off", **given)
    if not self.resume:
        print("began", _job, 0)


@functools.wraps(_register)
def _observed_register(self, name, value, **given):
    _register(self, name, value, **given)
    _registered[name] = value


@functools.wraps(_load_ckpt)
def _observed_load_ckpt(self):
    name = _load_ckpt(self)
    print("began", _job, _seen["steps"])
    return name


@functools.wraps(_close)
def _observed_close(self):
    finish()
    _close(self)


@functools.wraps(_backward)
def _observed_backward(self, *given, **named):
    _backward(self, *given, **named)
    _seen["backwards"] += 1
    print("lost", _job, _seen["backwards"], _digest(self))
    moment(f"{_job} backward {_seen['backwards']}")


@functools.wraps(_eval)
def _observed_eval(self):
    _seen["evaluations"] += 1
    name = f"{_job} evaluation {_seen['evaluations']}"
    moment(name)
    if os.environ.get("IS_LONG") == name:
        time.sleep(LONG_S)
    return _eval(self)


def finish():
    """What is to be compared at the end of a training: all that is registered, and each model, registered or not."""
    models = [value for value in vars(sys.modules["__main__"]).values() if isinstance(value, nn.Module)]
    if _registered:
        print("final", _job, _digest(_registered, models), torch.rand(1).item().hex())
    _registered.clear()


register_optimizer_step_post_hook(_trained)
Migrator.listening, Migrator.load_ckpt, Migrator.register = _observed_listening, _observed_load_ckpt, _observed_register
Migrator.close, torch.Tensor.backward, nn.Module.eval = _observed_close, _observed_backward, _observed_eval
