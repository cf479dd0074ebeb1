"""State that changes where only `optimizer.step()` should change it: seen, named, and never saved wrong."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from migrator.ckpt import generations as lineage
from migrator.state.change_detector import SAMPLED_TENSORS, Mark
from migrator.state.capture import Capture, Capturer
from migrator.loop.gate import Gate
from migrator.state.registry import Registry
from migrator.save.attempt import Aside, Attempt, Saved, Unclean, Workshop
from migrator.storage.posix import LocalStorage, PartFile
from tests.support.harness import Job, Process
from tests.support.ckpt_reader import read

# The mark of a tensor.

FORMS: dict[str, Callable[[], Tensor]] = {
    "a number": lambda: torch.ones(()),
    "one element": lambda: torch.ones(1),
    "bytes": lambda: torch.ones(3, dtype=torch.uint8),
    "half": lambda: torch.ones(5, 7, dtype=torch.bfloat16),
    "complex": lambda: torch.ones(4, dtype=torch.complex128),
    "plain": lambda: torch.ones(33, 17),
    "transposed": lambda: torch.ones(33, 17).t(),
    "channels last": lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "every third": lambda: torch.ones(40)[::3],
    "a column": lambda: torch.ones(9, 9)[:, 8],
    "the end of another": lambda: torch.ones(64)[60:],
    "expanded": lambda: torch.ones(1, 4).expand(6, 4),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_write_through_data_is_seen_though_neither_version_nor_address_shows_it(form: str) -> None:
    """Weights swapped in by `.data` are found by their bytes, however the tensor lies in memory."""
    tensor = FORMS[form]()
    mark = Mark([tensor])
    before = (tensor._version, tensor.data_ptr())

    assert not mark.differs([tensor])
    (tensor.data[0] if form == "expanded" else tensor.data).mul_(2)
    assert before == (tensor._version, tensor.data_ptr())
    assert mark.differs([tensor])


@pytest.mark.parametrize("form", FORMS)
def test_samples_lie_inside_the_tensor(form: str) -> None:
    """No sample is read before the first byte of a tensor's memory or behind the last."""
    tensor = FORMS[form]()
    storage = tensor.untyped_storage()

    taken = [(ctypes.addressof(place), ctypes.sizeof(place)) for place in Mark([tensor])._places._memory]

    assert taken
    assert all(
        storage.data_ptr() <= at and at + size <= storage.data_ptr() + storage.nbytes() and size > 0
        for at, size in taken
    )


def test_a_write_where_no_sample_lies_is_seen_by_the_version() -> None:
    """An ordinary in-place change of a single element is enough."""
    tensor = torch.zeros(1000)
    mark = Mark([tensor])

    tensor[3] = 1

    assert mark.differs([tensor])


@pytest.mark.parametrize("what", ["data", "tensor", "count"])
def test_an_exchange_is_seen_though_the_values_are_the_same(what: str) -> None:
    """A tensor with equal bytes at another place, and one more or fewer, is another state."""
    tensors = [nn.Parameter(torch.zeros(100)), nn.Parameter(torch.zeros(100))]
    mark = Mark(tensors)

    if what == "data":
        tensors[1].data = tensors[1].data.clone()
    elif what == "tensor":
        tensors[1] = nn.Parameter(torch.zeros(100))
    else:
        tensors.pop()

    assert mark.differs(tensors)


def test_of_many_tensors_a_spread_is_sampled() -> None:
    """Weights swapped in through `.data` as a whole are seen in a model of any size, first to last layer."""
    tensors = [torch.zeros(10) for _ in range(10 * SAMPLED_TENSORS)]
    mark = Mark(tensors)
    third = len(tensors) // 3

    for part in (tensors[:third], tensors[third : 2 * third], tensors[2 * third :]):
        for tensor in part:
            tensor.data.add_(1)
        assert mark.differs(tensors)
        for tensor in part:
            tensor.data.sub_(1)
        assert not mark.differs(tensors)


def test_empty_tensors_have_nothing_to_sample() -> None:
    """Tensors without elements, and lists without tensors, are marked like all others."""
    tensors = [torch.zeros(0), torch.zeros(0, 5), torch.zeros(3)[3:], torch.zeros(2)]
    mark = Mark(tensors)

    assert not mark.differs(tensors)
    assert not Mark([]).differs([])
    tensors[3].data.add_(1)
    assert mark.differs(tensors)


def test_a_tensor_of_another_shape_at_the_same_address_is_another_one() -> None:
    """Freed memory is used again: where the next mark looks must not be taken from a larger tensor that was there."""
    memory = np.zeros(1000, dtype=np.float32)
    large, small = torch.from_numpy(memory), torch.from_numpy(memory[:4])
    assert large.data_ptr() == small.data_ptr()
    mark = Mark([large])

    again = Mark([small], mark)

    end = small.data_ptr() + small.nbytes
    assert all(ctypes.addressof(place) + ctypes.sizeof(place) <= end for place in again._places._memory)
    assert mark.differs([small])
    assert not again.differs([small])


def test_places_are_used_again_while_the_tensors_stay() -> None:
    """The price of a mark is its samples; where to take them is found once."""
    tensors = [torch.zeros(10) for _ in range(3)]
    first = Mark(tensors)
    tensors[0].add_(1)

    second = Mark(tensors, first)

    assert second._places is first._places
    assert first.differs(tensors)
    assert not second.differs(tensors)


def test_tensors_without_version_counters_are_marked_by_their_bytes() -> None:
    """What an evaluation made under `inference_mode` may lie in a registered dict, and must not end the training."""
    with torch.inference_mode():
        tensor = torch.zeros(100)
    mark = Mark([tensor])

    assert not mark.differs([tensor])
    with torch.inference_mode():
        tensor.add_(1)
    assert mark.differs([tensor])


SWAPPED = """
import sys, threading
import torch
from migrator.state.change_detector import Mark

sys.setswitchinterval(1e-6)
marked, over = threading.Event(), False

def swap():
    while not over:
        if marked.wait(1):
            marked.clear()
            for param in params:
                param.data = torch.ones(1)  # the marked memory goes back to the system

params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(8)]
thread = threading.Thread(target=swap)
thread.start()
found = set()
for _ in range(250):
    for param in params:
        param.data = torch.zeros(1 << 18)
    mark = Mark(params)
    marked.set()
    while marked.is_set():
        found.add(mark.differs(params))
    found.add(mark.differs(params))
over = True
thread.join()
print("found", sorted(found))
"""


def test_data_swapped_while_it_is_being_compared_breaks_nothing(job: Job) -> None:
    """The training thread may exchange a `.data`, and free the old one, at any moment of the comparison."""
    job.write(SWAPPED)

    process = job.run()

    assert process.wait() == 0, process.text
    process.wait_for(r"^found \[False, True\]$")


# One attempt, and what happens to the state meanwhile.


class Meddling(LocalStorage):
    """A volume that lets something happen at the moment a part's file is opened, and when it is finished."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "job")
        self.at_open: Callable[[], None] = lambda: None
        self.at_finish: Callable[[], None] = lambda: None

    def write(self, name: str) -> PartFile:
        file = super().write(name)
        finish = file.finish

        def finish_and_meddle() -> None:
            finish()
            self.at_finish()

        file.finish = finish_and_meddle  # type: ignore[method-assign]
        self.at_open()
        return file


class SwappingAside(Aside):
    """Something happens before the copies are made and something after."""

    def __init__(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        super().__init__()
        self._before, self._after = before, after

    def copies(self, tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
        self._before()
        made = super().copies(tensors)
        self._after()
        return made


@dataclasses.dataclass
class Bench:
    """What an attempt needs, around registered objects."""

    shop: Workshop
    storage: Meddling

    def safe_point(self, step: int) -> Capture:
        self.shop.gate.publish(self.shop.capturer.take(step, None, full=True))
        capture = self.shop.gate.take(0)
        assert capture is not None
        return capture

    def run(self, capture: Capture, *, aside: Aside | None = None, may_open: bool = False) -> Saved:
        attempt = Attempt(
            self.shop, capture, aside=aside or Aside(), may_open=may_open, on_block=lambda done, total: None
        )
        return attempt.run()

    @property
    def ckpts(self) -> list[str]:
        return lineage.ckpts(self.storage, self.shop.generation.lineage)

    def saved(self, name: str) -> dict[str, Any]:
        return read(self.storage.directory / name)[1]


def bench(directory: Path, **registered: Any) -> Bench:
    storage = Meddling(directory)
    registry = Registry()
    for name, value in registered.items():
        registry.add(name, value)
    capturer = Capturer(registry)
    generation = lineage.claim(storage, fresh=False, about={})
    return Bench(Workshop(storage, generation, "job", registry, capturer, Gate(capturer)), storage)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(100, 50), nn.BatchNorm1d(50), nn.Linear(50, 2))


class Swap:
    """Other weights in the place of a module's own, as evaluations do it."""

    def __init__(self, module: nn.Module, way: str) -> None:
        self._slots = [(m, key) for m in module.modules() for key in m._parameters]
        self._way = way
        self._own: list[Any] = []

    def into(self) -> None:
        if self._own:
            return
        for module, key in self._slots:
            param = module._parameters[key]
            assert param is not None
            if self._way == "copy":
                self._own.append(param.data.clone())
                param.data.fill_(7)
            elif self._way == "data":
                self._own.append(param.data)
                param.data = torch.full_like(param, 7)
            else:  # as torch.func.functional_call
                self._own.append(param)
                module._parameters[key] = torch.full_like(param.data, 7)  # type: ignore[assignment]

    def back(self) -> None:
        for (module, key), own in zip(self._slots, self._own, strict=bool(self._own)):
            if self._way == "copy":
                module._parameters[key].data.copy_(own)  # type: ignore[union-attr]
            elif self._way == "data":
                module._parameters[key].data = own  # type: ignore[union-attr]
            else:
                module._parameters[key] = own
        self._own = []


WAYS = ["copy", "data", "functional"]


def same(one: nn.Module, saved: dict[str, Tensor]) -> bool:
    state = one.state_dict()
    return state.keys() == saved.keys() and all(torch.equal(state[key], saved[key]) for key in state)


@pytest.mark.parametrize("may_open", [False, True], ids=["last", "going on"])
def test_an_undisturbed_attempt_commits_the_safe_point(tmp_path: Path, may_open: bool) -> None:
    """The ordinary case: what is registered is what is saved, and the gate is open again only if the loop goes on."""
    model = layers()
    work = bench(tmp_path, model=model)

    saved = work.run(work.safe_point(3), may_open=may_open)

    assert work.ckpts == [saved.ckpt]
    assert same(model, work.saved(saved.ckpt)["model"])
    assert work.shop.gate._is_shut is not may_open


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("may_open", [False, True], ids=["last", "going on"])
def test_weights_swapped_in_before_the_attempt_are_not_saved(tmp_path: Path, way: str, may_open: bool) -> None:
    """News in an evaluation that runs with other weights: thrown away before a byte is written, with the name."""
    model = layers()
    work = bench(tmp_path, model=model)
    capture = work.safe_point(3)
    Swap(model, way).into()

    with pytest.raises(Unclean) as thrown:
        work.run(capture, may_open=may_open)

    assert thrown.value.names == ["model"]
    assert work.ckpts == []
    assert not list(work.storage.directory.glob("*/part-*"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moment", ["opened", "finished"])
def test_weights_swapped_in_while_the_part_is_written_are_seen_in_the_end(
    tmp_path: Path, way: str, moment: str
) -> None:
    """The marks are compared again before the commit."""
    model = layers()
    work = bench(tmp_path, model=model)
    capture = work.safe_point(3)
    swap = Swap(model, way)
    if moment == "opened":
        work.storage.at_open = swap.into
    else:
        work.storage.at_finish = swap.into

    with pytest.raises(Unclean) as thrown:
        work.run(capture)

    assert thrown.value.names == ["model"]
    assert work.ckpts == []


def test_weights_swapped_in_and_out_while_the_part_is_written_are_seen_by_their_digests(tmp_path: Path) -> None:
    """Written while swapped in, back in place when it is looked at: the bytes on the volume are not those in memory."""
    model = layers()
    work = bench(tmp_path, model=model)
    capture = work.safe_point(3)
    swap = Swap(model, "copy")
    work.storage.at_open, work.storage.at_finish = swap.into, swap.back

    with pytest.raises(Unclean) as thrown:
        work.run(capture)

    assert thrown.value.names == ["model"]
    assert work.ckpts == []


def test_one_element_changed_back_and_forth_is_seen_by_its_digest(tmp_path: Path) -> None:
    """The proof at the end covers every byte, not the sampled ones."""
    memory = np.zeros(50_000, dtype=np.float32)
    work = bench(tmp_path, memory=torch.from_numpy(memory))
    capture = work.safe_point(3)
    work.storage.at_open = lambda: memory.__setitem__(1234, 1)
    work.storage.at_finish = lambda: memory.__setitem__(1234, 0)

    with pytest.raises(Unclean) as thrown:
        work.run(capture)

    assert thrown.value.names == ["memory"]
    assert work.ckpts == []


@pytest.mark.parametrize("way", ["data", "functional"])
def test_handles_swapped_out_and_in_without_a_byte_changing_do_no_harm(tmp_path: Path, way: str) -> None:
    """The attempt holds on to the tensors of the safe point and does not read what is put in their place."""
    model = layers()
    work = bench(tmp_path, model=model)
    capture = work.safe_point(3)
    swap = Swap(model, way)
    work.storage.at_open, work.storage.at_finish = swap.into, swap.back

    saved = work.run(capture)

    assert same(model, work.saved(saved.ckpt)["model"])


def test_weights_swapped_in_and_out_while_they_are_copied_aside_are_seen(tmp_path: Path) -> None:
    """A loop that goes on gets a copy; a copy of other weights is found before the gate opens."""
    model = layers()
    work = bench(tmp_path, model=model)
    capture = work.safe_point(3)
    swap = Swap(model, "copy")

    with pytest.raises(Unclean) as thrown:
        work.run(capture, aside=SwappingAside(swap.into, swap.back), may_open=True)

    assert thrown.value.names == ["model"]
    assert work.ckpts == []
    assert work.shop.gate._is_shut


@pytest.mark.parametrize("comes_by", [False, True], ids=["not yet", "at the gate"])
def test_an_operation_under_way_while_the_state_is_copied_is_seen(tmp_path: Path, comes_by: bool) -> None:
    """It writes first and counts its version when done: the training thread itself finds it at its next step."""
    memory = np.zeros(50_000, dtype=np.float32)
    tensor = torch.from_numpy(memory)
    work = bench(tmp_path, memory={"tensor": tensor})
    capture = work.safe_point(3)
    memory[1234] = 1  # written, not counted, and none of the samples

    def finish() -> None:
        tensor.add_(0)
        if comes_by:
            work.shop.gate._enter()
            tensor.add_(1)

    work.storage.at_open = finish
    with pytest.raises(Unclean) as thrown:
        work.run(capture, may_open=True)

    assert thrown.value.names == ["memory"]
    assert work.ckpts == []


class Meeting(nn.Module):
    """A module at whose turn, in the order of saving, something happens."""

    def __init__(self, at_turn: Callable[[], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_state_dict_pre_hook(lambda *_: at_turn())


@pytest.mark.parametrize("way", ["data", "functional"])
def test_weights_swapped_in_while_they_are_looked_up_are_not_taken_for_the_own(tmp_path: Path, way: str) -> None:
    """Looked up in an evaluation that ends before the marks are compared: in place again, but another was taken."""
    model = layers()
    swap = Swap(model, way)
    is_saving = threading.Event()
    first = Meeting(lambda: swap.into() if is_saving.is_set() else None)
    last = Meeting(lambda: swap.back() if is_saving.is_set() else None)
    work = bench(tmp_path, first=first, model=model, last=last)
    capture = work.safe_point(3)
    is_saving.set()

    with pytest.raises(Unclean) as thrown:
        work.run(capture)

    assert thrown.value.names == ["model"]
    assert work.ckpts == []


class WithExtra(nn.Module):
    """A module that keeps a large tensor outside its parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = torch.zeros(30_000)

    def get_extra_state(self) -> dict[str, Tensor]:
        return {"bank": self.bank}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        self.bank.copy_(state["bank"])


class Holder:
    """Something of the script's own with a large tensor in its state."""

    def __init__(self) -> None:
        self.large = torch.zeros(30_000)

    def state_dict(self) -> dict[str, Tensor]:
        return {"large": self.large}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.large.copy_(state["large"])


def everything() -> dict[str, Any]:
    """Large state in every place where it can be, all zeros."""
    model = layers()
    for tensor in model.state_dict().values():
        tensor.zero_()
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        optimizer.state[param] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(param)}
    optimizer.param_groups[0]["preconditioner"] = torch.zeros(30_000)
    return {
        "model": model,
        "optimizer": optimizer,
        "extra": WithExtra(),
        "holder": Holder(),
        "memory": {"small": torch.zeros(2), "large": [torch.zeros(30_000), (torch.zeros(30_000),)]},
        "tensor": torch.zeros(30_000),
        "array": np.zeros(30_000),
    }


def tensors_of(everything: dict[str, Any]) -> list[Tensor]:
    model, optimizer, memory = everything["model"], everything["optimizer"], everything["memory"]
    found = [*model.state_dict().values(), optimizer.param_groups[0]["preconditioner"]]
    found += [tensor for state in optimizer.state.values() for tensor in state.values()]
    found += [memory["small"], memory["large"][0], memory["large"][1][0]]
    return [*found, everything["extra"].bank, everything["holder"].large, everything["tensor"]]


def flattened(value: Any) -> Iterator[Any]:
    if isinstance(value, (Tensor, np.ndarray)):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from flattened(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from flattened(item)


def test_nothing_is_read_from_live_memory_once_the_gate_is_open(tmp_path: Path) -> None:
    """The next step changes every byte of every kind of state while the part is being written: none of it is saved."""
    state = everything()
    work = bench(tmp_path, **state)
    capture = work.safe_point(3)

    def step() -> None:
        work.shop.gate._enter()
        for tensor in tensors_of(state):
            tensor.data.fill_(9)
        state["array"].fill(9)

    work.storage.at_open = step
    saved = work.run(capture, may_open=True)

    found = list(flattened(work.saved(saved.ckpt)))
    assert len(found) == len(tensors_of(state)) + 1
    assert all(not value.any() for value in found)


def test_whatever_changes_after_the_safe_point_is_a_copy_or_is_named(tmp_path: Path) -> None:
    """One tensor after the other, wherever it is held: never is its new value in the ckpt."""
    count, named = len(tensors_of(everything())), []
    for index in range(count):
        state = everything()
        work = bench(tmp_path / str(index), **state)
        capture = work.safe_point(3)
        tensors_of(state)[index].data.fill_(9)
        try:
            saved = work.run(capture)
        except Unclean as thrown:
            named += thrown.names
        else:
            assert not any(value.any() for value in flattened(work.saved(saved.ckpt)))

    assert sorted(set(named)) == ["extra", "holder", "memory", "model", "optimizer", "tensor"]


def test_what_a_module_loses_after_it_was_registered_does_not_end_the_training(tmp_path: Path) -> None:
    """Pruned, merged or set to None: the safe point is made without it, and saved."""
    model = layers()
    work = bench(tmp_path, model=model)
    work.safe_point(1)
    model[0].bias = None
    model[1].num_batches_tracked = None
    del model[2]._parameters["bias"]

    saved = work.run(work.safe_point(2))

    assert same(model, work.saved(saved.ckpt)["model"])


def test_state_of_a_layer_that_was_exchanged_is_named_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The new head is in the optimizer's group; what the optimizer keeps for the old one costs no save."""
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())

    def trained() -> None:
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()

    trained()
    work = bench(tmp_path, model=model, optimizer=optimizer)
    work.run(work.safe_point(1))
    model[2] = nn.Linear(50, 3)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    trained()
    with caplog.at_level(logging.WARNING):
        with contextlib.suppress(Unclean):  # the module has other parameters than when it was looked at
            work.run(work.safe_point(2))
        saved = [work.run(work.safe_point(step)) for step in (3, 4)]

    (named,) = [record.getMessage() for record in caplog.records]
    assert 'stale_state optimizer=AdamW parameters=2 shapes="(2, 50), (2,)"' in named
    for one in saved:
        state = work.saved(one.ckpt)["optimizer"]
        assert state["shapes"][0][-2:] == [[3, 50], [3]]
        assert sorted(state["state"]) == list(range(6))
        assert state["state"][4]["exp_avg"].shape == (3, 50)


def test_a_parameter_that_came_after_the_safe_point_is_waited_for(tmp_path: Path) -> None:
    """That is no stale state, and what is said of it is not that a tensor changed."""
    model, more = layers(), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    work = bench(tmp_path, optimizer=optimizer)
    capture = work.safe_point(1)
    optimizer.add_param_group({"params": [more]})
    optimizer.state[more]["momentum_buffer"] = torch.zeros(3)
    with pytest.raises(Unclean) as caught:
        work.run(capture)
    assert "its optimizer got a parameter of shape (3,)" in caught.value.why


def test_what_a_module_gains_is_saved_from_the_next_safe_point_on(tmp_path: Path) -> None:
    """A layer exchanged between two safe points is not mistaken for the one that was registered."""
    model = layers()
    work = bench(tmp_path, model=model)
    capture = work.safe_point(1)
    model[2] = nn.Linear(50, 3)
    model[2].register_buffer("seen", torch.ones(4))

    with pytest.raises(Unclean):
        work.run(capture)
    work.shop.gate.open()
    saved = work.run(work.safe_point(2))

    assert same(model, work.saved(saved.ckpt)["model"])


# Whole jobs.

PRELUDE = """
import os, signal, threading, time
import torch, xxhash
from torch import nn
from migrator import migrator

torch.manual_seed(0)
torch.set_num_threads(1)
LEAVE_AT, SAVE_AT = (set(map(int, os.environ.get(name, "").split())) for name in ("LEAVE_AT", "SAVE_AT"))
EPOCHS = int(os.environ.get("EPOCHS", "3"))
metrics = {"step": 0, "epoch": 0, "digest": ""}
registered = {}

def listen(**named):
    registered.update(named)
    for name, value in named.items():
        migrator.register(name, value)
    migrator.register("metrics", metrics)
    migrator.listening()
    if migrator.resume:
        print("loaded", migrator.load_ckpt(), metrics["step"], flush=True)
        assert metrics["digest"] == digest(), "other state was loaded than was told"

def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, nn.Module):
        value = value.state_dict()
    if isinstance(value, torch.optim.Optimizer):
        value = value.state_dict()["state"]
    return [t for v in value.values() for t in tensors(v)] if isinstance(value, dict) else []

def digest():
    total = xxhash.xxh3_128()
    for value in registered.values():
        for tensor in tensors(value):
            total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()

def told():
    # The end of a step: the state is whole here, and from now on metrics says what it is.
    metrics["step"] += 1
    metrics["digest"] = digest()
    print("step", metrics["step"], flush=True)

asked = set()

def news(moment):
    # At most once each: news that comes just now, while the state is not that of the safe point.
    if moment in asked or moment not in LEAVE_AT | SAVE_AT:
        return
    asked.add(moment)
    life = migrator._life
    while life._saver.is_busy and not life.gate._takers:  # with the news before
        time.sleep(0.001)
    before = life._saver.newest
    if moment in SAVE_AT:
        migrator.save_ckpt(wait=False)
    else:
        os.kill(os.getpid(), signal.SIGTERM)
        while not life.is_leaving:
            time.sleep(0.001)
    end = time.monotonic() + 10
    while time.monotonic() < end:  # until it was tried
        is_thrown_away = life.gate.capture.spoiled or life.gate.holds_main
        if life._saver.newest is not before or (is_thrown_away and life.gate._takers):
            print("tried", moment, flush=True)
            return
        time.sleep(0.001)
    print("was not tried", moment, flush=True)
"""


def check(job: Job) -> list[int]:
    """Every ckpt holds exactly what the script said of its step; the steps."""
    steps = []
    for name in job.ckpts():
        step, values = read(job.root / "default" / name)
        metrics = values.pop("metrics")
        assert digest(values) == metrics["digest"], f"{name} holds other state than that of step {metrics['step']}"
        steps.append(step)
    return steps


def digest(values: dict[str, Any]) -> str:
    import xxhash

    total = xxhash.xxh3_128()
    for value in values.values():
        state = value["state"] if isinstance(value, dict) and "state" in value else value
        for tensor in flattened(state):
            total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()


def named(process: Process, event: str) -> list[str]:
    return [fields["object"] for fields in process.events(event)]


EMA = """
model = nn.Sequential(nn.Linear(80, 80), nn.BatchNorm1d(80), nn.Linear(80, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
listen(model=model, optimizer=optimizer)
ema = [torch.full_like(p, 7) for p in model.parameters()]
loader = torch.ones(4, 8, 80).unbind()
while metrics["epoch"] < EPOCHS:
    for x in migrator.batches(loader):
        optimizer.zero_grad()
        model(x * (1 + metrics["step"])).square().mean().backward()
        optimizer.step()
        told()
    own = [p.detach().clone() for p in model.parameters()]
    for p, e in zip(model.parameters(), ema):
        p.data.copy_(e)
    news(metrics["epoch"])
    for p, o in zip(model.parameters(), own):
        p.data.copy_(o)
    metrics["epoch"] += 1
print("done", digest())
"""


def done(process: Process) -> str:
    assert process.wait() == 0, process.text
    return process.wait_for(r"^done (\w+)$").group(1)


def test_news_while_averaged_weights_are_swapped_in_for_an_evaluation(job: Job) -> None:
    """EMA weights copied in through `.data`: named, saved at the next safe point, and the resumed run ends the same."""
    job.write(PRELUDE + EMA)
    end = done(job.run(MIGRATOR_RESUME="never"))

    stopped = job.run(MIGRATOR_RESUME="never", LEAVE_AT="0")

    assert stopped.wait() == 143, stopped.text
    stopped.wait_for("^tried 0$")
    assert named(stopped, "changed_outside_step") == ["model"]
    assert check(job) == [4]
    assert done(job.run()) == end


def test_an_object_that_changes_again_and_again_is_saved_while_the_loop_stands(job: Job) -> None:
    """Seen twice, it is named once more; from then on every save asked for is made at a safe point, none skipped."""
    job.write(PRELUDE + EMA)

    process = job.run(SAVE_AT="0 1 2 3 4", EPOCHS="6", MIGRATOR_KEEP="10")

    assert process.wait() == 0, process.text
    assert named(process, "changed_outside_step") == ["model", "model"]
    assert named(process, "main_thread_only") == ["model"]
    assert check(job) == [4, 8, 12, 16, 20]


SWA = """
model = nn.Linear(80, 80, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
swa = torch.optim.swa_utils.AveragedModel(model)
listen(model=model, swa=swa, optimizer=optimizer)
loader = torch.ones(3, 2, 80).unbind()
while metrics["epoch"] < EPOCHS:
    for x in migrator.batches(loader):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        told()
    news(2 * metrics["epoch"])
    swa.update_parameters(model)
    news(2 * metrics["epoch"] + 1)
    metrics["epoch"] += 1
    metrics["digest"] = digest()
print("done", digest())
"""


def test_news_around_the_epochs_end_averages_the_weights_once(job: Job) -> None:
    """SWA at the end of an epoch: stopped just before or just after its update, the run ends as if never stopped."""
    job.write(PRELUDE + SWA)
    end = done(job.run(MIGRATOR_RESUME="never"))

    for moment, changed in (("2", []), ("3", ["swa"])):
        stopped = job.run(MIGRATOR_RESUME="never", LEAVE_AT=moment)

        assert stopped.wait() == 143, stopped.text
        assert check(job)[-1] == 6
        assert named(stopped, "changed_outside_step") == changed
        assert done(job.run()) == end


TARGET = """
model, target = nn.Linear(80, 80), nn.Linear(80, 80)
optimizer = torch.optim.Adam(model.parameters())
listen(model=model, target=target, optimizer=optimizer)
for step in range(30):
    optimizer.zero_grad()
    model(torch.ones(2, 80) * step).square().mean().backward()
    optimizer.step()
    if EARLY:
        told()
        migrator.safe_point()
        news(step)
    for t, p in zip(target.parameters(), model.parameters()):
        t.data.lerp_(p.data, 0.1)
    if EARLY:
        news(100 + step)
    else:
        told()
        migrator.safe_point()
        news(step)
"""


def test_a_target_network_updated_after_the_step_is_part_of_the_step(job: Job) -> None:
    """Updated between the step and the safe point, it is nothing out of the ordinary."""
    job.write(PRELUDE + "EARLY = False\n" + TARGET)

    process = job.run(SAVE_AT="3 4 5 6 20", MIGRATOR_KEEP="10")

    assert process.wait() == 0, process.text
    assert process.events("changed_outside_step") == []
    assert check(job) == [4, 5, 6, 7, 21]


def test_a_target_network_updated_after_the_safe_point_is_named(job: Job) -> None:
    """A safe point said too early: what changes behind it is never mixed with what was there."""
    job.write(PRELUDE + "EARLY = True\n" + TARGET)

    process = job.run(SAVE_AT="3 106 110 120", MIGRATOR_KEEP="10")

    assert process.wait() == 0, process.text
    assert set(named(process, "changed_outside_step")) == {"target"}
    assert named(process, "main_thread_only") == ["target"]
    steps = check(job)
    # Right behind the safe point nothing has changed yet; in the end the loop is held there.
    assert (steps[0], steps[-1]) == (4, 22)
    assert any(8 <= step <= 12 for step in steps)


FORWARD = """
class Momentum(nn.Module):
    # The second encoder follows the first in every training forward.
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(80, 80), nn.Linear(80, 80).requires_grad_(False)

    def forward(self, x):
        for k, q in zip(self.key.parameters(), self.query.parameters()):
            k.data = k.data * 0.9 + q.data * 0.1 if SWAPS else k.data.mul_(0.9).add_(q.data, alpha=0.1)
        return self.query(x) - self.key(x)

class Words(nn.Module):
    # Rows that are too long are shortened when they are looked up.
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(100, 80, max_norm=1.0)

    def forward(self, x):
        return self.rows(torch.arange(metrics["step"] % 9, 99)).sum(0) * x

SWAPS = os.environ["MODEL"] == "swaps"
model = Words() if os.environ["MODEL"] == "words" else Momentum()
optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
listen(model=model, optimizer=optimizer)
loader = torch.ones(6, 2, 80).unbind()
while metrics["epoch"] < EPOCHS:
    for x in migrator.batches(loader):
        optimizer.zero_grad()
        y = model(x)
        news(metrics["step"])
        y.square().mean().backward()
        optimizer.step()
        told()
    metrics["epoch"] += 1
print("done", digest())
"""


@pytest.mark.parametrize("model", ["momentum", "swaps", "words"])
def test_weights_that_change_in_forward_are_saved_as_they_were_at_a_safe_point(job: Job, model: str) -> None:
    """A momentum encoder, `Embedding(max_norm)`: named, then saved while the loop stands, also when leaving."""
    job.write(PRELUDE + FORWARD)
    job.env["MODEL"] = model
    end = done(job.run(MIGRATOR_RESUME="never"))

    stopped = job.run(MIGRATOR_RESUME="never", SAVE_AT="3 7 9", LEAVE_AT="12", MIGRATOR_KEEP="10")

    assert stopped.wait() == 143, stopped.text
    assert set(named(stopped, "changed_outside_step")) == {"model"}
    assert named(stopped, "main_thread_only") == ["model"]
    first, *_, last, left = check(job)
    # The second try goes beside the loop as well, whose next forward may come too soon; the third holds it.
    assert 4 <= first <= 8
    assert (last, left) == (10, 13)
    assert done(job.run()) == end


MEMORY = """
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
memory = {"seen": torch.zeros(100, 100), "count": 0}
listen(model=model, optimizer=optimizer, memory=memory)
loader = torch.ones(4, 2, 8).unbind()
while metrics["epoch"] < EPOCHS:
    for x in migrator.batches(loader):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        told()
    seen = memory["seen"]
    if os.environ["WAY"] == "version":
        seen[metrics["epoch"], 3] += 1
    elif os.environ["WAY"] == "data":
        seen.data.add_(1)
    else:
        memory["seen"] = seen + 1
    memory["count"] += 1
    news(metrics["epoch"])
    metrics["epoch"] += 1
    metrics["digest"] = digest()
print("done", digest())
"""


@pytest.mark.parametrize("way", ["version", "data"])
def test_a_large_tensor_in_a_registered_dict_that_changes_in_an_evaluation_is_named(job: Job, way: str) -> None:
    """What is too large to copy at each safe point must not be saved half new."""
    job.write(PRELUDE + MEMORY)
    job.env["WAY"] = way
    end = done(job.run(MIGRATOR_RESUME="never"))

    stopped = job.run(MIGRATOR_RESUME="never", SAVE_AT="0", LEAVE_AT="1", MIGRATOR_KEEP="10")

    assert stopped.wait() == 143, stopped.text
    assert named(stopped, "changed_outside_step") == ["memory", "memory"]
    assert check(job) == [4, 8]
    assert done(job.run()) == end


def test_a_large_tensor_in_a_registered_dict_may_be_exchanged(job: Job) -> None:
    """Another tensor under the same key leaves the safe point's own untouched: it is saved at once."""
    job.write(PRELUDE + MEMORY)
    job.env["WAY"] = "exchanged"
    end = done(job.run(MIGRATOR_RESUME="never"))

    stopped = job.run(MIGRATOR_RESUME="never", LEAVE_AT="1")

    assert stopped.wait() == 143, stopped.text
    assert stopped.events("changed_outside_step") == []
    assert check(job) == [8]
    assert done(job.run()) == end


UNREGISTERED = """
model = nn.Linear(700, 700)
known = torch.optim.SGD([model.bias], lr=0.1, momentum=0.9)
unknown = torch.optim.SGD([model.weight], lr=0.1)
listen(model=model, known=known)
over = threading.Event()

def ask():
    pause = torch.Generator().manual_seed(1)
    for _ in range(25):
        time.sleep(0.01 * torch.rand((), generator=pause).item())
        migrator.save_ckpt()
    over.set()

threading.Thread(target=ask).start()
loader = torch.ones(6, 2, 700).unbind()
while not over.is_set():
    for x in migrator.batches(loader):
        for optimizer in (unknown, known):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            model(x)
        metrics["step"] += 1
        metrics["digest"] = digest()
"""


def test_an_optimizer_that_is_not_registered_changes_registered_weights_behind_the_gate(job: Job) -> None:
    """Its steps wait for a save as all others do, and it is named, since its own state is not saved."""
    job.write(PRELUDE + UNREGISTERED)

    process = job.run(MIGRATOR_KEEP="50")

    assert process.wait() == 0, process.text
    assert len(check(job)) >= 5
    assert [fields["changes"] for fields in process.events("unregistered_optimizer")] == ["model"]
    assert process.events("changed_outside_step") == []


LOADER_DIES = """
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = [0.0] * 300_000
listen(model=model, optimizer=optimizer)

class Loader:
    def __len__(self):
        return 40

    def __iter__(self):
        for batch in range(40):
            if batch == 30:
                os.kill(os.getpid(), signal.SIGTERM)
                while not migrator._life.is_leaving:
                    time.sleep(0.001)
                raise RuntimeError("the workers died with the process group")
            yield torch.ones(2, 8)

for x in migrator.batches(Loader()):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    told()
"""


@pytest.mark.parametrize("why", ["costly", "held"])
def test_a_loader_that_dies_with_the_pod_leaves_a_safe_point_that_can_be_saved(job: Job, why: str) -> None:
    """With no next batch the loop stands at its last safe point, though a capture is costly or has to be held."""
    body = LOADER_DIES
    if why == "costly":
        body = body.replace("listen(model", 'metrics["losses"] = losses\nlisten(model')
    else:
        body = body.replace("for x in", "migrator._life.gate.holds_main = True\nfor x in")
    job.write(PRELUDE + body)

    process = job.run()

    assert process.wait() == 143, process.text
    if why == "costly":
        assert process.events("capture_costly") != []
    assert check(job) == [30]
