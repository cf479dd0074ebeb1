"""How an epoch of a foreign loader is begun again, so that it hands out what it handed out before.

At the start of an epoch everything is noted that decides which batches come: the random
states, and along the loader's chain (batch sampler, sampler, theirs, and the dataset) each
generator, each object that tells its state, and the plain attributes of samplers. A resume
puts that back, begins the epoch once more and drops what was trained already. Then all
generators are put to where the ckpt found them: some are drawn from in the loop as well.

Workers that persist are the exception to starting anew: they keep their random streams from
one epoch to the next, and draw their seed once a life. Here they are seeded anew at each
start of an epoch, from the random state of the main process but without drawing from it.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.utils import data as torch_data
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from migrator.state.adapters import base as kinds
from migrator.state import random_state as randomness
from migrator.ckpt import codec as tree
from migrator.errors import RegistrationError, UsageError
from migrator.events import log
from migrator.data.sampler import ElasticSampler

_CHAIN = ("dataset", "batch_sampler", "sampler", "generator")
"""The dataset first: samplers hold it too, and there it would be taken for a part of theirs."""
_LEAVES = (
    *(str, bytes, int, float, complex, bool, type(None), type, Tensor, np.ndarray, nn.Module, torch.optim.Optimizer),
    *(FunctionType, MethodType, BuiltinFunctionType, ModuleType, torch.device, torch.dtype),
)
_LISTED = (list, tuple, dict, np.ndarray, Tensor)
_DECIDES_ORDER = ("epoch", "seed", "shuffle", "drop_last", "num_replicas", "rank", "start_index")
"""Of a `DistributedSampler`; the last one its elastic subclass has."""
_MOST_OBJECTS = 2000
_DEEPEST = 12
_MOST_ITEMS = 64
_SAMPLED = 256


class DrawnOrder:
    """Stands in for the iterator of a sampler while an epoch is replayed: does it draw as it goes along?

    Then what the loop draws in between belongs to the order, and is not there in a replay.
    """

    def __init__(self, iterator: Any, loader: Any) -> None:
        self._drawn: set[str] = set()
        sampler = getattr(loader, "batch_sampler", None)
        sampler = getattr(loader, "sampler", None) if sampler is None else sampler
        inner = getattr(sampler, "sampler", sampler)
        is_of_torch = all(type(part).__module__.startswith("torch.") for part in (sampler, inner))
        draws_at_once = is_of_torch and not (isinstance(inner, RandomSampler) and inner.replacement)
        self._iterator = iterator
        self._order: Any = getattr(iterator, "_sampler_iter", None)
        self._is_put = self._order is not None and not draws_at_once and not getattr(loader, "num_workers", 0)
        self._has_begun = False
        if self._is_put:
            iterator._sampler_iter = self

    def __iter__(self) -> DrawnOrder:
        return self

    def __next__(self) -> Any:
        before = randomness.capture() if self._has_begun else None
        self._has_begun = True
        try:
            return next(self._order)
        finally:
            if before is not None:
                self._drawn |= _different(before)

    def take_away(self) -> None:
        if self._is_put:
            self._iterator._sampler_iter = self._order

    def is_lost(self, at_safe_point: Mapping[str, Any]) -> bool:
        """What it draws from was drawn from by others as well."""
        return bool(self._drawn & _different(at_safe_point))


def _different(before: Mapping[str, Any]) -> set[str]:
    """The main process' generators that have moved on."""
    now = randomness.capture()
    return {name for name in now if name in before and not _are_equal(now[name], before[name])}


class Makers:
    """Everything along a loader's chain that decides which batches come, by its path."""

    def __init__(self, loader: Any) -> None:
        self.generators: dict[str, Any] = {}
        self.stateful: dict[str, Any] = {}
        self.plain: dict[str, Any] = {}
        """Samplers and streams that only have attributes."""
        self._holders: dict[str, Any] = {}
        """Samplers, by the path of the generator they draw the order from."""
        self._has_workers = bool(getattr(loader, "num_workers", 0))
        self.is_cut = False
        """There is more than was looked through."""
        self._seen: set[int] = set()
        self._left = _MOST_OBJECTS
        self._kept: list[Any] = []
        self._walk_chain("", loader, 0)
        if not isinstance(loader, DataLoader):
            self._walk("loader", loader, orders=True, depth=0)

    def _walk_chain(self, prefix: str, loader: Any, depth: int) -> None:
        for name in _CHAIN:
            part = getattr(loader, name, None)
            orders = name != "dataset" or isinstance(part, IterableDataset)
            if part is not loader:
                # A data set of many objects is not to keep samplers from being looked at.
                self._left = _MOST_OBJECTS
                self._walk(prefix + name, part, orders=orders, depth=depth + 1)

    def _walk(self, path: str, part: Any, *, orders: bool, depth: int) -> None:
        """`orders`: the part decides the order of the samples; else it only makes them."""
        if isinstance(part, (_LEAVES, ElasticSampler)) or id(part) in self._seen:
            return
        self._left -= 1
        if self._left < 0 or depth > _DEEPEST:
            self.is_cut = True
            return
        self._seen.add(id(part))
        self._kept.append(part)  # its id stays its own
        if randomness.is_generator(part):
            self.generators[path] = part
            return
        if isinstance(part, (list, tuple, dict)):
            self._walk_items(path, part, orders=orders, depth=depth)
            return
        if isinstance(part, DataLoader):
            self._walk_chain(f"{path}.", part, depth)
            return
        if orders:
            if _tells_its_state(part):
                self.stateful[path] = part
            else:
                self.plain[path] = part
        for name, item in _attributes(part).items():
            if orders and randomness.is_generator(item):
                self._holders.setdefault(f"{path}.{name}", part)
            self._walk(f"{path}.{name}", item, orders=orders and name != "dataset", depth=depth + 1)

    def _walk_items(self, path: str, part: Any, *, orders: bool, depth: int) -> None:
        if orders and depth <= 1:
            self.plain[path] = part
        # A long list mostly holds samples.
        for key, item in part.items() if isinstance(part, dict) else enumerate(part):
            is_of_data = isinstance(item, (torch_data.Dataset, torch_data.Sampler)) or randomness.is_generator(item)
            if len(part) <= _MOST_ITEMS or is_of_data:
                self._walk(f"{path}[{key!r}]", item, orders=orders, depth=depth + 1)

    def check(self) -> None:
        """Refuse what cannot be put back, and say where nobody looked."""
        if self.is_cut:
            log(
                "loader_too_large",
                level=logging.WARNING,
                objects=_MOST_OBJECTS,
                levels=_DEEPEST,
                means="the loader holds more objects, or deeper ones, than are looked through for generators; what "
                "is not found does not come back: register those generators",
            )
        for path, part in self.plain.items():
            for name, value in _attributes(part).items():
                if isinstance(value, GeneratorType) or _is_iterator(value):
                    raise UsageError(
                        f"batches(loader): {path}.{name} is a {type(value).__name__}; where it stands is not known, "
                        f"so the order of the samples could not be made again after a resume. Give the "
                        f"{type(part).__name__} state_dict() and load_state_dict(), or let its __iter__ begin anew."
                    )

    def state(self) -> dict[str, Any]:
        """What the typed tree can hold."""
        found: dict[str, Any] = {
            "generators": self.generator_states(),
            "stateful": {path: _told(path, part) for path, part in self.stateful.items()},
            "plain": {path: state for path, part in self.plain.items() if (state := _plain_state(part))},
        }
        return found

    def generator_states(self, *, but: Iterable[Any] = ()) -> dict[str, Any]:
        """`but`: those that are registered are saved by themselves."""
        left_out = {id(part) for part in but}
        return {path: state_of(part) for path, part in self.generators.items() if id(part) not in left_out}

    def restore_generators(self, states: Mapping[str, Any]) -> None:
        """Where the ckpt found them: some are drawn from in the loop as well, or while a sample is made.

        Not with workers: how far the order is drawn ahead depends on their number.
        """
        if not self._has_workers:
            for path, state in states.items():
                if path in self.generators:
                    kinds.set_state(self.generators[path], state)

    def check_shared(self, at_safe_point: Mapping[str, Any]) -> None:
        """A generator that others draw from between two draws of the order: the order cannot be drawn again."""
        for path, state in at_safe_point.items():
            holder = self._holders.get(path)
            # torch's own draw the whole order at once, but for this one.
            is_drawn_ahead = type(holder).__module__.startswith("torch.") and not (
                isinstance(holder, RandomSampler) and holder.replacement
            )
            if self._has_workers or holder is None or is_drawn_ahead or path not in self.generators:
                continue
            if not _are_equal(state_of(self.generators[path]), state):
                raise UsageError(
                    f"batches(loader): {path} draws the order of the samples bit by bit, and the script draws from it "
                    f"in between, so the order of the {type(holder).__name__} cannot be drawn again without it. "
                    "Give the sampler a generator of its own, or begin the epoch anew: MIGRATOR_LOOPS=anew."
                )

    def is_next_epoch(self, state: Mapping[str, Any]) -> bool:
        """The epoch of `state` is over, and the script has told its `DistributedSampler` the one behind it.

        Raises if it is in neither of them.
        """
        for path, part in self.plain.items():
            there = state["plain"].get(path, {}).get("values", {})
            if isinstance(part, DistributedSampler) and "epoch" in there:
                if part.epoch == there["epoch"] + 1:
                    return True
                _check_distributed(path, part, there)
        return False

    def restore(self, state: Mapping[str, Any]) -> None:
        for kind, mine in (("generators", self.generators), ("stateful", self.stateful)):
            self._compare(set(state[kind]) ^ set(mine))
        self._compare(set(state["plain"]) - set(self.plain))
        for path, values in state["plain"].items():
            _restore_plain(path, self.plain[path], values)
        for path, part in self.stateful.items():
            _tell(part, state["stateful"][path])
        for path, part in self.generators.items():
            kinds.set_state(part, state["generators"][path])

    @staticmethod
    def _compare(different: set[str]) -> None:
        if different:
            raise UsageError(
                f"batches(loader): the loader is not made as it was when the ckpt was written ({_listed(different)} is "
                "there or here only), so its epoch cannot be gone on with. Give it back its samplers and generators, "
                "or begin the epoch anew: MIGRATOR_LOOPS=anew."
            )


def _listed(paths: Iterable[str]) -> str:
    return ", ".join(sorted(paths))


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and all(_are_equal(one[key], other.get(key)) for key in one)
    if isinstance(one, (list, tuple)) and len(one) < 16:
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, (Tensor, np.ndarray)):
        return bool((torch.as_tensor(one) == torch.as_tensor(other)).all())
    return bool(one == other)


def state_of(generator: Any) -> Any:
    return kinds.Generator(generator).capture()


def _attributes(part: Any) -> dict[str, Any]:
    found = dict(getattr(part, "__dict__", {}))
    for cls in type(part).__mro__:
        for name in getattr(cls, "__slots__", ()):
            if isinstance(name, str) and hasattr(part, name):
                found.setdefault(name, getattr(part, name))
    return found


def _is_iterator(value: Any) -> bool:
    return hasattr(value, "__next__") and type(value).__module__ in ("builtins", "itertools")


def _tells_its_state(part: Any) -> bool:
    pairs = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
    return any(all(callable(getattr(part, name, None)) for name in pair) for pair in pairs)


def _told(path: str, part: Any) -> Any:
    try:
        told = part.get_state() if hasattr(part, "get_state") and hasattr(part, "set_state") else part.state_dict()
        tree.scan(told, path)
    except Exception as error:  # whatever the script's own class raises
        why = str(error) if isinstance(error, RegistrationError) else repr(error)
        raise UsageError(f"batches(loader): the state of {path} cannot be saved: {why}") from error
    return kinds.copied(told)


def _tell(part: Any, state: Any) -> None:
    if hasattr(part, "get_state") and hasattr(part, "set_state"):
        part.set_state(state)
    else:
        part.load_state_dict(state)


def _plain_state(part: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"values": {}, "marks": {}}
    if isinstance(part, _LISTED):
        found["marks"][""] = _mark(part)
    is_of_torch = type(part).__module__.startswith("torch.")
    is_distributed = isinstance(part, DistributedSampler)
    for name, value in _attributes(part).items():
        if isinstance(value, (bool, int, float)) and (not is_of_torch or (is_distributed and name in _DECIDES_ORDER)):
            found["values"][name] = value
        elif isinstance(value, _LISTED) and name != "dataset":
            found["marks"][name] = _mark(value)
    return found if any(found.values()) else {}


def _mark(value: Any) -> str:
    """Tells two orders of samples apart: a spread of the items, and of what is in them."""
    if isinstance(value, (np.ndarray, Tensor)):
        flat = value.reshape(-1)
        count = len(flat)
        items: list[Any] = [flat[i].item() for i in _spread(count, _SAMPLED)] if _is_of_numbers(value) else []
    elif isinstance(value, dict):
        count, keys = len(value), list(value)
        items = [(repr(keys[i])[:100], _printed(value[keys[i]], 2)) for i in _spread(count, _SAMPLED)]
    else:
        count = len(value)
        items = [_printed(value[i], 2) for i in _spread(count, _SAMPLED)]
    return f"{count} {xxhash.xxh3_64(repr(items).encode()).hexdigest()}"


def _spread(count: int, most: int) -> list[int]:
    return sorted({i * count // most for i in range(most)}) if count > most else list(range(count))


def _is_of_numbers(value: Any) -> bool:
    return isinstance(value, Tensor) or value.dtype.kind in "biufc"


_NOT_THERE = object()


def _restore_plain(path: str, part: Any, state: Mapping[str, Any]) -> None:
    now = {**_attributes(part), "": part}
    for name, mark in state["marks"].items():
        if isinstance(now.get(name), _LISTED) and _mark(now[name]) != mark:
            raise UsageError(
                f"batches(loader): {f'{path}.{name}'.rstrip('.')} is not what it was when the interrupted epoch began, "
                "and it is not saved, so the order of the samples cannot be made again. Give the "
                f"{type(part).__name__} state_dict() and load_state_dict(), or begin the epoch anew: "
                "MIGRATOR_LOOPS=anew."
            )
    if isinstance(part, DistributedSampler):
        _check_distributed(path, part, state["values"])
    for name, value in state["values"].items():
        if now.get(name, _NOT_THERE) != value:
            setattr(part, name, value)


def _check_distributed(path: str, part: Any, values: Mapping[str, Any]) -> None:
    """The script has told this sampler its epoch already. Another one than before shows that it counts anew."""
    here = {name: getattr(part, name) for name in _DECIDES_ORDER if name in values and hasattr(part, name)}
    different = [
        f"{name} is {value} here, {values[name]} there" for name, value in here.items() if values[name] != value
    ]
    if different:
        raise UsageError(
            f"batches(loader): {path} is a {type(part).__name__} whose order is not that of the epoch in which the "
            f"ckpt was made: {', '.join(different)}. Samples would be trained twice, others never. Count the epochs by "
            "`for epoch in migrator.epochs(n): sampler.set_epoch(epoch)`, which goes on in the interrupted one, keep "
            "the seed, or use an ElasticSampler; or begin the epoch anew: MIGRATOR_LOOPS=anew."
        )


def fingerprint(loader: Any) -> str:
    """Tells the data of one loader from that of another, where the loader itself is made anew each time."""
    return xxhash.xxh3_64(repr(_printed(getattr(loader, "dataset", loader), 0)).encode()).hexdigest()


def _printed(value: Any, depth: int) -> Any:
    if isinstance(value, (bool, int, float, str, bytes, type(None), range)):
        return value
    if isinstance(value, (Tensor, np.ndarray)):
        return tuple(value.shape), str(value.dtype), _mark(value)
    if isinstance(value, (list, tuple)):
        return len(value), [_printed(value[i], depth + 1) for i in _spread(len(value), 16)]
    if depth > 3 or isinstance(value, (*_LEAVES, dict)) or randomness.is_generator(value):
        return type(value).__name__
    return type(value).__name__, {name: _printed(item, depth + 1) for name, item in _attributes(value).items()}


# Workers that persist.


def has_workers_that_persist(loader: Any) -> bool:
    return bool(
        isinstance(loader, DataLoader) and getattr(loader, "persistent_workers", False) and loader.num_workers > 0
    )


def begin(loader: Any) -> Iterator[Any]:
    """The loader's iterator; workers that persist draw what new ones would."""
    if not has_workers_that_persist(loader):
        return iter(loader)
    seed = _seed_for_workers(loader)
    if loader._iterator is None:
        with _replaced(loader, "worker_init_fn", _Seeded(loader.worker_init_fn, seed)):
            return iter(loader)
    # The message that begins a further epoch in a worker carries this along; it has a use for streams of torch only.
    with _replaced(loader._iterator, "_shared_seed", _SeedOnArrival(seed)):
        return iter(loader)


def say_what_persists(loader: Any, makers: Makers) -> None:
    """What lives on in workers from one epoch to the next, and is not there after a resume."""
    if not has_workers_that_persist(loader):
        return
    kept = [path for path in makers.generators if path.startswith("dataset")]
    if loader.worker_init_fn is not None:
        kept.append("worker_init_fn")
    if kept:
        log(
            "workers_persist",
            level=logging.WARNING,
            what=", ".join(kept),
            means="persistent_workers=True: what these hold in the workers goes on from epoch to epoch, and begins "
            "anew after a resume; with persistent_workers=False each epoch begins as it did",
        )


def _seed_for_workers(loader: Any) -> int:
    """Follows from the random state that the seed would be drawn from, and leaves that as it is."""
    source = loader.generator if loader.generator is not None else torch.default_generator
    return xxhash.xxh3_64(bytes(source.get_state().tolist())).intdigest() >> 1


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class _Seeded:
    """A `worker_init_fn` that seeds the worker after what the script's own has done."""

    def __init__(self, init: Callable[[int], None] | None, seed: int) -> None:
        self._init, self._seed = init, seed

    def __call__(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        _seed_worker(self._seed, worker)


def _seed_worker(seed: int, worker: int) -> None:
    """As torch seeds a new one."""
    random.seed(seed + worker)
    torch.manual_seed(seed + worker)
    np.random.seed(np.random.SeedSequence((seed, worker)).generate_state(4))


class _SeedOnArrival:
    """Is nothing where it arrives, but seeds the worker that unpickles it."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __reduce__(self) -> Any:
        return _arrived, (self._seed,)


def _arrived(seed: int) -> None:
    info = torch_data.get_worker_info()
    if info is not None:
        _seed_worker(seed, info.id)


class WorkersSeededApart:
    """Workers that persist draw their seed once a life, which is not when they would have drawn it in another.

    So, for all loaders with such workers, evaluation's too, the seed is not drawn from what the script draws from.
    """

    def __init__(self) -> None:
        self._before = before = DataLoader._get_iterator

        def get_iterator(loader: DataLoader[Any]) -> Any:
            if not has_workers_that_persist(loader):
                return before(loader)
            apart = torch.Generator().manual_seed(_seed_for_workers(loader))
            with _replaced(loader, "generator", apart):
                return before(loader)

        DataLoader._get_iterator = get_iterator  # type: ignore[assignment, method-assign]

    def remove(self) -> None:
        DataLoader._get_iterator = self._before  # type: ignore[method-assign]


def restore_generators(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Registered generators, by name; those that the ckpt does not know stay."""
    for name, generator in generators.items():
        if name in states:
            kinds.set_state(generator, states[name])
