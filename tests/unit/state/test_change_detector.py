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

from migrator.ckpt import catalog, generations
from migrator.loop.gate import Gate
from migrator.save.attempt import Attempt
from migrator.save.context import SaveContext
from migrator.save.results import Saved, Unclean
from migrator.save.staging import StagingBuffer
from migrator.state.capture import Capture, Capturer
from migrator.state.change_detector import SAMPLED_TENSORS, Mark
from migrator.state.registry import Registry
from migrator.storage.posix import PosixStorage, PosixUpload
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


# One attempt, and what happens to the state meanwhile.


class Meddling(PosixStorage):
    """A volume that lets something happen when a part's file is opened, written to and finished."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "job")
        self.at_open: Callable[[], None] = lambda: None
        self.at_write: Callable[[], None] = lambda: None
        self.at_finish: Callable[[], None] = lambda: None

    def upload(self, name: str, *, size: int = 0) -> PosixUpload:
        file = super().upload(name, size=size)
        finish, write = file.finish, file.write

        def write_and_meddle(*what: Any, **more: Any) -> None:
            write(*what, **more)
            self.at_write()

        def finish_and_meddle() -> None:
            finish()
            self.at_finish()

        file.write, file.finish = write_and_meddle, finish_and_meddle  # type: ignore[method-assign]
        self.at_open()
        return file


class SwappingStaging(StagingBuffer):
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

    context: SaveContext
    storage: Meddling

    def safe_point(self, step: int) -> Capture:
        self.context.gate.publish(self.context.capturer.take(step, None, full=True))
        capture = self.context.gate.take(0)
        assert capture is not None
        return capture

    def run(self, capture: Capture, *, staging: StagingBuffer | None = None, may_open: bool = False) -> Saved:
        staging = staging or StagingBuffer()
        attempt = Attempt(self.context, capture, staging=staging, may_open=may_open, on_block=lambda done, total: None)
        return attempt.run()

    @property
    def ckpts(self) -> list[str]:
        return catalog.ckpts(self.storage, self.context.generation.lineage)

    def saved(self, name: str) -> dict[str, Any]:
        return read(self.storage.directory / name)[1]


def bench(directory: Path, **registered: Any) -> Bench:
    storage = Meddling(directory)
    registry = Registry()
    for name, value in registered.items():
        registry.add(name, value)
    capturer = Capturer(registry)
    generation = generations.claim(storage, fresh=False, about={})
    return Bench(SaveContext(storage, generation, "job", registry, capturer, Gate(capturer)), storage)


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
    assert work.context.gate._is_shut is not may_open


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("may_open", [False, True], ids=["last", "going on"])
def test_weights_swapped_in_before_the_attempt_are_not_saved(tmp_path: Path, way: str, may_open: bool) -> None:
    """Notice in an evaluation that runs with other weights: thrown away before a byte is written, with the name."""
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
    """The proof covers every byte, not the sampled ones."""
    memory = np.zeros(50_000, dtype=np.float32)
    work = bench(tmp_path, memory=torch.from_numpy(memory))
    capture = work.safe_point(3)
    work.storage.at_open = lambda: memory.__setitem__(1234, 1)
    work.storage.at_write = lambda: memory.__setitem__(1234, 0)

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
        work.run(capture, staging=SwappingStaging(swap.into, swap.back), may_open=True)

    assert thrown.value.names == ["model"]
    assert work.ckpts == []
    assert work.context.gate._is_shut


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
            work.context.gate._enter()
            tensor.add_(1)

    work.storage.at_open = finish
    with pytest.raises(Unclean) as thrown:
        work.run(capture, may_open=True)

    assert thrown.value.names == ["memory"]
    assert work.ckpts == []


class PeriodicSave(nn.Module):
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
    first = PeriodicSave(lambda: swap.into() if is_saving.is_set() else None)
    last = PeriodicSave(lambda: swap.back() if is_saving.is_set() else None)
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
        work.context.gate._enter()
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
    work.context.gate.open()
    saved = work.run(work.safe_point(2))

    assert same(model, work.saved(saved.ckpt)["model"])


TakeOut = Callable[[Any], Callable[[], None]]
"""Takes a submodule out; what it returns puts it back."""


def head_for_identity(model: Any) -> Callable[[], None]:
    head, model.head = model.head, nn.Identity()
    return lambda: setattr(model, "head", head)


def norm_for_identity(model: Any) -> Callable[[], None]:
    norm, model.body[1] = model.body[1], nn.Identity()
    return lambda: model.body.__setitem__(1, norm)


def deleted(model: Any) -> Callable[[], None]:
    head = model.head
    del model.head
    return lambda: setattr(model, "head", head)


def popped(model: Any) -> Callable[[], None]:
    last = model.body.pop(3)
    return lambda: model.body.append(last)


def with_head() -> nn.Module:
    model = nn.Module()
    model.body = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
    model.head = nn.Linear(8, 2)
    return model


@pytest.mark.parametrize("way", [head_for_identity, norm_for_identity, deleted, popped])
@pytest.mark.parametrize("is_put_back", [True, False])
def test_what_was_taken_out_of_a_module_is_missed(tmp_path: Path, way: TakeOut, is_put_back: bool) -> None:
    """For an evaluation by its features, or for good: no ckpt of the safe point lacks its tensors without a word."""
    model = with_head()
    its = bench(tmp_path, model=model)
    capture = its.safe_point(1)
    put_back = way(model)

    with pytest.raises(Unclean, match="model"):
        its.run(capture)
    assert its.ckpts == []
    its.context.gate.open()

    if is_put_back:
        put_back()
    saved = its.saved(its.run(its.safe_point(2)).ckpt)
    assert saved["model"].keys() - {".without_grad"} == model.state_dict().keys()


def test_what_a_module_leaves_out_of_its_state_is_not_missed(tmp_path: Path) -> None:
    """A frozen backbone, for example: it was never in a ckpt."""
    model = with_head()

    def leave_out(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        for key in [key for key in state if key.startswith("body")]:
            del state[key]

    model.register_state_dict_post_hook(leave_out)
    its = bench(tmp_path, model=model)
    assert its.saved(its.run(its.safe_point(1)).ckpt)["model"].keys() >= {"head.weight", "head.bias"}


def test_weights_in_the_place_of_others_are_told_from_changed_ones() -> None:
    """As long as those that are read hold what they held, and those that stayed too."""
    tensors = [torch.arange(100.0), torch.ones(100)]
    mark = Mark(tensors)
    swapped = [torch.zeros(100), tensors[1]]
    assert mark.has_only_moved(tensors)
    assert mark.has_only_moved(swapped)
    assert not mark.has_only_moved(swapped[:1])
    tensors[1].add_(0)  # it stayed, and counted a version
    assert not mark.has_only_moved(swapped)
    mark = Mark(tensors)
    tensors[0].data[-1] = 7  # a sampled element of what is read
    assert not mark.has_only_moved(swapped)


@pytest.mark.parametrize("moment", ["opened", "written"])
def test_other_weights_copied_in_for_a_while_are_never_called_saved(tmp_path: Path, moment: str) -> None:
    """Without a counted version: at the moment whose bytes are written, or behind it."""
    model = layers()
    work = bench(tmp_path, model=model)
    capture = work.safe_point(3)
    swap = Swap(model, "copy")
    if moment == "opened":
        work.storage.at_open, work.storage.at_write = swap.into, swap.back
    else:
        work.storage.at_write, work.storage.at_finish = swap.into, swap.back
    with pytest.raises(Unclean) as thrown:
        work.run(capture)
    assert thrown.value.names == ["model"]
    assert work.ckpts == []
