"""The typed tree gives back what was put in, refuses the rest by its path, and survives hostile input."""

from __future__ import annotations

import enum
import json
import math
import struct
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from migrator.ckpt.codec import DTYPES, MAX_DEPTH, Stored, decode, encode, scan
from migrator.errors import CkptCorrupt, RegistrationError


def there_and_back(value: Any) -> Any:
    text = json.dumps(encode(value, put=lambda tensor, path: None, path="x"), allow_nan=False)
    return decode(json.loads(text), get=lambda stored: pytest.fail("nothing was stored"))


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other), (one, other)
    if isinstance(one, float):
        assert struct.pack("d", one) == struct.pack("d", other) or (math.isnan(one) and math.isnan(other))
    elif isinstance(one, dict):
        assert len(one) == len(other)
        for (k1, v1), (k2, v2) in zip(one.items(), other.items(), strict=True):
            assert_same(k1, k2)
            assert_same(v1, v2)
    elif isinstance(one, (list, tuple, deque)):
        assert len(one) == len(other)
        assert getattr(one, "maxlen", None) == getattr(other, "maxlen", None)
        for v1, v2 in zip(one, other, strict=True):
            assert_same(v1, v2)
    elif isinstance(one, (np.ndarray, np.generic)):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert bits(one) == bits(other)
    elif isinstance(one, (set, frozenset)):
        # By what they show: no nan equals another.
        assert sorted(map(repr, one)) == sorted(map(repr, other))
    else:
        assert one == other


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=8)  # lone surrogates too
    | st.binary(max_size=8)
)
keys = st.recursive(plain, lambda below: st.lists(below, max_size=3).map(tuple), max_leaves=4)
arrays = st.sampled_from(["<f4", "<f8", ">i2", "|b1", "<u8", "<c16", "<U3", "|S2", "<M8[ns]"]).flatmap(
    lambda kind: st.lists(st.integers(0, 3), max_size=3).map(lambda shape: np.ones(shape, "u1").astype(kind))
)
tensors = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128]).flatmap(
    lambda kind: st.lists(st.integers(0, 3), max_size=3).map(lambda shape: torch.rand(shape).to(kind))
)
leaves = (
    plain
    | arrays
    | tensors
    | st.floats(width=32).map(np.float32)
    | st.sampled_from([torch.float16, torch.device("cuda:1"), torch.Size([2, 3]), np.str_(""), np.int64(-1)])
)
values = st.recursive(
    leaves,
    lambda below: (
        st.lists(below, max_size=4)
        | st.lists(below, max_size=4).map(tuple)
        | st.dictionaries(keys, below, max_size=4)
        | st.dictionaries(st.text(max_size=4), below, max_size=4)
        | st.dictionaries(keys, below, max_size=4).map(OrderedDict)
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
        | st.lists(below, max_size=4).map(lambda items: deque(items, maxlen=7))
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(values)
def test_whatever_is_allowed_comes_back_the_same(value: Any) -> None:
    """Types, order, bits of floats and shapes survive the way through JSON text."""
    assert_same(value, there_and_back(value))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(values)
def test_what_scan_lets_pass_can_be_encoded(value: Any) -> None:
    """Registration and save agree on what a ckpt can hold."""
    scan(value, "x")
    encode(value, put=lambda tensor, path: path, path="x")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_small_tensors_of_every_dtype_come_back(dtype: torch.dtype) -> None:
    """Also those that numpy does not know."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls complex32 experimental
        tensor = torch.arange(2 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    assert_same(tensor, there_and_back(tensor))
    assert_same(tensor[0], there_and_back(tensor[0]))
    assert_same(tensor[:0], there_and_back(tensor[:0]))


def test_views_are_stored_by_their_values() -> None:
    """Transposed, conjugated, negated and expanded tensors come back as what they show."""
    base = torch.tensor([[1 + 2j, 3 - 4j, 0j], [5j, 6, 7]])
    for view in (base.t(), base.conj(), base.conj().imag, base[0].expand(4, 3), torch.nn.Parameter(base)):
        assert torch.equal(view, there_and_back(view))


def test_large_integers_survive() -> None:
    """Also those that Python would not write in decimal."""
    for value in (2**64, -(2**200), 10**5000):
        assert value == there_and_back(value)


def test_subclasses_of_dict_and_list_come_back_plain() -> None:
    """As promised, and never as a class that a file names."""
    assert there_and_back([Counter("aab"), defaultdict(list, a=[1])]) == [{"a": 2, "b": 1}, {"a": [1]}]
    assert type(there_and_back(Counter("a"))) is dict


def test_a_tensor_in_a_part_is_named_in_the_tree_and_asked_for() -> None:
    """`put` decides where the bytes go, `get` brings them back."""
    large, small = torch.zeros(100, 3, dtype=torch.float16), torch.ones(2)
    paths = {}

    def put(tensor: torch.Tensor, path: str) -> str | None:
        paths[path] = tensor
        return f"part:{path}" if tensor.numel() > 10 else None

    tree = json.loads(json.dumps(encode({"state": {0: [large, small]}}, put=put, path="optimizer")))
    assert list(paths) == ["optimizer.state[0][0]", "optimizer.state[0][1]"]
    asked = []
    value = decode(tree, get=lambda stored: asked.append(stored) or large)

    assert asked == [Stored("part:optimizer.state[0][0]", torch.float16, (100, 3), "cpu")]
    assert value["state"][0][0] is large
    assert torch.equal(value["state"][0][1], small)


def test_no_two_tensors_have_the_same_path() -> None:
    """The caller may use paths as names: keys that print alike are told apart."""
    t = torch.ones(1)
    value = {
        "a": {"b": t},
        "a.b": t,
        "a']['b": t,
        "0": t,
        0: t,
        "1.5": t,
        1.5: t,
        (0,): t,
        "(0,)": t,
        b"0": t,
        "": t,
    }
    paths: list[str] = []
    encode([value, [t]], put=lambda tensor, path: paths.append(path) or path, path="x")
    assert len(set(paths)) == len(paths) == 12


class Colour(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


Pair = namedtuple("Pair", "a b")


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(2)


REFUSED = [
    (lambda: {"lr_lambdas": [lambda epoch: epoch]}, "scheduler.lr_lambdas[0]", "function"),
    (lambda: {"a": Colour.RED}, "scheduler.a", ".value"),
    (lambda: {"a": Number.ONE}, "scheduler.a", ".value"),
    (lambda: [Pair(1, 2)], "scheduler[0]", "tuple or dict"),
    (lambda: 1j, "scheduler", "complex"),
    (lambda: {"a b": bytearray(1)}, "scheduler['a b']", "bytearray"),
    (lambda: {frozenset(): 1}, "scheduler[frozenset()]", "keys"),
    (lambda: {(1, Colour): 1}, "scheduler", "keys"),
    (lambda: {torch.ones}, "scheduler", "set elements"),
    (lambda: {Number.ONE: 1}, "scheduler", ".value"),
    (lambda: np.array([object()]), "scheduler", "object"),
    (lambda: np.zeros(1, "i4,f4"), "scheduler", "elements"),
    (lambda: np.ma.array([1]), "scheduler", "plain array"),
    (torch.Generator, "scheduler", "Generator"),
    (lambda: [torch.ones(2).to_sparse()], "scheduler[0]", "sparse"),
    (lambda: torch.ones(2, device="meta"), "scheduler", "meta"),
    (torch.nn.parameter.UninitializedParameter, "scheduler", "lazy"),
    (_fake, "scheduler", "FakeTensor"),
    (lambda: torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), "scheduler", "NestedTensor"),
]


@pytest.mark.parametrize(("make", "path", "hint"), REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_the_rest_is_refused_with_its_path_and_a_way_out(make: Any, path: str, hint: str) -> None:
    """At registration already, by the same words as at a save."""
    value = make()
    for attempt in (
        lambda: scan(value, "scheduler"),
        lambda: encode(value, put=lambda tensor, path: None, path="scheduler"),
    ):
        with pytest.raises(RegistrationError) as refusal:
            attempt()
        assert str(refusal.value).startswith(path)
        assert hint in str(refusal.value)


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_are_refused() -> None:
    """Their bytes are not their values."""
    with pytest.raises(RegistrationError, match="quantized"):
        scan(torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "x")


def test_cycles_and_great_depth_are_refused() -> None:
    """Neither the save nor a later load recurses without bound."""
    ring: list[Any] = [1]
    ring.append({"again": ring})
    with pytest.raises(RegistrationError, match=r"x\[1\].again contains itself"):
        scan(ring, "x")

    def nested(depth: int) -> Any:
        value: Any = {}
        for _ in range(depth - 1):
            value = {1: value}
        return value

    deepest = nested(MAX_DEPTH)
    assert there_and_back(deepest) == deepest
    with pytest.raises(RegistrationError, match="deep"):
        scan(nested(MAX_DEPTH + 1), "x")


def test_the_same_object_twice_is_no_cycle() -> None:
    """Only what contains itself is one."""
    shared = [1]
    assert there_and_back([shared, shared]) == [[1], [1]]


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 2**70)
    | st.floats()
    | st.sampled_from(["nan", "float32", "<f4", "<U1", "|O8", "AAAA", "cpu", "zz", "-ff", "<M8[x]", "\ud800", "é"])
    | st.text(max_size=5),
    lambda below: (
        st.lists(below, max_size=4)
        | st.dictionaries(
            st.sampled_from(["!", "v", "dtype", "shape", "device", "stored", "maxlen", "a"]),
            below,
            max_size=5,
        )
        | st.fixed_dictionaries(
            {
                "!": st.sampled_from(
                    [
                        *("float", "int", "bytes", "dtype", "device", "size", "tuple", "dict", "odict"),
                        *("set", "frozenset", "deque", "scalar", "array", "tensor"),
                    ]
                )
            },
            optional=dict.fromkeys(("v", "dtype", "shape", "device", "stored", "maxlen"), below),
        )
    ),
    max_leaves=15,
)


def decode_or_corrupt(tree: Any) -> None:
    try:
        decode(tree, get=lambda stored: stored)
    except CkptCorrupt:
        pass


@settings(max_examples=400, deadline=None, derandomize=True)
@given(anything)
def test_hostile_trees_are_corrupt_and_nothing_worse(tree: Any) -> None:
    """Whatever JSON can hold either decodes or raises CkptCorrupt."""
    decode_or_corrupt(tree)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(values, st.data())
def test_true_trees_with_one_node_exchanged_are_corrupt_and_nothing_worse(value: Any, data: st.DataObject) -> None:
    """A tree that is nearly right does not get further than one that is all wrong."""
    tree = [json.loads(json.dumps(encode(value, put=lambda tensor, path: None, path="x")))]
    node: Any = tree
    while True:
        place = data.draw(st.sampled_from(list(node) if isinstance(node, dict) else list(range(len(node)))))
        inside = node[place]
        if not isinstance(inside, (dict, list)) or not inside or data.draw(st.booleans()):
            break
        node = inside
    node[place] = data.draw(anything)
    decode_or_corrupt(tree)


def tensor_node(**changes: Any) -> dict[str, Any]:
    return {"!": "tensor", "dtype": "float32", "shape": [1], "device": "cpu", "v": "AAAAAA==", **changes}


LIES = [
    tensor_node(shape=[2]),
    tensor_node(shape=[2**40]),
    tensor_node(shape=[-1]),
    tensor_node(shape=[True]),
    tensor_node(shape=[0, 2**61, 2**61], v=""),
    tensor_node(shape=[1] * 65),
    tensor_node(v="AAAAAA="),
    tensor_node(v="AAAA AA=="),
    tensor_node(v=None),
    tensor_node(dtype="float1"),
    tensor_node(dtype=["float32"]),
    tensor_node(device="cuda"),
    tensor_node(stored="x"),
    {"!": "array", "dtype": "|O8", "shape": [1], "v": "AAAAAAAAAAA="},
    {"!": "array", "dtype": "i4,f4", "shape": [1], "v": "AAAAAAAAAAA="},
    {"!": "array", "dtype": "<f8", "shape": [2**40], "v": ""},
    {"!": "array", "dtype": "<i2", "shape": [1], "v": "AAAAAA=="},
    {"!": "scalar", "dtype": "<i2", "v": "AAAAAA=="},
    {"!": "array", "dtype": "<M8[parsec]", "shape": [1], "v": "AAAAAAAAAAA="},
    {"!": "scalar", "dtype": "<U1", "v": "/////w=="},
    {"!": "set", "v": [1, 1]},
    {"!": "set", "v": [[1]]},
    {"!": "dict", "v": [[1, 2], [1, 3]]},
    {"!": "dict", "v": [[1, 2, 3]]},
    {"!": "dict", "v": {"a": 1}},
    {"!": "deque", "v": [1, 2], "maxlen": 1},
    {"!": "deque", "v": [], "maxlen": 2**70},
    {"!": "size", "v": [1.0]},
    {"!": "int", "v": "0x1f"},
    {"!": "float", "v": "1.0"},
    {"!": "device", "v": "nowhere"},
    {"!": "os.system", "v": "true"},
    {"!": ["tuple"], "v": []},
    {"!": "tuple", "v": [], "more": 1},
    {"!x": 1},
    {1: 2},
    object(),
]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: "no JSON" if type(lie) is object else repr(lie)[:40])
def test_each_lie_is_found(lie: Any) -> None:
    """Shapes, types, lengths and tags that encode cannot have written."""
    with pytest.raises(CkptCorrupt):
        decode({"a": [lie]}, get=lambda stored: stored)


def test_great_depth_is_corrupt() -> None:
    """Before Python's own stack is used up."""
    for tag in (
        lambda inside: [inside],
        lambda inside: {"!": "tuple", "v": [inside]},
        lambda inside: {"a": inside},
    ):
        tree: Any = []
        for _ in range(50_000):
            tree = tag(tree)
        with pytest.raises(CkptCorrupt, match="deep"):
            decode(tree, get=lambda stored: stored)
        while isinstance(tree, (list, dict)) and tree:  # else freeing it recurses
            tree = tree.get("v", tree.get("a")) if isinstance(tree, dict) else tree.pop()
