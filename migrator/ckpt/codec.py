"""The typed tree: state that is not a large tensor, as JSON that comes back with the same types.

A state dict holds more than JSON can express: tuples, integer keys, nan, numpy
scalars, small tensors. Pickle could hold all of it, and runs any code that a file
names. So each type that is allowed has a tag of its own, everything else is refused
with its path when it is registered, long before a save, and decoding is a closed list
of constructors: no file can name a class.

    {"lr": 0.1}                      a dict whose keys are all str without a leading "!"
    {"!": "tuple", "v": [1, 2]}      everything that is not plain JSON has the key "!"

The price: subclasses of dict and list come back as plain dict and list, and an
object that was held in two places is two equal objects afterwards.
"""

from __future__ import annotations

import base64
import binascii
import enum
import functools
import json
import math
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from migrator.ckpt.names import COUNT_MAX
from migrator.errors import CkptCorrupt, RegistrationError

MAX_DEPTH = 100
"""Containers that may be nested in each other."""
LARGE_ARRAY = 16 * 1024
"""A numpy array of more bytes than this is stored in a part, as tensors are; a smaller one in the tree."""
COLLISIONS_MAX = 256
"""Keys of a dict that may have the same hash. More of them occur only if somebody chose them to make a dict slow."""

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
}
"""The element types that can be stored, by the name under which a ckpt knows them."""

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NUMPY_KINDS = frozenset("biufcSUmM")
# Closed, so that np.dtype() never sees a string that it would read as a structure or an object type.
_NUMPY_DTYPE = re.compile(r"[<>|=][biufcSUmM][0-9]{1,9}(\[[0-9A-Za-z]{1,20}\])?", re.ASCII)
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_ADVICE = (
    "Keep only numbers, strings, bytes, lists, tuples, dicts, sets, deques, numpy arrays and tensors there, "
    "or give the object a state_dict() and a load_state_dict() that do."
)

# Array types that torch has too, with the same memory. All others are stored as bytes.
_ARRAY_DTYPES: dict[str, torch.dtype] = {
    **{f"<f{n}": getattr(torch, f"float{8 * n}") for n in (2, 4, 8)},
    **{f"<c{n}": getattr(torch, f"complex{8 * n}") for n in (8, 16)},
    **{
        f"<{sign}{n}": getattr(torch, f"{kind}{8 * n}")
        for sign, kind in (("i", "int"), ("u", "uint"))
        for n in (2, 4, 8)
    },
    "|i1": torch.int8,
    "|u1": torch.uint8,
    "|b1": torch.bool,
}

Put = Callable[[torch.Tensor, str], "str | None"]
Refused = Callable[[str, tuple[Any, ...], RegistrationError], Any]
Get = Callable[["Stored | StoredArray"], Any]


@dataclass(frozen=True)
class Stored:
    """A tensor whose bytes lie in a part."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    """Its device when it was saved: "cpu" or "other"."""
    strides: tuple[int, ...] | None = None
    """Its strides in memory, if it was not row by row. A part always holds it row by row."""


@dataclass(frozen=True)
class StoredArray:
    """A numpy array whose bytes lie in a part."""

    part: Stored
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    by_columns: bool

    def array(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        """The array of this tensor of the part, in the same memory if it is row by row."""
        array = _allocated(lambda: tensor.reshape(-1).numpy().view(self.dtype).reshape(self.shape))
        _check_text(array)
        return np.asfortranarray(array) if self.by_columns else array

    def home(self, live: Any) -> torch.Tensor | None:
        """The memory of an array of the script as a tensor like that in the part; None if the array does not fit."""
        is_same = type(live) is np.ndarray and live.dtype == self.dtype and live.shape == self.shape
        if not is_same or not live.flags.c_contiguous or not live.flags.writeable:
            return None
        return _as_tensor(live)


def dtype_name(dtype: torch.dtype) -> str | None:
    """The name by which a ckpt knows an element type; None if it cannot be stored."""
    return _DTYPE_NAMES.get(dtype)


OMITTED: Any = object()
"""Stands for an entry of a dict that is left out."""


def encode(value: Any, *, put: Put, path: str, on_refused: Refused | None = None) -> Any:
    """The tree of `value`, ready for `json.dumps(..., allow_nan=False)`.

    `put` decides for each tensor: it returns a name under which the caller stores its bytes in a part, or None to
    keep them in the tree. No two tensors have the same path.

    `on_refused` returns another tree, or `OMITTED`, for an entry of a dict that cannot be stored. It gets the path of
    the entry and its keys from the outermost dict on. It is not called for entries inside of a list, where the same
    position may hold another entry later. Without it, or for the value as a whole, `RegistrationError` is raised.
    """
    encoder = _Encoder(put, _text, on_refused)
    try:
        return encoder.value(value, path)
    except RegistrationError as error:
        node = OMITTED if on_refused is None else on_refused(path, (), error)
        if node is OMITTED:
            raise
        return node


def scan(value: Any, path: str) -> int:
    """Raise `RegistrationError` for the first thing in `value` that `encode` would refuse.

    Returns a lower bound for the bytes of its tree.
    """
    texts = 0

    def text(data: bytes) -> str:
        nonlocal texts
        texts += 4 * len(data) // 3
        return ""

    encoder = _Encoder(lambda tensor, path: "", text)
    node = encoder.value(value, path)
    if encoder.size < _WORTH_COUNTING:
        return texts + encoder.size
    return texts + len(json.dumps(node))


_WORTH_COUNTING = 4 << 20
"""With fewer values and characters than this a tree fits a manifest, however long each value is as text."""


def entry(node: Any, key: Any) -> Any:
    """The tree under this key of the tree of a dict, or `OMITTED`."""
    if not isinstance(node, dict):
        return OMITTED
    if "!" not in node:
        return node.get(key, OMITTED) if type(key) is str else OMITTED
    if node["!"] not in ("dict", "odict") or not _is_key(key):
        return OMITTED
    name = _Encoder(lambda tensor, path: None, _text).value(key, "")
    return next((item for one, item in node["v"] if one == name and type(one) is type(name)), OMITTED)


def strides_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor to be kept; None: it is row by row, or has gaps or overlaps, which are not kept."""
    strides = tuple(tensor.stride())
    if strides == _by_rows(tensor.shape) or not _is_dense(tuple(tensor.shape), strides):
        return None
    return strides


def laid_out(tensor: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    """The same values in memory with these strides. None: row by row."""
    strides = _by_rows(tensor.shape) if strides is None else strides
    if tuple(tensor.stride()) == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


@functools.lru_cache(1024)
def _by_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements fill the memory without gaps and overlaps: dimensions in another order."""
    step = 1
    for stride, length in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1):
        if stride != step or length == 0:
            return False
        step *= length
    return True


def decode(tree: Any, *, get: Get) -> Any:
    """The value of a tree; `get` returns the tensors whose bytes are in a part.

    A tree that `encode` cannot have made raises `CkptCorrupt` and nothing else, and never allocates more memory than
    the tree itself takes.
    """
    return _Decoder(get).value(tree, 0)


class _Encoder:
    def __init__(self, put: Put, text: Callable[[bytes], str], on_refused: Refused | None = None) -> None:
        self._put = put
        self._text = text
        self._on_refused = on_refused
        self._open: set[int] = set()
        self._keys: list[Any] = []
        """The keys of the dicts that are being encoded, outermost first."""
        self._lists = 0
        """How many lists, tuples and deques are being encoded, one in another."""
        self.size = 0
        """A lower bound for the bytes of the tree: one for each value, and the characters of texts."""

    def value(self, value: Any, path: str) -> Any:
        self.size += 1
        kind = type(value)
        # First what a state consists of, almost all of it.
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return self._tensor(value, path)
        if value is None or kind is bool:
            return value
        if isinstance(value, enum.Enum):
            raise _refused(path, value, "Store its .value instead.")
        # Before int, float, str and bytes: np.float64 is a float, np.str_ is a str.
        if isinstance(value, np.generic):
            name = _numpy_dtype_name(array := np.asarray(value), path)
            if array.dtype.kind in "SU" and array[()] != value:
                raise _refused(path, value, "It ends with a NUL, which numpy drops. Store it as plain str or bytes.")
            return {"!": "scalar", "dtype": name, "v": self._text(array.tobytes())}
        if isinstance(value, (int, float, str, bytes)):
            return self._plain(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray):
            return self._array(value, path)
        if isinstance(value, torch.dtype):
            if value not in _DTYPE_NAMES:
                raise _refused(path, value, _ADVICE)
            return {"!": "dtype", "v": _DTYPE_NAMES[value]}
        if isinstance(value, torch.device):
            return {"!": "device", "v": str(value)}
        if isinstance(value, torch.Size):
            return {"!": "size", "v": [int(n) for n in value]}
        return self._container(value, path)

    def _plain(self, value: int | float | str | bytes) -> Any:
        if isinstance(value, str):
            self.size += len(value)
            return str.__str__(value)
        if isinstance(value, bytes):
            return {"!": "bytes", "v": self._text(value)}
        if isinstance(value, float):
            if math.isfinite(value):
                return float(value)
            return {"!": "float", "v": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
        # Python refuses decimal integers of more than 4300 digits; hexadecimal has no limit.
        value = int(value)
        return value if -_LONG < value < _LONG else {"!": "int", "v": f"{value:x}"}

    def _container(self, value: Any, path: str) -> Any:
        with self._entered(value, path):
            if isinstance(value, list):
                return self._each(list(value), path)
            if type(value) is tuple:
                return {"!": "tuple", "v": self._each(value, path)}
            if isinstance(value, dict):
                return self._dict(value, path)
            if isinstance(value, (set, frozenset)):
                tag, items = "set" if isinstance(value, set) else "frozenset", list(value)
                _check_hashes(items, path)
                return {"!": tag, "v": [self._key(item, path) for item in items]}
            if isinstance(value, deque):
                return {"!": "deque", "v": self._each(list(value), path), "maxlen": value.maxlen}
        advice = "Store it as a plain tuple or dict." if isinstance(value, tuple) else _ADVICE
        raise _refused(path, value, advice)

    def _each(self, values: Sequence[Any], path: str) -> list[Any]:
        if values and all(type(item) is int for item in values) and min(values) > -_LONG and max(values) < _LONG:
            # Shapes, and the 625 of Python's random state.
            self.size += len(values)
            return list(values)
        self._lists += 1
        try:
            return [self.value(item, f"{path}[{i}]") for i, item in enumerate(values)]
        finally:
            self._lists -= 1

    def _dict(self, value: dict[Any, Any], path: str) -> Any:
        # A copy first: the training loop may add a key while another thread saves.
        items = list(value.items())
        if type(value) is not OrderedDict and all(type(k) is str and not k.startswith("!") for k, _ in items):
            found = ((key, self._entry(key, item, path)) for key, item in items)
            return {key: node for key, node in found if node is not OMITTED}
        _check_hashes([key for key, _ in items], path)
        pairs = []
        for key, item in items:
            try:
                name = self._key(key, path)
            except RegistrationError as error:
                if self._on_refused is None or self._lists:
                    raise
                self._on_refused(_below(path, key), (*self._keys, key), error)
                continue
            node = self._entry(key, item, path)
            if node is not OMITTED:
                pairs.append([name, node])
        return {"!": "odict" if isinstance(value, OrderedDict) else "dict", "v": pairs}

    def _entry(self, key: Any, item: Any, path: str) -> Any:
        self._keys.append(key)
        try:
            below = _below(path, key)
            try:
                return self.value(item, below)
            except RegistrationError as error:
                if self._on_refused is None or self._lists:
                    raise
                return self._on_refused(below, tuple(self._keys), error)
        finally:
            self._keys.pop()

    def _key(self, key: Any, path: str) -> Any:
        if not _is_key(key):
            advice = "Use numbers, str, bytes or tuples of such as keys and set elements."
            raise _refused(_below(path, key), key, advice)
        return self.value(key, _below(path, key))

    def _tensor(self, tensor: torch.Tensor, path: str) -> Any:
        _check_tensor(tensor, path)
        head = {
            "!": "tensor",
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "device": "cpu" if tensor.device.type == "cpu" else "other",
        }
        strides = strides_of(tensor)
        if strides is not None:
            head["strides"] = list(strides)
        name = self._put(tensor, path)
        return {**head, "v": self._text(_tensor_bytes(tensor))} if name is None else {**head, "stored": name}

    def _array(self, array: np.ndarray[Any, Any], path: str) -> Any:
        if type(array) not in (np.ndarray, np.memmap):
            raise _refused(path, array, "Store a plain array: numpy.asarray().")
        name = _numpy_dtype_name(array, path)
        head = {"!": "array", "dtype": name, "shape": list(array.shape)}
        if array.flags.f_contiguous and not array.flags.c_contiguous:
            head["order"] = "F"
        stored = self._put(_as_tensor(array), path) if array.nbytes > LARGE_ARRAY else None
        return {**head, "v": self._text(array.tobytes())} if stored is None else {**head, "stored": stored}

    @contextmanager
    def _entered(self, value: Any, path: str) -> Iterator[None]:
        if id(value) in self._open:
            raise RegistrationError(f"{path} contains itself; a ckpt cannot hold a cycle. Break it.")
        if len(self._open) >= MAX_DEPTH:
            raise RegistrationError(f"{path} is nested more than {MAX_DEPTH} deep. Store it flatter.")
        self._open.add(id(value))
        try:
            yield
        finally:
            self._open.discard(id(value))


def _refused(path: str, value: Any, advice: str) -> RegistrationError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return RegistrationError(f"{path} is of type {kind}, which a ckpt cannot hold. {advice}")


def _below(path: str, key: Any) -> str:
    if type(key) is str and key.isidentifier():
        return f"{path}.{key}"
    return f"{path}[{key!r}]"


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(_is_key(item) for item in key)
    return key is None or isinstance(key, (bool, int, float, str, bytes, np.generic))


def _collide(keys: list[Any]) -> bool:
    """Whether a dict or set of these keys would be as slow as a list. The writer of a file can choose such keys."""
    return len(keys) > COLLISIONS_MAX and max(Counter(map(hash, keys)).values()) > COLLISIONS_MAX


def _check_hashes(keys: list[Any], path: str) -> None:
    if _collide(keys):
        raise RegistrationError(f"{path} has more than {COLLISIONS_MAX} keys with the same hash. Use others.")


def _numpy_dtype_name(value: np.ndarray[Any, Any], path: str) -> str:
    if value.dtype.kind not in _NUMPY_KINDS:
        raise _refused(path, value, f"Its elements are {value.dtype}; use numbers, str, bytes or times.")
    return str(value.dtype.str)


def _check_tensor(tensor: torch.Tensor, path: str) -> None:
    kind = type(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        found, advice = "has no values yet (lazy)", "Run one batch through the module before registering it."
    elif kind.__name__ == "DTensor" or kind.__torch_dispatch__ not in _PLAIN_DISPATCH:
        found, advice = f"is a {kind.__qualname__}", "Sharded and wrapped tensors are not supported yet."
    elif tensor.is_quantized:
        found, advice = "is quantized", "Store its int_repr() and its scale, or register it dequantized."
    elif tensor.layout != torch.strided:
        found, advice = f"is sparse ({tensor.layout})", "Store to_dense(), or its indices and values."
    elif tensor.is_meta:
        found, advice = "is on the meta device", "Give it values (to_empty, initialise) before registering."
    elif tensor.dtype not in _DTYPE_NAMES:
        found, advice = f"has the element type {tensor.dtype}", "Store a view of it as torch.uint8."
    else:
        return
    raise RegistrationError(f"{path}: this tensor {found}, which a ckpt cannot hold. {advice}")


_LONG = 1 << 64
"""The limit of the integers that are written in decimal."""
_PLAIN_DISPATCH = (torch.Tensor.__torch_dispatch__, torch.nn.Parameter.__torch_dispatch__)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    return as_bytes(tensor).numpy().tobytes()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, in the same memory."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() <= 1:
        # It counts as contiguous whatever its stride is (a column's slice of one row); the view wants 1.
        flat = flat.as_strided((flat.numel(),), (1,))
    return flat.view(torch.uint8)


class _Decoder:
    def __init__(self, get: Get) -> None:
        self._get = get
        self._tags: dict[str, tuple[frozenset[str], Callable[[dict[str, Any], int], Any]]] = {
            "float": (frozenset({"v"}), lambda node, depth: _one_of(_FLOATS, node["v"], "float")),
            "int": (frozenset({"v"}), lambda node, depth: _hex(node["v"])),
            "bytes": (frozenset({"v"}), lambda node, depth: _data(node["v"])),
            "dtype": (frozenset({"v"}), lambda node, depth: _one_of(DTYPES, node["v"], "dtype")),
            "device": (frozenset({"v"}), lambda node, depth: _device(node["v"])),
            "size": (frozenset({"v"}), lambda node, depth: torch.Size(_shape(node["v"]))),
            "tuple": (frozenset({"v"}), lambda node, depth: tuple(self._each(node["v"], depth))),
            "dict": (frozenset({"v"}), lambda node, depth: self._pairs({}, node["v"], depth)),
            "odict": (frozenset({"v"}), lambda node, depth: self._pairs(OrderedDict(), node["v"], depth)),
            "set": (frozenset({"v"}), lambda node, depth: set(self._elements(node["v"], depth))),
            "frozenset": (frozenset({"v"}), lambda node, depth: frozenset(self._elements(node["v"], depth))),
            "deque": (frozenset({"v", "maxlen"}), self._deque),
            "scalar": (frozenset({"dtype", "v"}), lambda node, depth: _array(node, [])[()]),
        }

    def value(self, node: Any, depth: int) -> Any:
        if node is None or isinstance(node, (bool, int, float, str)):
            return node
        if depth > MAX_DEPTH:
            raise CkptCorrupt(f"a tree is nested more than {MAX_DEPTH} deep; no ckpt of ours is")
        if isinstance(node, list):
            return self._each(node, depth)
        if not isinstance(node, dict):
            raise CkptCorrupt(f"a tree holds a {type(node).__name__}; expected what JSON can hold")
        if "!" in node:
            return self._tagged(node, depth)
        for key in node:
            if not isinstance(key, str) or key.startswith("!"):
                raise CkptCorrupt(f"a tree holds the key {key!r:.80}; expected text without a leading '!'")
        return {key: self.value(item, depth + 1) for key, item in node.items()}

    def _tagged(self, node: dict[str, Any], depth: int) -> Any:
        tag = node["!"]
        if tag == "tensor":
            return self._tensor(node)
        if tag == "array":
            return self._array(node)
        fields, make = _one_of(self._tags, tag, "tag")
        _expect_fields(node, fields)
        return make(node, depth)

    def _each(self, nodes: Any, depth: int) -> list[Any]:
        return [self.value(item, depth + 1) for item in _list(nodes)]

    def _elements(self, nodes: Any, depth: int) -> list[Any]:
        elements = self._each(nodes, depth)
        if not all(map(_is_key, elements)) or _collide(elements) or len(set(elements)) != len(elements):
            raise CkptCorrupt("a tree holds a set with elements that are equal or cannot be in a set")
        return elements

    def _pairs(self, into: dict[Any, Any], nodes: Any, depth: int) -> dict[Any, Any]:
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in _list(nodes)):
            raise CkptCorrupt("a tree holds a dict whose items are not pairs")
        keys = [self.value(key, depth + 1) for key, _ in nodes]
        if not all(map(_is_key, keys)) or _collide(keys):
            raise CkptCorrupt("a tree holds a dict with keys that no dict of ours has")
        for key, (node, item) in zip(keys, nodes, strict=True):
            if key in into:
                # Not the key itself: Python does not write out every integer.
                raise CkptCorrupt(f"a tree holds a dict with a double key: {node!r:.80}")
            into[key] = self.value(item, depth + 1)
        return into

    def _deque(self, node: dict[str, Any], depth: int) -> deque[Any]:
        items, maxlen = self._each(node["v"], depth), node["maxlen"]
        if maxlen is not None and (type(maxlen) is not int or not len(items) <= maxlen < COUNT_MAX):
            raise CkptCorrupt(f"a tree holds a deque of {len(items)} with maxlen {maxlen!r:.80}")
        return deque(items, maxlen)

    def _tensor(self, node: dict[str, Any]) -> Any:
        inline = "v" in node
        optional = {"strides"} & node.keys()
        _expect_fields(node, {"dtype", "shape", "device", "v" if inline else "stored", *optional})
        dtype, shape = _one_of(DTYPES, node["dtype"], "dtype"), _shape(node["shape"])
        if node["device"] not in ("cpu", "other"):
            raise CkptCorrupt(f"a tree holds a tensor on {node['device']!r:.80}; expected cpu or other")
        strides = _strides(node["strides"], shape) if optional else None
        if not inline:
            if not isinstance(node["stored"], str):
                raise CkptCorrupt("a tree holds a tensor whose name in the part is not text")
            return self._get(Stored(node["stored"], dtype, shape, node["device"], strides))
        data = _sized(_data(node["v"]), dtype.itemsize, shape, "tensor")
        flat = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        return _allocated(lambda: laid_out(flat.view(dtype).reshape(shape), strides))

    def _array(self, node: dict[str, Any]) -> Any:
        inline, optional = "v" in node, {"order"} & node.keys()
        _expect_fields(node, {"dtype", "shape", "v" if inline else "stored", *optional})
        if optional and node["order"] != "F":
            raise CkptCorrupt(f"a tree holds an array in the order {node['order']!r:.80}")
        if inline:
            array = _array(node, node["shape"])
            return np.asfortranarray(array) if optional else array
        dtype, shape, name = _numpy_dtype(node["dtype"]), _shape(node["shape"]), node["stored"]
        if not isinstance(name, str):
            raise CkptCorrupt("a tree holds an array whose name in the part is not text")
        stored = Stored(name, _ARRAY_DTYPES.get(dtype.str, torch.uint8), shape, "cpu")
        if dtype.str not in _ARRAY_DTYPES:
            stored = Stored(name, torch.uint8, (math.prod(shape) * dtype.itemsize,), "cpu")
        return self._get(StoredArray(stored, dtype, shape, bool(optional)))


def _array(node: dict[str, Any], lengths: Any) -> Any:
    dtype, shape = _numpy_dtype(node["dtype"]), _shape(lengths)
    data = _sized(_data(node["v"]), dtype.itemsize, shape, "array")
    array = _allocated(lambda: np.ndarray(shape, dtype, buffer=data).copy())
    _check_text(array)
    return array


def _check_text(array: np.ndarray[Any, Any]) -> None:
    if array.dtype.kind == "U":
        # numpy accepts any four bytes as a character, and fails when it is read.
        _allocated(array.tolist)


def _numpy_dtype(name: Any) -> np.dtype[Any]:
    if not isinstance(name, str) or not _NUMPY_DTYPE.fullmatch(name):
        raise CkptCorrupt(f"a tree holds an array of {name!r:.80}, which is no element type of ours")
    return _allocated(lambda: np.dtype(name))  # type: ignore[no-any-return]


def _as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """The array, row by row, as a tensor; in the same memory if it is row by row and may be written."""
    plain = np.ascontiguousarray(array)
    if not plain.flags.writeable:  # torch warns about these
        plain = plain.copy()
    return torch.from_numpy(plain if plain.dtype.str in _ARRAY_DTYPES else plain.reshape(-1).view(np.uint8))


def _allocated(make: Callable[[], Any]) -> Any:
    """What `make` returns. Input that was checked and that numpy or torch still refuse (odd units) is corrupt."""
    try:
        return make()
    except (TypeError, ValueError, RuntimeError, OverflowError, MemoryError, SystemError, Warning) as error:
        raise CkptCorrupt(f"a tree holds an array or tensor that cannot be: {error}") from error


def _sized(data: bytes, itemsize: int, shape: tuple[int, ...], what: str) -> bytes:
    if len(data) != math.prod(shape) * itemsize:
        raise CkptCorrupt(
            f"a tree holds {len(data)} bytes for a {what} of shape {shape!r:.80} with {itemsize} bytes per element"
        )
    return data


def _expect_fields(node: dict[str, Any], fields: Iterable[str]) -> None:
    if node.keys() != {"!", *fields}:
        found, expected = ", ".join(sorted(node))[:200], ", ".join(sorted({"!", *fields}))
        raise CkptCorrupt(f"a tree holds a {node['!']!r:.80} with the fields {found}; expected {expected}")


def _one_of(table: dict[str, Any], name: Any, what: str) -> Any:
    if not isinstance(name, str) or name not in table:
        raise CkptCorrupt(f"a tree holds the {what} {name!r:.80}, which this version does not know")
    return table[name]


def _list(nodes: Any) -> list[Any]:
    if not isinstance(nodes, list):
        raise CkptCorrupt(f"a tree holds a {type(nodes).__name__} where a list is expected")
    return nodes


def _shape(node: Any) -> tuple[int, ...]:
    shape = _list(node)
    if len(shape) > 64 or not all(type(n) is int and 0 <= n < COUNT_MAX for n in shape):
        raise CkptCorrupt(f"a tree holds the shape {shape!r:.80}")
    # Above this strides overflow, even if one of the lengths is 0.
    if math.prod(n or 1 for n in shape) >= 1 << 58:
        raise CkptCorrupt(f"a tree holds the shape {shape!r:.80}, which nothing can have")
    return tuple(shape)


def _strides(node: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = _list(node)
    if len(strides) != len(shape) or not all(type(n) is int and 0 <= n < COUNT_MAX for n in strides):
        raise CkptCorrupt(f"a tree holds the strides {strides!r:.80} for the shape {shape!r:.80}")
    if not _is_dense(shape, tuple(strides)):
        raise CkptCorrupt(f"a tree holds the strides {strides!r:.80}, with which no tensor {shape!r:.80} is saved")
    return tuple(strides)


def _data(node: Any) -> bytes:
    try:
        return base64.b64decode(node.encode("ascii"), validate=True)
    except (AttributeError, UnicodeEncodeError, binascii.Error) as error:
        raise CkptCorrupt(f"a tree holds bytes that are not base64: {node!r:.80}") from error


def _hex(node: Any) -> int:
    if not isinstance(node, str) or not re.fullmatch("-?[0-9a-f]+", node):
        raise CkptCorrupt(f"a tree holds the large integer {node!r:.80}")
    return int(node, 16)


def _device(node: Any) -> torch.device:
    if not isinstance(node, str):
        raise CkptCorrupt(f"a tree holds the device {node!r:.80}")
    return _allocated(lambda: torch.device(node))  # type: ignore[no-any-return]
