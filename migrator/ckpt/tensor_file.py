"""A part: the tensors of one rank in a file that any reader of .safetensors can open.

`part_writer` writes it. It is read straight into tensor memory, and each block is verified there. The price: when
a block is bad, some of the tensors already hold what was read.
"""

from __future__ import annotations

import json
import math
import queue
import threading
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from migrator.ckpt.codec import DTYPES, as_bytes, dtype_name
from migrator.ckpt.digests import BLOCK, block_count, block_digest, digest_of_blocks
from migrator.ckpt.manifest import PartRecord
from migrator.ckpt.names import file_in
from migrator.errors import CkptCorrupt, CkptMismatch, RegistrationError, StorageForeignError
from migrator.storage.base import Reader, Storage

ALIGNMENT = 4096
"""Bytes of a page: the first tensor of a part begins at a multiple of it."""
_HEADER_MAX = 100_000_000
"""Bytes of a header at most: the safetensors library reads no larger one."""

_SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Element types that all readers of .safetensors know. Others are stored as bytes, with their names in the metadata."""

_TYPES = {code: DTYPES[name] for name, code in _SAFETENSORS.items() if name in DTYPES}


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a part, counted from the file's first byte."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Layout:
    """The order of a part's tensors, and the header that describes it."""

    header: bytes
    places: tuple[Place, ...]
    size: int

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor]) -> Layout:
        """Tensors with large elements first, so that each is aligned; otherwise in the order given."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt", "migrator": "1"}}
        odd: dict[str, str] = {}
        spans: list[tuple[str, torch.Tensor, int, int]] = []
        offset = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
            kind = _checked(name, tensor)
            end = offset + tensor.numel() * tensor.dtype.itemsize
            shape = list(tensor.shape)
            if kind not in _SAFETENSORS:
                odd[name], shape = kind, [*shape, tensor.dtype.itemsize]
            entries[name] = {
                "dtype": _SAFETENSORS.get(kind, "U8"),
                "shape": shape,
                "data_offsets": [offset, end],
            }
            spans.append((name, tensor, offset, end))
            offset = end
        if odd:
            entries["__metadata__"]["dtypes"] = json.dumps(odd)
        header = _framed(json.dumps(entries, separators=(",", ":")).encode("ascii"))
        places = tuple(
            Place(name, tensor.dtype, tuple(tensor.shape), len(header) + start, len(header) + end)
            for name, tensor, start, end in spans
        )
        return Layout(header, places, len(header) + offset)

    @staticmethod
    def parse(header: bytes, size: int) -> Layout:
        """The layout of a file of `size` bytes with this header, which begins with its own length."""
        try:
            entries = json.loads(header[8:])
            metadata = entries.pop("__metadata__")
            odd = json.loads(metadata.get("dtypes", "{}"))
            places = tuple(_place(name, entry, odd.get(name), len(header)) for name, entry in entries.items())
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CkptCorrupt(f"its header is not one of a part: {error!r:.200}") from error
        at = len(header)
        for place in places:
            if place.start != at:
                raise CkptCorrupt(f"its header puts {place.name} at byte {place.start}; expected {at}")
            at = place.end
        if at != size:
            raise CkptCorrupt(f"its header describes {at} bytes; the file has {size}")
        return Layout(header, places, size)


def digest_of(tensor: torch.Tensor) -> bytes:
    """The digest of a tensor's bytes, as `PartRecord.tensor_digests` holds it."""
    return xxhash.xxh3_64(memory(on_cpu(tensor))).digest()


def read_part(
    storage: Storage,
    ckpt: str,
    record: PartRecord,
    homes: Mapping[str, torch.Tensor] | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, torch.Tensor]:
    """All tensors of a part, every byte verified: in their homes where these fit, else in new memory.

    A home is the tensor that is to hold the values. It fits if it is contiguous, on the CPU, and has the dtype and
    shape of the stored tensor.
    """
    name = file_in(ckpt, record.name)
    size = storage.size(name)
    if size is None:
        raise CkptCorrupt(f"{name} is missing; it was there when the ckpt was committed")
    try:
        _check_record(record, size)
        with storage.open(name) as file:
            header, read = _own_header(file, record) or _proven_header(file, record)
            layout = Layout.parse(header, record.bytes)
            tensors = {place.name: _home(place, homes or {}) for place in layout.places}
            _fill(file, record, layout, tensors, read=read, progress=progress)
    except (CkptCorrupt, StorageForeignError) as error:
        raise CkptCorrupt(f"{name}: {error}") from error
    return tensors


def _fill(
    file: Reader,
    record: PartRecord,
    layout: Layout,
    tensors: Mapping[str, torch.Tensor],
    *,
    read: dict[int, memoryview],
    progress: Callable[[int, int], None] | None,
) -> None:
    """Read and verify all blocks, with several threads.

    Those that were `read` are taken from there, and verified again where they belong.
    """
    spans = [(0, len(layout.header), memoryview(bytearray(len(layout.header))))]
    for place in layout.places:
        if place.end > place.start:
            spans.append((place.start, place.end, memory(tensors[place.name])))
    starts = [start for start, _, _ in spans]

    def pieces(begin: int, end: int) -> Iterator[memoryview]:
        for start, stop, view in spans[bisect_right(starts, begin) - 1 :]:
            if start >= end:
                return
            yield view[max(begin, start) - start : min(end, stop) - start]

    def block(index: int) -> int:
        begin, end = index * BLOCK, min(record.bytes, (index + 1) * BLOCK)
        buffers = list(pieces(begin, end))
        if (known := read.pop(index, None)) is None:
            is_right = _read_block(file, record, index, buffers)
        else:
            _scatter(known, buffers)
            is_right = block_digest(buffers) == record.blocks[index]
        if not is_right:
            inside = [place.name for place in layout.places if place.start < end and place.end > begin]
            raise _wrong_block(record, index, inside if begin >= len(layout.header) else ["the header", *inside])
        return end - begin

    done = 0
    # Closed here: no thread may read when the file is closed.
    with closing(_in_threads(block, len(record.blocks), file.threads)) as sizes:
        for size in sizes:
            done += size
            if progress is not None:
                progress(done, record.bytes)


def _in_threads(call: Callable[[int], int], count: int, threads: int) -> Generator[int, None, None]:
    """The results of `call` for all numbers below `count`, as they come. Fewer threads are enough, or none."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    found: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()
    for number in range(count):
        waiting.put(number)

    def run() -> None:
        with suppress(queue.Empty):
            while True:
                number = waiting.get_nowait()
                try:
                    found.put((call(number), None))
                except BaseException as error:  # raised by the thread that waits
                    found.put((0, error))

    started: list[threading.Thread] = []
    with suppress(RuntimeError):  # there are as many threads as are allowed
        for _ in range(min(threads, count)):
            thread = threading.Thread(target=run, name="migrator-read", daemon=True)
            thread.start()
            started.append(thread)
    if not started:
        yield from map(call, range(count))
        return
    try:
        for _ in range(count):
            result, error = found.get()
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # else its frames would keep what they hold until the garbage is collected
            yield result
    finally:
        with suppress(queue.Empty):
            while True:
                waiting.get_nowait()
        for thread in started:
            thread.join()


def _scatter(data: memoryview, buffers: list[memoryview]) -> None:
    at = 0
    for buffer in buffers:
        buffer[:] = data[at : at + len(buffer)]
        at += len(buffer)


def _own_header(file: Reader, record: PartRecord) -> tuple[bytes, dict[int, memoryview]] | None:
    """The header, proven by its own digest; None if the record has none, or something is wrong."""
    size, digest = record.header or (0, "")
    if not 8 < size <= min(record.bytes, _HEADER_MAX):
        return None
    buffer = memoryview(bytearray(size))
    file.read([buffer], 0)
    return (bytes(buffer), {}) if block_digest([buffer]) == digest else None


def _proven_header(file: Reader, record: PartRecord) -> tuple[bytes, dict[int, memoryview]]:
    """The header, and the verified blocks that it came from."""
    header, size, read = bytearray(), 8, {}
    for index in range(len(record.blocks)):
        begin, end = index * BLOCK, min(record.bytes, (index + 1) * BLOCK)
        buffer = memoryview(bytearray(end - begin))
        if not _read_block(file, record, index, [buffer]):
            raise _wrong_block(record, index, ["the header and the tensors behind it"])
        read[index] = buffer
        if index == 0:
            size = 8 + int.from_bytes(buffer[:8], "little")
            if not 8 < size <= min(record.bytes, _HEADER_MAX):
                raise CkptCorrupt(f"its header claims {size} bytes; the file has {record.bytes}")
        header += buffer[: size - len(header)]
        if len(header) == size:
            break
    return bytes(header), read


def _read_block(file: Reader, record: PartRecord, index: int, buffers: list[memoryview]) -> bool:
    """Read a block; once more if it is not what was committed: what the way from the storage spoilt is right then."""
    size = sum(map(len, buffers))
    for _ in range(2):
        digest = xxhash.xxh3_128()
        for begin in range(0, size, file.piece):
            piece = list(_span(buffers, begin, begin + file.piece))
            file.read(piece, index * BLOCK + begin)
            for buffer in piece:  # still in the processor's cache
                digest.update(buffer)
        if digest.hexdigest() == record.blocks[index]:
            return True
    return False


def _span(buffers: list[memoryview], begin: int, end: int) -> Iterator[memoryview]:
    """The bytes from `begin` to `end` of all buffers together."""
    for buffer in buffers:
        if begin < len(buffer) and end > 0:
            yield buffer[max(0, begin) : end]
        begin, end = begin - len(buffer), end - len(buffer)


def _wrong_block(record: PartRecord, index: int, inside: list[str]) -> CkptCorrupt:
    more = f" and {len(inside) - 5} more" if len(inside) > 5 else ""
    return CkptCorrupt(
        f"block {index + 1} of {len(record.blocks)} does not hold the bytes that were committed "
        f"(it holds {', '.join(inside[:5])}{more})"
    )


def _check_record(record: PartRecord, size: int) -> None:
    if size != record.bytes:
        raise CkptCorrupt(f"it has {size} bytes; {record.bytes} were committed")
    if len(record.blocks) != block_count(size) or digest_of_blocks(record.blocks) != record.digest:
        raise CkptCorrupt("the manifest's digests of its blocks do not add up to that of the part")


def _home(place: Place, homes: Mapping[str, torch.Tensor]) -> torch.Tensor:
    home = homes.get(place.name)
    if home is not None and home.dtype == place.dtype and tuple(home.shape) == place.shape and is_plain(home):
        return home
    # As bytes first: torch warns when it makes a tensor of some dtypes directly.
    try:
        flat = torch.empty(place.end - place.start, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise CkptMismatch(
            f"{place.name} takes {place.end - place.start} bytes, more than there are: {error}"
        ) from error
    return flat.view(place.dtype).reshape(place.shape)


def _place(name: str, entry: dict[str, Any], odd: str | None, base: int) -> Place:
    shape, (start, end) = entry["shape"], entry["data_offsets"]
    dtype = _TYPES[entry["dtype"]]
    if odd is not None:
        dtype = DTYPES[odd]
        if entry["dtype"] != "U8" or not shape or shape.pop() != dtype.itemsize:
            raise ValueError(f"{name} is {odd} but not stored as bytes")
    if not all(type(n) is int and n >= 0 for n in [*shape, start, end]):
        raise ValueError(f"{name} has the shape {shape} at {start}-{end}")
    # Torch refuses a product of lengths above 2^63, even if one of them is 0.
    if len(shape) > 64 or math.prod(n or 1 for n in shape) * dtype.itemsize >= 1 << 63:
        raise ValueError(f"{name} has the shape {shape}")
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} of shape {shape} has {end - start} bytes")
    return Place(name, dtype, tuple(shape), base + start, base + end)


def _framed(header: bytes) -> bytes:
    """The header with its length in front, and blanks behind so that the data starts at a page."""
    size = -(-(8 + len(header)) // ALIGNMENT) * ALIGNMENT
    if size > _HEADER_MAX:
        raise RegistrationError(f"the names of the tensors take {size} bytes; at most {_HEADER_MAX} fit a part")
    return (size - 8).to_bytes(8, "little") + header.ljust(size - 8)


def _checked(name: str, tensor: torch.Tensor) -> str:
    kind = dtype_name(tensor.dtype)
    if kind is None:
        raise RegistrationError(f"{name} has elements of {tensor.dtype}, which a part cannot hold")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RegistrationError(f"{name!r} cannot be the name of a tensor: it is no valid text") from error
    if name == "__metadata__":
        raise RegistrationError("no tensor can be named __metadata__: the file format needs that name")
    return kind


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes lie in this process's memory, in order, as they are."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    if is_plain(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, writable, not copied, kept alive by the view."""
    return as_bytes(tensor).numpy().data
