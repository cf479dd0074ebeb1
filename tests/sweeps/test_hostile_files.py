"""Files written by somebody who wants to do harm, and who can compute every digest: refused, and nothing else happens.

Whatever is read - manifests, parts, records, marks, the signal file, settings, the predecessor's file - runs no code,
opens nothing elsewhere, changes nothing on the disk, takes memory in proportion to its own size, and ends in one of
our errors. And a ckpt that is refused leads back to the one before it.
"""

from __future__ import annotations

import base64
import copy
import io
import itertools
import json
import logging
import math
import os
import pickle
import resource
import sys
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch._utils import _rebuild_tensor_v2

from migrator import settings
from migrator.ckpt import catalog, generations, leaving_mark, names
from migrator.ckpt.digests import block_digest, digest_of_blocks
from migrator.ckpt.manifest import Manifest, objects_from
from migrator.ckpt.memory_note import MemoryNote
from migrator.ckpt.names import MANIFEST
from migrator.ckpt.rank_record import RankRecord
from migrator.ckpt.sealed import seal
from migrator.compat import pytorchjob_migration
from migrator.errors import CkptCorrupt, CkptMismatch, MigratorError, SettingsError
from migrator.notice.signal_file import INIT, SAVE, WORDS, SignalFile, open_deadline
from migrator.platform import container, memory
from migrator.ranks.shares import Gathering, Plan
from migrator.save.progress import ForHook
from migrator.session import memory_before
from migrator.settings import Settings
from migrator.storage.posix import PosixStorage
from tests.support import chance
from tests.support.damaged_ckpt import Ckpts, Return, objects, on_disk, registered, remove, state_of, two_ckpts, within
from tests.support.hostile import measured, watched

FREE = 17 << 20
"""Whatever the size of a file: one call that reads takes up to 16 MiB, and gives back what was too much."""
TIMES = 64
"""So many bytes at most for each byte of a file: an empty list is 56 of them, and two or three in JSON."""


def some(examples: int, times: int = 1) -> Any:
    """The same examples in each run, and twice as many in a whole one."""
    return hypothesis_settings(
        max_examples=examples * times // (1 if chance.takes_all() else 2),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[*HealthCheck],
    )


# What is imported only when it is needed first would look like the file's doing.
repr(torch.ones(1))
"".encode("cp437")  # zipfile, for names in archives
for _encoding in ("utf-16-be", "utf-16-le", "utf-16", "utf-32-be", "utf-32-le", "utf-32"):
    "".encode(_encoding)  # json, for bytes that begin as these do


# Who is attacked.


class Victim:
    """A job with two ckpts, the newest of which is in hostile hands, and its next life."""

    def __init__(self, ckpts: Ckpts) -> None:
        self.ckpts = ckpts
        self.root = ckpts.storage.root
        self.life: Return | None = None
        self.files = {path: path.read_bytes() for path in ckpts.files()}
        self.manifest: dict[str, Any] = json.loads(self.files[ckpts.path(ckpts.newest, MANIFEST)])["manifest"]
        self.registered = sum(len(data) for data in self.files.values())
        self.loads = 0
        self.load()

    @contextmanager
    def attacked(self, files: dict[Path, bytes]) -> Iterator[None]:
        """Other bytes in some of the newest ckpt's files."""
        for path, data in files.items():
            path.write_bytes(data)
        try:
            yield
        finally:
            for path in files:
                path.write_bytes(self.files[path])

    def resealed(self, change: Callable[[dict[str, Any]], Any]) -> dict[Path, bytes]:
        """The manifest after a change, with the digest that belongs to it."""
        payload = copy.deepcopy(self.manifest)
        change(payload)
        return {self.ckpts.path(self.ckpts.newest, MANIFEST): seal("manifest", payload)}

    def with_part(self, data: bytes) -> dict[Path, bytes]:
        """Another part, and a manifest that says that this is the one that was committed."""
        record = dict(zip(("bytes", "digest", "blocks"), digests(data), strict=True))
        (path,) = self.ckpts.parts()
        return {path: data, **self.resealed(lambda payload: payload["parts"][0].update(record))}

    def load(self, *, closely: bool = True) -> str:
        """What became of it: "older", "newest" or "mismatch". Whatever it is, nothing else may have happened."""
        ckpts = self.ckpts
        if self.life is None:
            self.life = ckpts.life()
        life = self.life.again()
        self.loads += 1
        closely = closely or self.loads % 8 == 0
        size = sum(path.stat().st_size for path in (*ckpts.files(), *ckpts.files(ckpts.older)))
        on_the_disk, state = on_disk(self.root), state_of(life.objects)
        outcome, said = "mismatch", ""
        with within(20), measured(FREE + TIMES * size + 4 * self.registered, closely=closely), watched(self.root):
            try:
                name = life.load()
            except CkptMismatch as error:
                said = str(error)
            else:
                outcome = {ckpts.newest: "newest", ckpts.older: "older"}[str(name)]
        assert on_disk(self.root) == on_the_disk
        assert "does not fit what is registered" not in said or state_of(life.objects) == state
        if outcome == "older":
            assert life.bad == {ckpts.newest}
            assert life.state == ckpts.states[ckpts.older, 0]
        else:
            self.life = None  # nobody knows what is in its objects now
        return outcome


def digests(data: bytes) -> tuple[int, str, list[str]]:
    block = block_digest([memoryview(data)])
    return len(data), digest_of_blocks([block] if data else []), [block] if data else []


@pytest.fixture(scope="module")
def job(new_directory: Callable[[], Path]) -> Victim:
    return Victim(two_ckpts(new_directory() / "root"))


@pytest.fixture(scope="module")
def of_two(new_directory: Callable[[], Path]) -> Victim:
    """Saved by two ranks, of which one is looked at."""
    return Victim(two_ckpts(new_directory() / "root", size=2))


@pytest.fixture(autouse=True)
def as_torch_warns_anybody() -> Iterator[None]:
    """A warning is no error of a real run either."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)  # a hostile name may be long
        yield
        logging.disable(logging.NOTSET)


# That the watching itself works.


def _imports() -> None:
    sys.modules.pop("this_is_none_of_ours", None)
    with pytest.raises(ImportError):
        __import__("this_is_none_of_ours")


DEEDS: dict[str, Callable[[], object]] = {
    "exec": lambda: exec("1"),
    "eval": lambda: eval("1 + 1"),
    "import": _imports,
    "a process": lambda: os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0),
    "a shell": lambda: os.system("true"),
    "a pickle that finds a class": lambda: pickle.loads(pickle.dumps(OrderedDict)),
}


@pytest.mark.processes
@pytest.mark.parametrize("deed", DEEDS)
def test_the_witness_sees_code_that_runs(deed: str, tmp_path: Path) -> None:
    """Each way a file could make this process do something."""
    with pytest.raises(AssertionError, match="code ran"), watched(tmp_path):
        DEEDS[deed]()


def test_the_witness_sees_every_file_that_is_opened(tmp_path: Path) -> None:
    """Elsewhere, by way of a link, by way of `..`, and for writing; what lies inside may be read."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "inside").write_bytes(b"1")
    (root / "out").symlink_to(tmp_path)
    (tmp_path / "other").write_bytes(b"2")
    for path in (tmp_path / "other", root / "out" / "other", root / ".." / "other", Path("/dev/null")):
        with pytest.raises(AssertionError, match="outside"), watched(root):
            path.read_bytes()
        with pytest.raises(AssertionError, match="outside"), watched(root):
            os.close(os.open(path, os.O_RDONLY))
    with pytest.raises(AssertionError, match="outside"), watched(root):
        os.listdir(root / "out")  # noqa: PTH208 - this very call is what is watched
    for write in (
        lambda: (root / "new").write_bytes(b"3"),
        lambda: os.close(os.open(root / "inside", os.O_RDWR)),
        lambda: (root / "inside").rename(root / "moved"),
        (root / "moved").unlink,
    ):
        with pytest.raises(AssertionError, match="written"), watched(root):
            write()
    with watched(root, may_write=True):
        (root / "inside").write_bytes(b"4")
    with watched(root):
        assert (root / "inside").read_bytes() == b"4"


@pytest.mark.parametrize(
    "take",
    [
        lambda: torch.empty(1 << 20),
        lambda: torch.empty(1 << 60, dtype=torch.uint8),
        lambda: bytes(1 << 22),
        lambda: np.zeros(1 << 19),
        lambda: [[] for _ in range(1 << 16)],
    ],
    ids=["torch", "torch, refused", "bytes", "numpy", "lists"],
)
def test_the_meter_sees_memory(take: Callable[[], object]) -> None:
    """4 MiB by whatever way, also if it is only asked for."""
    with pytest.raises(AssertionError, match="at most"), measured(1 << 20), suppress(RuntimeError):
        take()


def test_what_was_done_before_an_error_is_seen_too(tmp_path: Path) -> None:
    """An error of ours does not hide it."""

    def do() -> None:
        exec("1")
        torch.empty(1 << 20)
        raise CkptCorrupt("by the way")

    for context, error in ((watched(tmp_path), "code ran"), (measured(1 << 20), "at most")):
        with pytest.raises(AssertionError, match=error), context:
            do()


def test_what_nobody_touched_is_loaded(job: Victim, of_two: Victim) -> None:
    """The cases below fail for what they change, and a true ckpt breaks none of the rules."""
    for victim in (job, of_two):
        assert victim.load() == "newest"
        with victim.attacked(victim.resealed(lambda payload: None)):
            assert victim.load() == "newest"
    with job.attacked(job.with_part(next(data for path, data in job.files.items() if path.name != MANIFEST))):
        assert job.load() == "newest"


# The manifest.

HUGE = 1 << 60
P = (1 << 61) - 1
"""Python's hash of an integer is its rest by this."""


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def put(*where: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(payload: Any) -> None:
        for key in where[:-1]:
            payload = payload[key]
        payload[where[-1]] = copy.deepcopy(value)

    return change


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def tensor(**changes: Any) -> dict[str, Any]:
    return {"!": "tensor", "dtype": "float32", "shape": [1], "device": "cpu", "v": text(bytes(4)), **changes}


def array(dtype: Any, shape: Any, data: bytes = b"") -> dict[str, Any]:
    return {"!": "array", "dtype": dtype, "shape": shape, "v": text(data)}


def integer(number: int) -> dict[str, Any]:
    return {"!": "int", "v": f"{number:x}"}


TREES: dict[str, Any] = {
    "a tensor of 2^40 for 4 bytes": tensor(shape=[1 << 40]),
    "a tensor of 2^60 for 4 bytes": tensor(shape=[HUGE]),
    "a tensor of 2^30 for 4 bytes": tensor(shape=[1 << 30]),
    "a tensor whose size overflows": tensor(shape=[1 << 31, 1 << 31, 1 << 2]),
    "a tensor whose size overflows to 1": tensor(shape=[(1 << 64) + 1]),
    "a tensor of nothing with endless strides": tensor(shape=[0, 1 << 61, 1 << 61], v=""),
    "a tensor of negative length": tensor(shape=[-1]),
    "a tensor of two negative lengths": tensor(shape=[-1, -1]),
    "a tensor of nan": tensor(shape=[{"!": "float", "v": "nan"}]),
    "a tensor of 10^5 dimensions": tensor(shape=[1] * 100_000),
    "a tensor without dimensions in a dict": tensor(shape={}),
    "a tensor of an unknown type": tensor(dtype="object"),
    "a tensor of a type that is a list": tensor(dtype=["float32"]),
    "a tensor on a device": tensor(device="cuda:0"),
    "a tensor of base64 with blanks": tensor(v="AAAA AA=="),
    "a tensor of base64 cut off": tensor(v="AAAAAA="),
    "a tensor of base64 beyond ASCII": tensor(v="ÄAAAAA=="),
    "a tensor in a part elsewhere": {**tensor(stored="../../../etc/passwd"), "v": None},
    "a tensor that is nowhere": {key: value for key, value in tensor(stored="/etc/passwd").items() if key != "v"},
    "a tensor in a part under a number": {key: value for key, value in tensor(stored=7).items() if key != "v"},
    "a tensor in a part with another shape": {
        key: value for key, value in tensor(stored="model/0.weight", shape=[1 << 40]).items() if key != "v"
    },
    "an array of objects": array("|O8", [1], bytes(8)),
    "an array of structures": array("i4,O", [1], bytes(12)),
    "an array of voids": array("|V8", [1], bytes(8)),
    "an array of 2^40": array("<f8", [1 << 40]),
    "an array of 2^30 for 8 bytes": array("<f8", [1 << 30], bytes(8)),
    "an array of no texts of 4 GB each": array("<U999999999", [0]),
    "a text of 400 MB": {"!": "scalar", "dtype": "<U99999999", "v": ""},
    "an array of what is no text": array("<U1", [1], b"\xff\xff\xff\xff"),
    "an array of an unknown unit": array("<M8[parsec]", [1], bytes(8)),
    "an array with 65 dimensions": array("<f8", [1] * 65, bytes(8)),
    "a size that is negative": {"!": "size", "v": [-1]},
    "a device that is none": {"!": "device", "v": "a\0b"},
    "a function": {"!": "os.system", "v": "true"},
    "a class": {"!": "builtins.eval", "v": ["1"]},
    "a tag that is a dict": {"!": {}, "v": []},
    "a tag without its value": {"!": "tuple"},
    "a list of 101 lists": nested(101),
    "tuples in tuples": {"!": "tuple", "v": [{"!": "tuple", "v": nested(100)}]},
    "a set of equal elements": {"!": "set", "v": [1, {"!": "float", "v": "nan"}, True]},
    "a set of lists": {"!": "set", "v": [[1]]},
    "a set of sets": {"!": "set", "v": [{"!": "frozenset", "v": [1]}]},
    "a set whose hashes are all the same": {"!": "set", "v": [integer(k * P) for k in range(1, 20_000)]},
    "a dict whose hashes are all the same": {"!": "dict", "v": [[integer(k * P), k] for k in range(1, 20_000)]},
    "a dict with a double key of 10^5 digits": {"!": "dict", "v": [[integer(1 << 400_000), 1]] * 2},
    "a dict with a key that is a dict": {"!": "dict", "v": [[{}, 1]]},
    "a dict of triples": {"!": "dict", "v": [[1, 2, 3]]},
    "a key with a sign in front": {"!x": 1},
    "a deque shorter than it is": {"!": "deque", "v": [1, 2], "maxlen": 1},
    "a deque of a negative length": {"!": "deque", "v": [], "maxlen": -1},
    "a deque of an endless length": {"!": "deque", "v": [], "maxlen": 1 << 70},
    "an integer in words": {"!": "int", "v": "ten"},
    "an integer that is nan": {"!": "int", "v": {"!": "float", "v": "nan"}},
    "a float that is an expression": {"!": "float", "v": "1e999"},
}

STRANGE_BUT_TRUE: dict[str, Any] = {
    "an integer of 10^5 digits": integer(1 << 400_000),
    "an integer of 4000 digits": 10**4000,
    "a lone surrogate": "\ud800",
    "a key with a NUL": {"a\0b": 1, "../..": 2, "__class__": 3, "\ud800": 4},
    "nan, inf and -inf": [{"!": "float", "v": word} for word in ("nan", "inf", "-inf")],
    "a list of 99 lists": nested(97),
}

NAMES: dict[str, Any] = {
    "absolute": "/etc/passwd",
    "upwards": "../../generations/000001.json",
    "of the older ckpt": "../000001-000000000005/part-00000-of-00001.safetensors",
    "upwards behind a true name": "part-00000-of-00001.safetensors/../../x",
    "with a slash": "part-00000-of-00001.safetensors/",
    "with a NUL": "part-00000-of-00001.safetensors\0",
    "with a line end": "part-00000-of-00001.safetensors\n",
    "of the manifest": "manifest.json",
    "of a record": "rank-00000.json",
    "empty": "",
    "a dot": ".",
    "hidden": ".part-00000-of-00001.safetensors",
    "with other digits": "part-\u0660\u0660\u0660\u0660\u0660-of-00001.safetensors",
    "with a surrogate": "part-00000-of-00001.safetensors\ud800",
    "endless": "part-00000-of-00001" + "0" * 100_000 + ".safetensors",
    "a number": 0,
    "nothing": None,
    "a list": ["part-00000-of-00001.safetensors"],
}

JUNK: dict[str, Any] = {
    "nothing": None,
    "a truth": True,
    "a number": -1,
    "a huge number": 1 << 70,
    "a text": "x",
    "a list": [1],
    "a dict": {"a": 1},
    "a tensor": tensor(shape=[2], v=text(bytes(8))),
    "an array": array("<f8", [2], bytes(16)),
    "an integer of 10^4 digits": integer(1 << 40_000),
}

RANDOM = ("extra", "random", "0")
SHAPES: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{f"a part named {name}": put("parts", 0, "name", value=value) for name, value in NAMES.items()},
    **{
        f"{what} that is {name}": put(*where, value=value)
        for what, where in {
            "random states of a rank": RANDOM,
            "torch's random state": (*RANDOM, "torch"),
            "Python's random state": (*RANDOM, "python"),
            "numpy's random state": (*RANDOM, "numpy"),
            "the position in numpy's random state": (*RANDOM, "numpy", "state", "pos"),
            "the place in the loops": ("extra", "loop"),
            "a loop": ("extra", "loop", "loops"),
            "one loop": ("extra", "loop", "loops", "a loop"),
            "the format": ("format",),
            "an object": ("objects", "model"),
        }.items()
        for name, value in JUNK.items()
        if (what, name) not in {("random states of a rank", "nothing"), ("the place in the loops", "nothing")}
        and (what, name) not in {("the format", "a huge number"), ("one loop", "a dict")}
    },
    **{
        f"a rank's own {what} that is {name}": put("extra", "own", value={"0": {what: value}})
        for what in ("objects", "loop")
        for name, value in JUNK.items()
        if (what, name) != ("loop", "nothing")
    },
    "random states kept by a text": put("extra", "random", value={"x": {}}),
    "random states kept by numbers": put("extra", "random", value={"!": "dict", "v": [[0, {}]]}),
    "a position before numpy's numbers": put(*RANDOM, "numpy", "state", "pos", value=-1),
    "a position far behind numpy's numbers": put(*RANDOM, "numpy", "state", "pos", value=10**9),
    "numpy's random state as a tuple with a far position": put(
        *RANDOM, "numpy", value={"!": "tuple", "v": ["MT19937", array("<u4", [624], bytes(2496)), 10**9, 0, 0.0]}
    ),
    "a place in the loops that is handed a text": put("extra", "loop", "loops", value={"a": {"handed": "x"}}),
    "a loop of another origin": put("extra", "loop", "loops", value={"a": {"origin": {"random": {"torch": 1}}}}),
    "a generation of the future": put("generation", value=10**9),
    "a negative step": put("step", value=-6),
    "a step of 2^62": put("step", value=1 << 62),
    "no ranks": put("ranks", value=0),
    "a part of a negative size": put("parts", 0, "bytes", value=-1),
    "a part of 2^60 bytes": put("parts", 0, "bytes", value=HUGE),
    "a part of no bytes": lambda payload: payload["parts"][0].update(bytes=0, blocks=[]),
    "a part one byte shorter": lambda payload: payload["parts"][0].update(bytes=payload["parts"][0]["bytes"] - 1),
    "a part with a digest more": lambda payload: payload["parts"][0]["blocks"].append("0" * 32),
    "a part twice": lambda payload: payload["parts"].append(payload["parts"][0]),
    "no parts": put("parts", value=[]),
    "10^4 parts": lambda payload: payload.update(parts=[{**payload["parts"][0], "name": 1}] * 10_000),
    "another kind": put("objects", "metrics", "kind", value=7),
    "no kinds": put("objects", "metrics", value={"tree": {}}),
}


@pytest.mark.parametrize("change", SHAPES.values(), ids=list(SHAPES))
def test_a_sealed_lie_in_the_manifest_leads_back(job: Victim, change: Callable[[dict[str, Any]], Any]) -> None:
    """Each refused by name before anything is done on its word; the older ckpt comes back, to the last bit."""
    with job.attacked(job.resealed(change)):
        assert job.load(closely=False) == "older"


@pytest.mark.parametrize("tree", TREES.values(), ids=list(TREES))
def test_a_sealed_lie_in_a_tree_leads_back(job: Victim, tree: Any) -> None:
    """Shapes, types and lengths that are not those of the bytes, and take no memory; names that call nothing."""
    with job.attacked(job.resealed(put("objects", "metrics", "tree", "epoch", value=tree))):
        assert job.load() == "older"


@pytest.mark.parametrize("value", STRANGE_BUT_TRUE.values(), ids=list(STRANGE_BUT_TRUE))
def test_what_is_only_strange_is_loaded(job: Victim, value: Any) -> None:
    """A script may hold such values: they come back as they are."""
    with job.attacked(job.resealed(put("objects", "metrics", "tree", "epoch", value=value))):
        assert job.load() == "newest"


def test_another_class_or_another_shape_is_a_mismatch_that_touches_nothing(job: Victim) -> None:
    """No reason to take an older ckpt, and none to change anything: the script is told, at once."""
    for change in (
        put("objects", "optimizer", "tree", "class", value="\ud800" * 1000),
        put("objects", "sampler", "tree", "length", value=10**4000),
        put("objects", "model", "tree", "0.bias", "shape", value=[1 << 40]),
        put("objects", "a stranger", value={"kind": "os.system", "tree": "true"}),
        put("format", value=1 << 70),
    ):
        with job.attacked(job.resealed(change)):
            assert job.load() == "mismatch"


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 3)
    | st.sampled_from([1 << 31, 1 << 40, 1 << 53, 1 << 62, (1 << 63) - 1, 1 << 64, -(1 << 63), 10**4000, -0.0, 5e-324])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=()), max_size=6)
    | st.sampled_from(["nan", "float32", "<f4", "<U1", "|O8", "AAAA", "cpu", "-ff", "../x", "a\0b", "model/0.weight"])
)
tags = st.sampled_from(
    [
        *("float", "int", "bytes", "dtype", "device", "size", "tuple", "dict", "odict", "set", "frozenset"),
        *("deque", "scalar", "array", "tensor", "os.system"),
    ]
)
json_values = st.recursive(
    scalars,
    lambda below: (
        st.lists(below, max_size=4)
        | st.dictionaries(st.text(max_size=4) | tags, below, max_size=3)
        | st.fixed_dictionaries(
            {"!": tags}, optional=dict.fromkeys(("v", "dtype", "shape", "device", "stored", "maxlen"), below)
        )
    ),
    max_leaves=8,
)


def change_somewhere(draw: Callable[[st.SearchStrategy[Any]], Any], found: Any) -> None:
    """One thing in a structure exchanged for another one, taken away, doubled or renamed."""
    while True:
        place = draw(st.sampled_from(sorted(found) if isinstance(found, dict) else range(min(len(found), 30))))
        inside = found[place]
        if not isinstance(inside, (dict, list)) or not inside or draw(st.integers(0, 3)) == 0:
            break
        found = inside
    how = draw(st.sampled_from(["exchange", "exchange", "exchange", "remove", "add"]))
    if how == "exchange":
        found[place] = draw(json_values)
    elif how == "remove":
        del found[place]
    elif isinstance(found, dict):
        found[draw(st.text(max_size=4) | tags)] = draw(json_values)
    else:
        found.append(found[place])


def check_changed_manifest(victim: Victim, data: st.DataObject) -> None:
    payload = copy.deepcopy(victim.manifest)
    for _ in range(data.draw(st.integers(1, 2))):
        change_somewhere(data.draw, payload)
    with victim.attacked(victim.resealed(lambda old: (old.clear(), old.update(payload)))):
        victim.load(closely=False)


@some(110)
@given(st.data())
def test_a_true_manifest_with_something_exchanged_is_refused_or_loaded(job: Victim, data: st.DataObject) -> None:
    """Anywhere in it, by anything that JSON can hold, under a true digest."""
    check_changed_manifest(job, data)


@some(60)
@given(st.data())
def test_a_true_manifest_of_two_ranks_with_something_exchanged_is_refused_or_loaded(
    of_two: Victim, data: st.DataObject
) -> None:
    """Also in what is a rank's own."""
    check_changed_manifest(of_two, data)


@pytest.mark.long
@pytest.mark.timeout(900)
@some(150, times=8)
@given(st.data(), st.booleans())
def test_many_manifests_with_something_exchanged_are_refused_or_loaded(
    job: Victim, of_two: Victim, data: st.DataObject, is_of_two: bool
) -> None:
    """The same, longer."""
    check_changed_manifest(of_two if is_of_two else job, data)


GROWING: dict[str, tuple[Any, ...]] = {
    "the manifest": (),
    "a part": ("parts", 0),
    "an object": ("objects", "model"),
    "what else a resume needs": ("extra",),
    "the place in the loops": ("extra", "loop"),
    "who wrote it": ("written",),
}


def test_what_is_not_known_of_an_epoch_counter_is_ignored(job: Victim) -> None:
    """Its number is what counts."""
    said = {"epochs": {"epoch": 1, "is_over": False, "of": 3}}
    with job.attacked(job.resealed(put("extra", "loop", "epochs", value=said))):
        assert job.load() == "newest"
    del said["epochs"]["is_over"]
    with job.attacked(job.resealed(put("extra", "loop", "epochs", value=said))):
        assert job.load() == "older"


@pytest.mark.parametrize("where", GROWING.values(), ids=list(GROWING))
@pytest.mark.parametrize("value", JUNK.values(), ids=list(JUNK))
def test_a_field_that_nobody_knows_is_not_looked_into(job: Victim, where: tuple[Any, ...], value: Any) -> None:
    """A later version may say what it likes there; nothing comes of it, and the ckpt is loaded."""
    with job.attacked(job.resealed(put(*where, "more", value=value))):
        assert job.load(closely=False) == "newest"


@some(40)
@given(st.sampled_from([*Manifest.__dataclass_fields__, "format"]), json_values)
def test_any_json_in_the_place_of_a_field_is_refused_or_loaded(job: Victim, field: str, value: Any) -> None:
    """Whole fields."""
    with job.attacked(job.resealed(put(field, value=value))):
        job.load(closely=False)


def framed(body: bytes) -> bytes:
    """Bytes with the digest that belongs to them, whatever they are."""
    return b'{"digest":"%s","manifest":%s}\n' % (xxhash.xxh3_128(body).hexdigest().encode(), body)


@some(60)
@given(
    st.binary(max_size=300)
    | st.binary(max_size=100).map(lambda body: b'{"digest":"' + body)
    | st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000, b'"\\ud800"', b'{"a":1,"a":1}']).map(framed)
)
def test_any_bytes_in_the_place_of_a_manifest_lead_back(job: Victim, data: bytes) -> None:
    """No JSON, JSON of another form, or as deep as it is long."""
    with job.attacked({job.ckpts.path(job.ckpts.newest, MANIFEST): data}):
        assert job.load(closely=False) == "older"


# Links.


LINKS: dict[str, Callable[[Ckpts], Path]] = {
    "a manifest": lambda ckpts: ckpts.path(ckpts.newest, MANIFEST),
    "a part": lambda ckpts: ckpts.parts()[0],
    "a ckpt": lambda ckpts: ckpts.path(ckpts.newest),
}


@pytest.mark.parametrize("whose", LINKS)
@pytest.mark.parametrize("there", [True, False], ids=["the right bytes there", "secrets there"])
def test_a_link_out_of_the_job_is_not_followed(job: Victim, tmp_path: Path, whose: str, there: bool) -> None:
    """Neither to what it is named for, put elsewhere, nor to another file that this process may read."""
    path = LINKS[whose](job.ckpts)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    (tmp_path / "secrets").write_bytes(b"secret")
    path.symlink_to(elsewhere if there else tmp_path / "secrets")
    on_the_disk = on_disk(tmp_path)
    life = job.ckpts.life()
    try:
        with within(20), watched(job.root):
            assert life.load() == job.ckpts.older
    finally:
        remove(path)
        elsewhere.rename(path)
    assert life.state == job.ckpts.states[job.ckpts.older, 0]
    assert on_the_disk == {**on_disk(tmp_path), **{k: v for k, v in on_the_disk.items() if k.startswith("elsewhere")}}


@pytest.mark.parametrize("place", ["generations", "generations/000001.json", "generations/000002.json"])
def test_a_link_in_the_place_of_records_leads_nowhere(tmp_path: Path, place: str) -> None:
    """A life that would claim its number there claims it here or is refused; what the link leads to stays as it is."""
    ckpts = two_ckpts(tmp_path / "root")
    path = ckpts.path(place)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    before = elsewhere.read_bytes() if elsewhere.is_file() else on_disk(elsewhere)
    said = ""
    with within(20), watched(ckpts.storage.root, may_write=True):
        try:
            claimed = generations.claim(ckpts.storage, fresh=False, about={})
            assert catalog.ckpts(ckpts.storage, claimed.lineage) == [ckpts.newest, ckpts.older]
        except MigratorError as error:
            said = str(error)
    assert not said or "link" in said
    assert before == (elsewhere.read_bytes() if elsewhere.is_file() else on_disk(elsewhere))


# Parts.


def part(header: Any, data: bytes, *, length: int | None = None, size: int = 0) -> bytes:
    """A file with this header, as JSON or as it is, that says of itself that it is so long."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode("ascii")
    raw = raw.ljust(size)
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def header_of(victim: Victim) -> tuple[dict[str, Any], bytes]:
    (path,) = victim.ckpts.parts()
    data = victim.files[path]
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}


def one_tensor(**changes: Any) -> bytes:
    return part({"__metadata__": {"format": "pt"}, "a": entry(**changes)}, bytes(4))


def after(*entries: dict[str, Any], data: int = 8) -> bytes:
    return part({"__metadata__": {}, **{f"t{i}": entry for i, entry in enumerate(entries)}}, bytes(data))


PARTS: dict[str, bytes] = {
    "no header": b"",
    "seven bytes": bytes(7),
    "a header of no length": part(b"", b""),
    **{
        f"a header that says it has {length} bytes": part({"__metadata__": {}}, bytes(300), length=length)
        for length in (
            0,
            1,
            10**6,
            10**8,
            1 << 31,
            1 << 32,
            1 << 60,
            (1 << 63) - 1,
            1 << 63,
            (1 << 64) - 8,
            (1 << 64) - 1,
        )
    },
    "300 bytes that claim 2^60": one_tensor(shape=[HUGE], dtype="U8", data_offsets=[0, HUGE]),
    "300 bytes that claim 2^33": one_tensor(shape=[1 << 33], dtype="U8", data_offsets=[0, 1 << 33]),
    "a shape larger than its bytes": one_tensor(shape=[1 << 40]),
    "a shape smaller than its bytes": one_tensor(shape=[0]),
    "a shape whose product overflows": one_tensor(shape=[1 << 32, 1 << 32]),
    "a shape whose product overflows to 4 bytes": one_tensor(shape=[(1 << 62) + 1]),
    "a shape of nothing that overflows": one_tensor(shape=[0, 1 << 62, 1 << 62], data_offsets=[0, 0]),
    "a shape of negative lengths": one_tensor(shape=[-1, -1]),
    "a shape of 65 lengths": one_tensor(shape=[1] * 65),
    "a shape of truths": one_tensor(shape=[True]),
    "a shape that is a text": one_tensor(shape="1"),
    "a shape that is nan": part(
        b'{"__metadata__":{},"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', bytes(4)
    ),
    "negative offsets": one_tensor(data_offsets=[-4, 0]),
    "offsets before the header": one_tensor(data_offsets=[-(1 << 63), -(1 << 63) + 4]),
    "offsets that are turned around": one_tensor(data_offsets=[4, 0]),
    "offsets past the end": one_tensor(data_offsets=[1 << 40, (1 << 40) + 4]),
    "offsets that are three": one_tensor(data_offsets=[0, 4, 4]),
    "offsets that are floats": one_tensor(data_offsets=[0.0, 4.0]),
    "offsets of 4000 digits": one_tensor(data_offsets=[10**4000, 10**4000 + 4]),
    "tensors that overlap": after(entry(), entry(data_offsets=[2, 6])),
    "tensors at the same place": after(entry(), entry()),
    "tensors with a gap": after(entry(), entry(data_offsets=[6, 10]), data=10),
    "bytes that belong to nobody": after(entry(), data=5000),
    "an unknown type": one_tensor(dtype="O"),
    "a type that is a list": one_tensor(dtype=["F32"]),
    "a type that torch has and we do not": one_tensor(dtype="F8_E9M9"),
    "a name twice": part(
        b'{"__metadata__":{},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        bytes(8),
    ),
    "no metadata": part({"a": entry()}, bytes(4)),
    "metadata that is a list": part({"__metadata__": [], "a": entry()}, bytes(4)),
    "metadata of types that is no text": part({"__metadata__": {"dtypes": {"a": "int8"}}, "a": entry()}, bytes(4)),
    "metadata of types that is too deep": part({"__metadata__": {"dtypes": "[" * 10**5}, "a": entry()}, bytes(4)),
    "metadata of an unknown type": part({"__metadata__": {"dtypes": '{"a":"object"}'}, "a": entry()}, bytes(4)),
    "metadata of a type of another size": part(
        {"__metadata__": {"dtypes": '{"a":"complex128"}'}, "a": entry(dtype="U8", shape=[4])}, bytes(4)
    ),
    "a tensor that is a list": part({"__metadata__": {}, "a": [0, 4]}, bytes(4)),
    "a header that is a list": part([], b""),
    "a header that is a number": part(7, b""),
    "a header that is too deep": part(b"[" * 10**5, b""),
    "a header with a number of 5000 digits": part(b'{"__metadata__":{},"a":' + b"9" * 5000 + b"}", b""),
    "a header in another encoding": part('{"__metadata__":{}}'.encode("utf-16"), bytes(2)),
    "a header that is no text": part(b"\xff" * 100, b""),
    "true tensors of nobody": after(entry(), entry(data_offsets=[4, 8])),
    "nothing in it": part({"__metadata__": {}}, b""),
}


@pytest.mark.parametrize("data", PARTS.values(), ids=list(PARTS))
def test_a_part_that_lies_leads_back(job: Victim, data: bytes) -> None:
    """Under digests that are right, and under those that were committed."""
    with job.attacked(job.with_part(data)):
        assert job.load() == "older"
    with job.attacked({job.ckpts.parts()[0]: data}):
        assert job.load(closely=False) == "older"


def moved(*places: int) -> Callable[[list[dict[str, Any]]], None]:
    """The first of these tensors gets the second one's offsets, and so on, which are as long."""

    def change(entries: list[dict[str, Any]]) -> None:
        before = [entry["data_offsets"] for entry in entries]
        for here, there in itertools.pairwise(places):
            entries[here]["data_offsets"] = before[there]

    return change


def shifted(by: int) -> Callable[[list[dict[str, Any]]], None]:
    def change(entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            entry["data_offsets"] = [offset + by for offset in entry["data_offsets"]]

    return change


TRUE_NAMES: dict[str, Callable[[list[dict[str, Any]]], None]] = {
    "two that lie at the same place": moved(0, 1),
    "two that changed places": moved(0, 1, 0),
    "all of them four bytes later": shifted(4),
    "all of them inside the header": shifted(-4),
    "one that is longer than its shape": lambda entries: entries[-1]["data_offsets"].__setitem__(
        1, entries[-1]["data_offsets"][1] + 1
    ),
    "one that takes all there is": lambda entries: entries[0].update(data_offsets=[0, entries[-1]["data_offsets"][1]]),
}


@pytest.mark.parametrize("change", TRUE_NAMES.values(), ids=list(TRUE_NAMES))
def test_true_tensors_at_wrong_places_lead_back(job: Victim, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Each of them is asked for, and is all that is wrong: the digests are right."""
    header, data = header_of(job)
    entries = sorted(
        (entry for name, entry in header.items() if name != "__metadata__"),
        key=lambda entry: (math.prod(entry["shape"]) != 16 or entry["dtype"] != "F32", entry["data_offsets"]),
    )
    change(entries)
    for changed in (data, data + bytes(4)):
        with job.attacked(job.with_part(part(header, changed))):
            assert job.load() == "older"


def test_without_the_digest_that_belongs_to_it_nothing_is_believed(job: Victim) -> None:
    """What would be loaded under a true digest, of the same length and in the same form, is not under another."""
    manifest, (path,) = job.ckpts.path(job.ckpts.newest, MANIFEST), job.ckpts.parts()
    sealed = job.resealed(put("objects", "metrics", "tree", "epoch", value=2))[manifest]
    digest = job.files[manifest].partition(b'","')[0]
    assert len(sealed) == len(job.files[manifest])
    with job.attacked({manifest: sealed}):
        assert job.load() == "newest"
    with job.attacked({manifest: digest + sealed[len(digest) :]}):
        assert job.load() == "older"
    changed = bytearray(job.files[path])
    changed[-1] ^= 1
    with job.attacked(job.with_part(bytes(changed))):
        assert job.load() == "newest"
    with job.attacked({path: bytes(changed)}):
        assert job.load() == "older"


def test_true_headers_of_odd_form_are_read(job: Victim) -> None:
    """Blanks behind, other metadata, and names as strange as there are: JSON is JSON."""
    header, data = header_of(job)
    with job.attacked(job.with_part(part(header, data, size=20_000))):
        assert job.load() == "newest"
    header["__metadata__"]["\ud800\0"] = "x"
    with job.attacked(job.with_part(part(header, data))):
        assert job.load() == "newest"


def check_changed_part(victim: Victim, data: st.DataObject) -> None:
    header, rest = header_of(victim)
    for _ in range(data.draw(st.integers(1, 2))):
        change_somewhere(data.draw, header)
    made = part(header, rest[: data.draw(st.sampled_from([None, -1, 0]))])
    with victim.attacked(victim.with_part(made)):
        victim.load(closely=False)
    with victim.attacked({victim.ckpts.parts()[0]: made}):
        assert victim.load(closely=False) == "older"


@some(50)
@given(st.data())
def test_a_true_header_with_something_exchanged_is_refused_or_read(job: Victim, data: st.DataObject) -> None:
    """Anywhere in it; if the digests do not match there is no question."""
    check_changed_part(job, data)


@pytest.mark.long
@pytest.mark.timeout(900)
@some(100, times=8)
@given(st.data())
def test_many_headers_with_something_exchanged_are_refused_or_read(job: Victim, data: st.DataObject) -> None:
    """The same, longer."""
    check_changed_part(job, data)


@some(60)
@given(st.binary(max_size=200) | st.builds(part, st.binary(max_size=60) | json_values, st.binary(max_size=20)))
def test_any_bytes_in_the_place_of_a_part_lead_back(job: Victim, data: bytes) -> None:
    """Also with the length of a header in front, and digests that are right."""
    with job.attacked(job.with_part(data)):
        assert job.load(closely=False) == "older"


@pytest.mark.processes
def test_lies_about_sizes_find_no_memory_to_take(job: Victim) -> None:
    """Once more in a process that can have little: the kernel counts what Python and torch may not tell of."""
    attacks = [job.resealed(put("objects", "metrics", "tree", "epoch", value=tree)) for tree in TREES.values()]
    attacks += [job.with_part(data) for data in PARTS.values()]
    # Made here: a forked child cannot train, as the threads that torch counts on are not there.
    life = job.ckpts.life()
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads that a forked child does not have
        child = os.fork()
    if child == 0:
        try:
            before = memory_of_process()
            resource.setrlimit(resource.RLIMIT_AS, (before["VmSize"] + (768 << 20),) * 2)
            for files in attacks:
                with job.attacked(files):
                    assert life.again().load() == job.ckpts.older
            grown = memory_of_process()["VmHWM"] - before["VmHWM"]
            assert grown < 200 << 20, f"{grown >> 20} MiB were taken"
            os.write(write, b"fine")
        except BaseException as error:
            os.write(write, repr(error).encode()[:4000])
        finally:
            os._exit(0)
    os.close(write)
    with within(100), os.fdopen(read, "rb") as said:
        assert said.read() == b"fine"
    os.waitpid(child, 0)


def memory_of_process() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if len(line) == 3 and line[2] == "kB"}


def test_a_sparse_file_is_as_large_as_it_says(job: Victim) -> None:
    """A part of 2^50 bytes takes no disk. Its digests would: a manifest that has not all of them is refused."""
    (path,) = job.ckpts.parts()
    change = put("parts", 0, "bytes", value=1 << 50)
    with job.attacked({path: b"", **job.resealed(change)}):
        with suppress(OSError):  # a file system may have no room for so much of nothing
            os.truncate(path, 1 << 42)
        life = job.ckpts.life()
        with within(20), measured(FREE + (1 << 20)), watched(job.root):
            assert life.load() == job.ckpts.older
        os.truncate(path, 0)


# What lives and ranks say of themselves.


def check_record(victim: Victim, data: bytes) -> None:
    """A record of rank 1 beside this rank's own, of the same safe point and with the same tensors."""
    try:
        with within(20), measured(FREE + TIMES * len(data), closely=False), watched(victim.root):
            record = RankRecord.from_bytes(data)
    except (CkptCorrupt, CkptMismatch):
        return
    mine = RankRecord(0, record.at, record.plan, record.same, {}, {"random": {}, "loop": None})

    class There:
        def put(self, ckpt: str, rank: int, data: bytes) -> None:
            raise AssertionError("nobody asked for that")

        def get(self, ckpt: str, ranks: set[int]) -> dict[int, bytes]:
            return dict.fromkeys(ranks, data)

        def is_committed(self, ckpt: str) -> bool:
            return False

    plan = Plan(record.at, (0, 1), (("a",), ("b",)), record.plan)
    gathering = Gathering(There(), "000001-000000000001", plan, mine)
    with within(20), watched(victim.root):
        gathering.look(2)
        gathering.unlike()
        if not gathering.missing():
            made = gathering.manifest(generation=1, job="job", ranks=2, written={})
            assert Manifest.from_bytes(made.to_bytes()) == made
            for own in made.extra.get("own", {}).values():
                assert objects_from(own["objects"]) == own["objects"]


def record_of(victim: Victim) -> dict[str, Any]:
    path = victim.ckpts.path(victim.ckpts.newest, "rank-00001.json")
    payload: dict[str, Any] = json.loads(path.read_bytes())["rank"]
    shares = {"0": {"name": "part-00000-of-00002-rank-00001.safetensors", "bytes": 0, "digest": "0" * 32, "blocks": []}}
    payload["shares"] = {**shares, **payload["shares"]}
    return payload


RECORDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "nothing of what a manifest is made of": put("extra", value={}),
    "no random states": lambda payload: payload["extra"].pop("random"),
    "a safe point that is infinite": put("at", value=[1e308, 0]),
    "a safe point of texts": put("at", value=["1", "2"]),
    "a safe point that is negative": put("at", value=[-1, 0]),
    "a safe point of three": put("at", value=[1, 2, 3]),
    "shares that are words": put("shares", value={"x": {}}),
    "a share of 5000 digits": lambda payload: payload.update(shares={"9" * 5000: payload["shares"]["0"]}),
    "a negative share": lambda payload: payload.update(shares={"-1": payload["shares"]["0"]}),
    "a share elsewhere": put("shares", "0", "name", value="../000001-000000000005/part-00000-of-00001.safetensors"),
    "a share of 2^60 bytes": put("shares", "0", "bytes", value=HUGE),
    "a part of its own elsewhere": put(
        "own", value={"name": "/etc/passwd", "bytes": 0, "digest": "0" * 32, "blocks": []}
    ),
    "objects that are numbers": put("objects", value={"model": 1}),
    "objects without a kind": put("objects", value={"model": {"tree": 1}}),
    "a rank that is negative": put("rank", value=-1),
    "digests that are lists": put("same", value={"model": [1]}),
}


@pytest.mark.parametrize("change", RECORDS.values(), ids=list(RECORDS))
def test_a_lie_in_a_record_of_a_rank_ends_no_save(of_two: Victim, change: Callable[[dict[str, Any]], Any]) -> None:
    """It is passed over, or what is made of it is a manifest that can be read."""
    payload = record_of(of_two)
    check_record(of_two, seal("rank", payload))
    change(payload)
    check_record(of_two, seal("rank", payload))


@some(120)
@given(st.data())
def test_any_record_of_a_rank_is_read_or_corrupt(of_two: Victim, data: st.DataObject) -> None:
    """A true one with something exchanged, any JSON, or any bytes."""
    payload: Any = record_of(of_two)
    change_somewhere(data.draw, payload)
    check_record(of_two, seal("rank", payload))
    check_record(of_two, seal("rank", {"rank": data.draw(json_values)}))
    check_record(of_two, data.draw(st.binary(max_size=100)))


@contextmanager
def in_generations(victim: Victim, name: str, data: bytes) -> Iterator[None]:
    path = victim.ckpts.path("generations", name)
    before = path.read_bytes() if path.exists() else None
    path.write_bytes(data)
    try:
        yield
    finally:
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)


def check_life(victim: Victim, size: int) -> None:
    """The next life has a number, finds both ckpts, and waits at most as long as anybody may ask for."""
    storage = victim.ckpts.storage
    times = itertools.count(0.0, 10.0)
    waits: list[float] = []
    at_most = FREE + TIMES * (size + 10_000)
    with within(20), measured(at_most, closely=size > 1000), watched(victim.root, may_write=True):
        try:
            claimed = generations.claim(storage, fresh=False, about={"script": "train.py", "argv": []})
        except CkptMismatch:
            # A life of a newer version, as it says. No number is taken on its word.
            assert generations.numbers(storage) == {1, 2}
            return
        leaving_mark.wait_for_leaving(storage, claimed.lineage, clock=lambda: next(times), sleep=waits.append)
        found = catalog.ckpts(storage, claimed.lineage)
        about = generations.read_about(storage, 2)
        storage.delete(names.record_name(claimed.number))
    assert set(found) <= {victim.ckpts.newest, victim.ckpts.older}
    assert victim.ckpts.newest in found
    assert isinstance(about, dict)
    assert len(waits) <= 3600 / 10 + 1


def check_generation(victim: Victim, number: int, data: bytes) -> None:
    with in_generations(victim, f"{number:06d}.json", data):
        check_life(victim, len(data))


@some(60)
@given(
    st.integers(1, 2),
    st.binary(max_size=100)
    | st.builds(
        lambda generation, continues, about, more: seal(
            "generation", {"generation": generation, "continues": continues, "about": about, **more}
        ),
        st.sampled_from([1, 2]) | json_values,
        st.sampled_from([None, 1, 2, 3, 1 << 70, -1]) | json_values,
        json_values,
        st.just({})
        | st.dictionaries(st.text(max_size=3), json_values, max_size=2)
        | st.fixed_dictionaries({"format": json_values}),
    ),
)
def test_any_record_of_a_life_leaves_the_newest_ckpt_in_reach(job: Victim, number: int, data: bytes) -> None:
    """Sealed or not. A record that is true in form may cut off what came before it: it is what says so."""
    check_generation(job, number, data)


NOTE = json.loads(MemoryNote(5, 9, 2, 1, 0, 0, "a", "b").to_bytes())


def check_mark(victim: Victim, data: bytes) -> None:
    with in_generations(victim, "000002.leaving", data):
        check_life(victim, len(data))


@pytest.mark.parametrize(
    "grace", [b"1e308", b"1e999", b"-1e999", b"NaN", b"-5", b"0", b'"nan"', b'"1e5"', b"9" * 5000, b"null", b"[[[]]]"]
)
def test_no_mark_makes_a_life_wait_for_longer_than_anybody_may_ask(job: Victim, grace: bytes) -> None:
    """Also if it says so in numbers that are none."""
    check_mark(job, b'{"grace_s": ' + grace + b"}")


@some(60)
@given(
    st.binary(max_size=60)
    | json_values.map(lambda value: json.dumps(value).encode())
    | json_values.map(lambda value: json.dumps({"grace_s": value}).encode())
    | st.just(b"[" * 100_000)
)
def test_any_mark_is_no_more_than_a_wait(job: Victim, data: bytes) -> None:
    """Nothing but time can come of it."""
    check_mark(job, data)


def check_note(victim: Victim, data: bytes) -> None:
    """A note of the memory that the life before used: a line of the log, or none, and nothing else."""
    with in_generations(victim, "000002.memory-00000", data):
        check_life(victim, len(data))
        at_most = FREE + TIMES * (len(data) + 10_000)
        with pytest.MonkeyPatch.context() as patch:
            # What the kernel says of this container is no file of the job.
            patch.setattr(memory, "of_container", lambda: memory.Memory(used=5, limit=9, kills=1))
            patch.setattr(container, "container_life", lambda: NOTE["container"])
            with within(20), measured(at_most, closely=False), watched(victim.root):
                memory_before.log_memory_before(victim.ckpts.storage, 2)


@some(60)
@given(
    st.binary(max_size=60)
    | json_values.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(st.sampled_from([*NOTE]), json_values | st.integers(0, 1 << 64)).map(
        lambda said: json.dumps({**NOTE, **said}).encode()
    )
    | st.sampled_from([b"[" * 100_000, b'{"peak":' + b"9" * 5000 + b"}"])
)
def test_any_note_of_memory_is_no_more_than_a_line(job: Victim, data: bytes) -> None:
    """Nothing depends on it."""
    check_note(job, data)


# The signal file.


def check_signal(path: Path, size: int, *, closely: bool = True) -> None:
    file = SignalFile(path)
    now = 1_700_000_000.0
    with within(5), measured((1 << 20) + TIMES * min(size, 1 << 16), closely=closely), watched(path.parent):
        found = file.read()
        deadline = open_deadline(found, now=now, mtime=now, grace_s=30.0)
        pids = found.pids if found is not None else ()
    assert found is None or found.word in WORDS
    assert deadline is None or (math.isfinite(deadline) and now < deadline <= now + 86400)
    assert all(0 < pid < 10**10 for pid in pids)
    for value in found.fields.values() if found is not None else ():
        assert "\n" not in value
        if value.isdecimal():
            int(value)  # whoever takes a field for a number gets one


SIGNALS: dict[str, bytes] = {
    "a deadline without end": b"save\ndeadline=1e308\n",
    "an infinite deadline": b"save\ndeadline=inf\n",
    "a deadline that is nan": b"save\ndeadline=nan\n",
    "a deadline of the past": b"save\ndeadline=-1e308\n",
    "a deadline of 60000 digits": b"save\ndeadline=" + b"9" * 60_000,
    "a hook of 60000 digits": b"save\nhook=" + b"9" * 60_000 + b"\n",
    "a hook in other digits": "save\nhook=٣٣\n".encode(),
    "pids without end": b"save\npids=" + b"1," * 30_000,
    "pids of 5000 digits": b"save\npids=" + b"9" * 5000,
    "a request that is a path": b"save\nrequest=../../etc/passwd\npod=..\n",
    "a word behind a megabyte": b" " * (1 << 20) + b"save",
    "one line of a megabyte": b"save\nerror=" + b"x" * (1 << 20),
    "a million lines": b"save\n" + b"a=b\n" * 1_000_000,
    "a field again and again": b"save\n" + b"deadline=1\n" * 5000 + b"deadline=nan\n",
    "fields of 5000 names": b"save\n" + b"".join(b"a%d=1\n" % i for i in range(5000)),
    "zeros": bytes(1 << 20),
    "no text": b"save\n\xff\xfe=\xff\ndeadline=\xff\n",
}


@pytest.mark.parametrize("data", SIGNALS.values(), ids=list(SIGNALS))
def test_a_strange_signal_is_notice_with_an_end_or_none(tmp_path: Path, data: bytes) -> None:
    """No exception, no more than is worth reading, and no deadline beyond a day."""
    path = tmp_path / "signal"
    path.write_bytes(data)
    check_signal(path, len(data))


@some(300)
@given(
    st.binary(max_size=200)
    | st.builds(
        lambda word, lines: "\n".join([word, *lines]).encode("utf-8", "surrogatepass"),
        st.sampled_from([*WORDS, "save\0", " save\r", "SAVE"]),
        st.lists(
            st.builds(
                "{}={}".format,
                st.sampled_from(["deadline", "request", "hook", "pids", "pod", "error", "\ud800"])
                | st.text(max_size=4),
                st.floats() | st.integers() | st.text(st.characters(exclude_categories=()), max_size=20),
            ),
            max_size=5,
        ),
    )
)
def test_any_signal_is_notice_with_an_end_or_none(in_memory: Path, data: bytes) -> None:
    """Any bytes, and any fields behind a word that counts."""
    path = in_memory / "any signal"
    path.mkdir(exist_ok=True)
    (path / "signal").write_bytes(data)
    check_signal(path / "signal", len(data), closely=False)


def test_a_signal_file_of_a_terabyte_is_not_read(tmp_path: Path) -> None:
    """No more of it than a request can have."""
    path = tmp_path / "signal"
    path.write_bytes(b"save\n")
    os.truncate(path, 1 << 40)
    check_signal(path, 1 << 40)


INSTEAD: dict[str, Callable[[Path], Any]] = {
    "a directory": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to an endless file": lambda path: path.symlink_to("/dev/zero"),
    "a link to a terminal": lambda path: path.symlink_to("/dev/tty"),
}


@pytest.mark.parametrize("instead", INSTEAD)
def test_what_is_no_signal_file_is_named_and_holds_nobody(tmp_path: Path, instead: str) -> None:
    """Whoever reads is told at once; whoever writes takes its place or is told, and writes into nothing else."""
    path = tmp_path / "signal"
    INSTEAD[instead](path)
    file = SignalFile(path)
    with within(5):
        with pytest.raises(SettingsError, match="MIGRATOR_SIGNAL"):
            file.read()
        try:
            file.write(INIT, pids=1)
        except SettingsError:
            assert instead == "a directory"
        else:
            assert path.read_bytes() == b"init\npids=1\n"
            assert not path.is_symlink()


@pytest.mark.parametrize("instead", INSTEAD)
def test_what_lies_where_a_signal_is_written_aside_holds_nobody(
    tmp_path: Path, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name can be guessed: it is taken away, or named if that cannot be done."""
    path = tmp_path / "signal"
    file = SignalFile(path)
    tried: list[Path] = []
    monkeypatch.setattr(Path, "replace", lambda self, target: tried.append(self))
    file.write(INIT)
    monkeypatch.undo()
    tried[0].unlink()
    INSTEAD[instead](tried[0])
    with within(5), watched(tmp_path, may_write=True):
        try:
            file.write(SAVE, request=1)
        except SettingsError:
            assert instead == "a directory"
        else:
            assert path.read_bytes() == b"save\nrequest=1\n"


@pytest.mark.parametrize("instead", [*INSTEAD, "a file", "a link to a file"])
def test_what_lies_where_the_progress_is_told_holds_no_save(tmp_path: Path, instead: str) -> None:
    """It is replaced, or nothing is told; a file that it leads to stays as it is."""
    (tmp_path / "other").write_bytes(b"other")
    made = {
        "a file": lambda path: path.write_bytes(b"x"),
        "a link to a file": lambda path: path.symlink_to(tmp_path / "other"),
    }
    (made | INSTEAD)[instead](tmp_path / "signal.progress")
    teller = ForHook(tmp_path / "signal")
    with within(5):
        teller.begin()
        teller._next_s = 0.0
        teller(1 << 20, 1 << 21)
        if instead != "a directory":
            assert (tmp_path / "signal.progress").read_bytes() == b"1 2\n"
        teller.remove()
    assert (tmp_path / "other").read_bytes() == b"other"


# Settings.

VARIABLES = [
    *(field.metadata["variable"] for field in Settings.__dataclass_fields__.values() if field.metadata),
    *settings.ALIASES,
    settings.TERMINATION_LOG,
]
TEXTS = [
    *(
        "",
        " ",
        "\0",
        "a\0b",
        "\ud800",
        "\udcff",
        "~",
        "~nobody-of-that-name/x",
        "~/x",
        ".",
        "..",
        "/",
        "/.",
        "//",
        "./.",
    ),
    *(
        "file://",
        "file://[",
        "file:///a%00b",
        "file:///%ff",
        "file://host/..",
        "s3://b",
        "x" * 5000,
        "/" * 5000,
        "-",
        "\n",
    ),
    *(
        "nan",
        "inf",
        "-inf",
        "1e999",
        "1e-400",
        "9" * 5000,
        "-0",
        "0x10",
        "1_0",
        "٣",
        "²",
        "500",
        "10m",
        "1.5h",
        "999999999999h",
    ),
    *("never", "off", "True", "None", "__import__('os')", "$(true)", "`true`", "%s", "{}", "a=b", "a\nb"),
]


def check_settings(arguments: dict[str, Any], environ: dict[str, str]) -> None:
    try:
        with within(5), watched(Path("/nowhere")):
            found = settings.read(arguments, environ)
    except SettingsError as error:
        said, found = str(error), None
    if found is None:
        assert "\n  " in said
        assert "allowed" in said or "no such setting" in said
        return
    assert 1 <= found.grace_s <= 86400
    assert 1 <= found.keep <= 1_000_000
    assert 0 <= found.exit_code <= 255
    assert found.every.steps is None or found.every.steps > 0
    assert found.every.seconds is None or 0 < found.every.seconds < math.inf
    for path in (found.ckpt, found.signal, found.termination_log, *([found.legacy_file] if found.legacy_file else [])):
        assert path.is_absolute()
        assert b"\0" not in os.fsencode(path)
    # What is accepted can be used, or is refused by name when it is.
    assert found.signal.name
    ForHook(found.signal)
    try:
        PosixStorage(found.ckpt, found.job).list()
        SignalFile(found.signal).fingerprint()
    except MigratorError:
        pass
    assert PosixStorage(found.ckpt, found.job).directory.parent == found.ckpt


@pytest.mark.parametrize("value", TEXTS, ids=lambda value: ascii(value)[:30])
def test_a_strange_setting_is_refused_by_name_or_can_be_used(value: str) -> None:
    """In each variable, and as an argument in its place."""
    for variable in VARIABLES:
        check_settings({}, {variable: value})
    for name, field in Settings.__dataclass_fields__.items():
        if field.metadata:
            check_settings({name: value}, {})


@pytest.mark.parametrize(
    "value", [10**5000, -(10**5000), math.nan, b"\0", [[]], {"a": "\0"}, object(), Path("\0")], ids=type
)
def test_an_argument_of_any_type_is_refused_by_name_or_can_be_used(value: Any) -> None:
    """Not everything can even be written out."""
    for name, field in Settings.__dataclass_fields__.items():
        if field.metadata:
            check_settings({name: value}, {})


anything = st.sampled_from(TEXTS) | st.text(st.characters(exclude_categories=()), max_size=20)


@some(300)
@given(
    st.dictionaries(st.sampled_from(VARIABLES) | st.text(max_size=4).map("MIGRATOR_{}".format), anything, max_size=5),
    st.dictionaries(
        st.sampled_from([*Settings.__dataclass_fields__, "more"]),
        anything | st.integers() | st.floats() | st.none(),
        max_size=3,
    ),
)
def test_any_settings_are_refused_by_name_or_can_be_used(environ: dict[str, str], arguments: dict[str, Any]) -> None:
    """Several at once, and variables of nobody's."""
    check_settings(arguments, environ)


# The predecessor's file.


class Runs:
    """Whoever unpickles this runs something."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.what = function, arguments

    def __reduce__(self) -> Any:
        return self.what


class Numbers:
    """A tensor of a storage that may not be what it says."""

    def __init__(
        self, count: int, size: tuple[int, ...], stride: tuple[int, ...], key: str = "0", offset: int = 0
    ) -> None:
        storage = ("storage", torch.FloatStorage, key, "cpu", count)
        self.what = _rebuild_tensor_v2, (storage, offset, size, stride, False, OrderedDict())

    def __reduce__(self) -> Any:
        return self.what


class _Pickler(pickle.Pickler):
    def persistent_id(self, found: Any) -> Any:
        return found if isinstance(found, tuple) and found[:1] == ("storage",) else None


def pickled(value: Any, protocol: int = 2) -> bytes:
    made = io.BytesIO()
    _Pickler(made, protocol).dump(value)
    return made.getvalue()


def zipped(
    data: bytes, *, storages: dict[str, bytes] | None = None, how: int = zipfile.ZIP_STORED, **more: bytes
) -> bytes:
    """The archive that `torch.save()` makes."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", how) as archive:
        names = {"data.pkl": data, "version": b"3\n", "byteorder": b"little", **more}
        for name, content in names.items():
            archive.writestr(f"archive/{name}", content)
        for key, content in (storages or {"0": bytes(12)}).items():
            archive.writestr(f"archive/data/{key}", content)
    return made.getvalue()


def saved(value: Any, **more: Any) -> bytes:
    made = io.BytesIO()
    torch.save(value, made, **more)
    return made.getvalue()


def overlapping(count: int) -> bytes:
    """Many names in the archive for one and the same record."""
    values = {str(k): Numbers(25_000, (25_000,), (1,), str(k)) for k in range(count)}
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("archive/data.pkl", pickled(values))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/data/0", bytes(100_000))
        for k in range(1, count):
            entry = copy.copy(archive.filelist[2])
            entry.filename = f"archive/data/{k}"
            archive.filelist.append(entry)
            archive.NameToInfo[entry.filename] = entry
    return made.getvalue()


def laughing(depth: int) -> bytes:
    """A tuple of twice the tuple before it, so many times."""
    steps = b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(depth))
    return b"\x80\x02}X\x07\x00\x00\x00metrics)q\x00" + steps + b"s."


CODE = (
    Runs(os.system, "touch ran"),
    Runs(exec, "open('ran', 'w')"),
    Runs(eval, "open('ran', 'w')"),
    Runs(__import__, "this_is_none_of_ours"),
    Runs(torch.load, "ran"),
    Runs(getattr, "", "join"),
    Runs(open, "ran", "w"),
    Runs(Path("ran").touch),
)

LEGACY: dict[str, bytes] = {
    **{f"a zip that runs {run.what[0].__name__} {k}": zipped(pickled({"model": run})) for k, run in enumerate(CODE)},
    **{f"a pickle that runs {run.what[0].__name__} {k}": pickled({"model": run}) for k, run in enumerate(CODE)},
    "text opcodes that run a shell": zipped(b"cos\nsystem\n(S'touch ran'\ntR."),
    "an instance opcode that runs a shell": zipped(b"(S'touch ran'\nios\nsystem\n."),
    "the format before zip": saved({"a": 1}, _use_new_zipfile_serialization=False),
    "a zip with another byte order that is none": zipped(pickled({}), byteorder=b"middle"),
    "a zip that says it is a script": zipped(pickled({}), **{"constants.pkl": pickled(CODE[0])}),
    "nothing": b"",
    "zeros": bytes(1000),
    "a zip of nothing": b"PK\x05\x06" + bytes(18),
    "a list": saved([1]),
    "a tensor": saved(torch.ones(2)),
    "keys that are numbers": saved({1: 2}),
    "keys of 10^4 digits": saved({10**10_000: 2}),
    "keys of 10^4 digits in a model": saved({"model": {10**10_000: torch.ones(2)}}),
    "keys that are tuples of tensors": saved({(1, 2): torch.ones(2)}),
    "another model": saved({"model": {"a": torch.ones(1)}}),
    "a model that is a number": saved({"model": 7}),
    "a storage of 2^40": zipped(pickled({"model": {"a": Numbers(1 << 40, (1 << 40,), (1,))}})),
    "a storage of 2^31": zipped(pickled({"model": {"a": Numbers(1 << 31, (1 << 31,), (1,))}})),
    "a storage of -1": zipped(pickled({"model": {"a": Numbers(-1, (3,), (1,))}})),
    "a view of 2^40 without strides": zipped(pickled({"model": {"0.weight": Numbers(3, (1 << 20, 1 << 20), (0, 0))}})),
    "a view beyond its storage": zipped(pickled({"model": {"a": Numbers(3, (1 << 31,), (1,))}})),
    "a view before its storage": zipped(pickled({"model": {"a": Numbers(3, (3,), (1,), offset=-5)}})),
    "a view with negative strides": zipped(pickled({"model": {"a": Numbers(3, (3,), (-1,))}})),
    "a view that overflows": zipped(pickled({"model": {"a": Numbers(3, (1 << 62,), (4,))}})),
    "a storage that is not there": zipped(pickled({"model": {"a": Numbers(3, (3,), (1,), "../../x")}})),
    "20 MB in 20 kB of text": zipped(pickled({"metrics": "x" * (20 << 20)}), how=zipfile.ZIP_DEFLATED),
    "20 MB in 20 kB of tensors": zipped(
        pickled({"metrics": Numbers(5 << 20, (5 << 20,), (1,))}),
        storages={"0": bytes(20 << 20)},
        how=zipfile.ZIP_DEFLATED,
    ),
    "the same bytes a thousand times": overlapping(1000),
    "a tuple of 2^60 tuples": zipped(laughing(60)),
    "a pickle that asks for 2^31 bytes": zipped(b"\x80\x02B\xff\xff\xff\x7fabc."),
    "a pickle that asks for a negative length": zipped(b"\x80\x02\x8b\xff\xff\xff\xffabc."),
    "a pickle that ends at once": zipped(b""),
    "a pickle that pops from nothing": zipped(b"\x80\x020000."),
    "a pickle of 10^5 lists": zipped(b"\x80\x02" + b"]" * 100_000 + b"."),
    "a memo of 2^31": zipped(b"\x80\x02}r\xff\xff\xff\x7f."),
}


class Heir:
    """A script of the predecessor's, over and over, and the file it finds."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "migration.pth"
        self.objects = objects(7)
        self.registry = registered(self.objects)

    def load(self, data: bytes, *, closely: bool = True) -> str:
        self.path.write_bytes(data)
        state = state_of(self.objects)
        before = on_disk(self.path.parent)
        said = ""
        try:
            with within(20), measured((8 << 20) + TIMES * len(data), closely=closely), watched(self.path.parent):
                pytorchjob_migration.load(self.path, self.registry)
            outcome = "loaded"
        except (CkptCorrupt, CkptMismatch) as error:
            outcome, said = type(error).__name__, str(error)
        assert outcome == "loaded" or str(self.path) in said
        if outcome == "CkptCorrupt" or "does not fit what is registered" in said:
            assert state_of(self.objects) == state
        else:
            self.objects = objects(7)
            self.registry = registered(self.objects)
        assert on_disk(self.path.parent) == before
        return outcome


@pytest.fixture(scope="module")
def heir(new_directory: Callable[[], Path]) -> Heir:
    return Heir(new_directory())


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a file makes run would leave something there."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "ran").exists()


def test_a_true_file_of_the_predecessor_is_loaded(heir: Heir) -> None:
    """None of the rules is broken by it."""
    assert heir.load(saved(true_file())) == "loaded"


def true_file() -> dict[str, Any]:
    made = objects(8)
    state: dict[str, Any] = {name: made[name].state_dict() for name in ("model", "optimizer", "sampler")}
    return {**state, "metrics": made["metrics"]}


@pytest.mark.parametrize("data", LEGACY.values(), ids=list(LEGACY))
def test_a_hostile_file_of_the_predecessor_runs_nothing(heir: Heir, data: bytes) -> None:
    """No code, no other file, no memory beyond its size: an error that names it."""
    assert heir.load(data) in ("CkptCorrupt", "CkptMismatch")


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.builds(pow, st.just(10), st.just(5000)),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(), below, max_size=3),
    max_leaves=6,
)


@some(25)
@given(st.data())
def test_any_plain_values_in_a_file_of_the_predecessor_are_loaded_or_refused(heir: Heir, data: st.DataObject) -> None:
    """In the place of an object, or of something in it."""
    made: Any = true_file()
    where = data.draw(
        st.sampled_from([*made, "model.0.weight", "optimizer.state", "optimizer.param_groups", "sampler.cursor"])
    )
    name, _, key = where.partition(".")
    value = data.draw(plain)
    if key:
        made[name][key] = value
    else:
        made[name] = value
    heir.load(saved(made), closely=False)


def check_damaged_file(heir: Heir, data: st.DataObject) -> None:
    """The pickle in it with bytes exchanged, or any opcodes."""
    true = pickled({"metrics": {"a": [1, 2.0, "x", None], "b": (1, 2)}, "model": {"a": Numbers(3, (3,), (1,))}})
    at = data.draw(st.integers(0, len(true)))
    patch = data.draw(st.binary(max_size=12) | opcodes)
    cut = data.draw(st.integers(0, 6))
    made = true[:at] + patch + true[at + cut :]
    assume(made != true)
    assert heir.load(data.draw(st.sampled_from([zipped(made), made])), closely=False) != "loaded"


opcodes = st.lists(
    st.sampled_from(
        [
            *(b"(", b"0", b"2", b"}", b"]", b")", b"N", b"\x88", b"K\x01", b"U\x02os", b"X\x06\x00\x00\x00system"),
            *(b"cos\nsystem\n", b"cbuiltins\neval\n", b"ctorch\nload\n", b"ctorch._utils\n_rebuild_tensor_v2\n"),
            *(b"\x81", b"R", b"b", b"Q", b"t", b"\x85", b"\x86", b"\x93", b"q\x00", b"h\x00", b"s", b"u", b"e", b"."),
        ]
    ),
    max_size=12,
).map(b"".join)


@some(150)
@given(st.data())
def test_any_damage_in_a_file_of_the_predecessor_runs_nothing(heir: Heir, data: st.DataObject) -> None:
    """Opcodes that find and call whatever there is, put into a true pickle."""
    check_damaged_file(heir, data)


@pytest.mark.long
@pytest.mark.timeout(900)
@some(150, times=10)
@given(st.data())
def test_much_damage_in_a_file_of_the_predecessor_runs_nothing(heir: Heir, data: st.DataObject) -> None:
    """The same, longer."""
    check_damaged_file(heir, data)
