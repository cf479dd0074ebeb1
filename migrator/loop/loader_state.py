"""What decides which batches a loader hands out, so that an interrupted epoch can be begun again.

At the start of an epoch everything is noted that decides which batches come: the random
states, and along the loader's chain (batch sampler, sampler, theirs, and the dataset) each
generator, each object that can save its state, and the plain attributes of samplers. A resume
puts that back, begins the epoch once more and drops the batches that were trained. Then all
generators get the state they had in the ckpt, because some are also drawn from in the loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from types import GeneratorType
from typing import Any

from torch.utils import data as torch_data
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from migrator.ckpt import codec
from migrator.data.sampler import ElasticSampler
from migrator.errors import RegistrationError, UsageError
from migrator.events import log
from migrator.loop.fingerprint import LEAVES, LISTED, attributes, mark
from migrator.loop.generators import are_equal, state_of
from migrator.state import random_state
from migrator.state.adapters import containers, random_generators

_CHAIN = ("dataset", "batch_sampler", "sampler", "generator")
"""The dataset comes first: samplers hold it too, and it would be taken for a part of them."""
_DECIDES_ORDER = ("epoch", "seed", "shuffle", "drop_last", "num_replicas", "rank", "start_index")
"""Attributes of a `DistributedSampler`. The last one exists only in its elastic subclass."""
_MOST_OBJECTS = 2000
"""Maximum number of objects that are looked through in each part of the chain."""
_DEEPEST = 12
"""Maximum depth to which objects are looked through."""
_MOST_ITEMS = 64
"""A list with more items is taken to hold samples: only its datasets, samplers and generators are looked at."""
_NOT_THERE = object()


class LoaderState:
    """Everything along a loader's chain that decides which batches come, by its path."""

    def __init__(self, loader: Any) -> None:
        self.generators: dict[str, Any] = {}
        self.stateful: dict[str, Any] = {}
        self.plain: dict[str, Any] = {}
        """Samplers and streams without a state of their own: their attributes are saved."""
        self._holders: dict[str, Any] = {}
        """By the path of a generator: the sampler that draws the order from it."""
        self._has_workers = bool(getattr(loader, "num_workers", 0))
        self.is_cut = False
        """The loader holds more objects than were looked through."""
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
                # Counted for each part: a large dataset must not use up the limit before the samplers are looked at.
                self._left = _MOST_OBJECTS
                self._walk(prefix + name, part, orders=orders, depth=depth + 1)

    def _walk(self, path: str, part: Any, *, orders: bool, depth: int) -> None:
        """`orders`: the part decides the order of the samples; otherwise it only makes samples."""
        if isinstance(part, (LEAVES, ElasticSampler)) or id(part) in self._seen:
            return
        self._left -= 1
        if self._left < 0 or depth > _DEEPEST:
            self.is_cut = True
            return
        self._seen.add(id(part))
        self._kept.append(part)  # alive, so that its id is not given to another object
        if random_state.is_generator(part):
            self.generators[path] = part
            return
        if isinstance(part, (list, tuple, dict)):
            self._walk_items(path, part, orders=orders, depth=depth)
            return
        if isinstance(part, DataLoader):
            self._walk_chain(f"{path}.", part, depth)
            return
        if orders:
            if _can_save_its_state(part):
                self.stateful[path] = part
            else:
                self.plain[path] = part
        for name, item in attributes(part).items():
            if orders and random_state.is_generator(item):
                self._holders.setdefault(f"{path}.{name}", part)
            self._walk(f"{path}.{name}", item, orders=orders and name != "dataset", depth=depth + 1)

    def _walk_items(self, path: str, part: Any, *, orders: bool, depth: int) -> None:
        if orders and depth <= 1:
            self.plain[path] = part
        # Of a long list only these: the rest are samples.
        for key, item in part.items() if isinstance(part, dict) else enumerate(part):
            is_of_data = isinstance(item, (torch_data.Dataset, torch_data.Sampler)) or random_state.is_generator(item)
            if len(part) <= _MOST_ITEMS or is_of_data:
                self._walk(f"{path}[{key!r}]", item, orders=orders, depth=depth + 1)

    def check(self) -> None:
        """Raise for what cannot be put back, and log if not all of the loader was looked through."""
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
            for name, value in attributes(part).items():
                if isinstance(value, GeneratorType) or _is_iterator(value):
                    raise UsageError(
                        f"batches(loader): {path}.{name} is a {type(value).__name__}; where it stands is not known, "
                        f"so the order of the samples could not be made again after a resume. Give the "
                        f"{type(part).__name__} state_dict() and load_state_dict(), or let its __iter__ begin anew."
                    )

    def state(self) -> dict[str, Any]:
        """The part of a ckpt that `restore()` takes."""
        found: dict[str, Any] = {
            "generators": self.generator_states(),
            "stateful": {path: _saved_state(path, part) for path, part in self.stateful.items()},
            "plain": {path: state for path, part in self.plain.items() if (state := _plain_state(part))},
        }
        return found

    def generator_states(self, *, but: Iterable[Any] = ()) -> dict[str, Any]:
        """`but`: generators that are saved elsewhere, because they are registered."""
        left_out = {id(part) for part in but}
        return {path: state_of(part) for path, part in self.generators.items() if id(part) not in left_out}

    def restore_generators(self, states: Mapping[str, Any]) -> None:
        """Give the generators the states of the ckpt: some are also drawn from in the loop, or while a sample is made.

        Does nothing for a loader with workers: how far the order is drawn ahead depends on their number.
        """
        if not self._has_workers:
            for path, state in states.items():
                if path in self.generators:
                    random_generators.set_state(self.generators[path], state)

    def check_shared(self, at_safe_point: Mapping[str, Any]) -> None:
        """Raise if the script draws from the generator of the order: then the order cannot be drawn again."""
        for path, state in at_safe_point.items():
            holder = self._holders.get(path)
            # torch's own samplers draw the whole order at once, except this one.
            is_drawn_ahead = type(holder).__module__.startswith("torch.") and not (
                isinstance(holder, RandomSampler) and holder.replacement
            )
            if self._has_workers or holder is None or is_drawn_ahead or path not in self.generators:
                continue
            if not are_equal(state_of(self.generators[path]), state):
                raise UsageError(
                    f"batches(loader): {path} draws the order of the samples bit by bit, and the script draws from it "
                    f"in between, so the order of the {type(holder).__name__} cannot be drawn again without it. "
                    "Give the sampler a generator of its own, or begin the epoch anew: MIGRATOR_LOOPS=anew."
                )

    def is_next_epoch(self, state: Mapping[str, Any]) -> bool:
        """The script has called `set_epoch()` of a `DistributedSampler` with the epoch after that of `state`.

        Raises if the sampler is in neither of the two epochs.
        """
        for path, part in self.plain.items():
            there = state["plain"].get(path, {}).get("values", {})
            if isinstance(part, DistributedSampler) and "epoch" in there:
                if part.epoch == there["epoch"] + 1:
                    return True
                _check_distributed(path, part, there)
        return False

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put everything back to where it was at the start of the epoch."""
        for kind, mine in (("generators", self.generators), ("stateful", self.stateful)):
            self._compare(set(state[kind]) ^ set(mine))
        self._compare(set(state["plain"]) - set(self.plain))
        for path, values in state["plain"].items():
            _restore_plain(path, self.plain[path], values)
        for path, part in self.stateful.items():
            _load_state(part, state["stateful"][path])
        for path, part in self.generators.items():
            random_generators.set_state(part, state["generators"][path])

    @staticmethod
    def _compare(different: set[str]) -> None:
        if different:
            raise UsageError(
                f"batches(loader): the loader is not made as it was when the ckpt was written ({_listed(different)} is "
                "there or here only), so its epoch cannot be continued. Make it with the same samplers and generators, "
                "or begin the epoch anew: MIGRATOR_LOOPS=anew."
            )


def _listed(paths: Iterable[str]) -> str:
    return ", ".join(sorted(paths))


def _is_iterator(value: Any) -> bool:
    return hasattr(value, "__next__") and type(value).__module__ in ("builtins", "itertools")


def _can_save_its_state(part: Any) -> bool:
    pairs = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
    return any(all(callable(getattr(part, name, None)) for name in pair) for pair in pairs)


def _saved_state(path: str, part: Any) -> Any:
    try:
        saved = part.get_state() if hasattr(part, "get_state") and hasattr(part, "set_state") else part.state_dict()
        codec.scan(saved, path)
    except Exception as error:  # the script's own class may raise anything
        why = str(error) if isinstance(error, RegistrationError) else repr(error)
        raise UsageError(f"batches(loader): the state of {path} cannot be saved: {why}") from error
    return containers.copied(saved)


def _load_state(part: Any, state: Any) -> None:
    if hasattr(part, "get_state") and hasattr(part, "set_state"):
        part.set_state(state)
    else:
        part.load_state_dict(state)


def _plain_state(part: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"values": {}, "marks": {}}
    if isinstance(part, LISTED):
        found["marks"][""] = mark(part)
    is_of_torch = type(part).__module__.startswith("torch.")
    is_distributed = isinstance(part, DistributedSampler)
    for name, value in attributes(part).items():
        if isinstance(value, (bool, int, float)) and (not is_of_torch or (is_distributed and name in _DECIDES_ORDER)):
            found["values"][name] = value
        elif isinstance(value, LISTED) and name != "dataset":
            found["marks"][name] = mark(value)
    return found if any(found.values()) else {}


def _restore_plain(path: str, part: Any, state: Mapping[str, Any]) -> None:
    now = {**attributes(part), "": part}
    for name, there in state["marks"].items():
        if isinstance(now.get(name), LISTED) and mark(now[name]) != there:
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
    """Raise if the sampler's order is not that of the interrupted epoch: then the script counts its epochs anew."""
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
