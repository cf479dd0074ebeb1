"""A part is a .safetensors file whose every byte is proven while it is read."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from migrator.ckpt import codec, digests, piece_digests, tensor_file
from migrator.ckpt.codec import DTYPES
from migrator.ckpt.digests import block_digest, digest_of_blocks
from migrator.ckpt.manifest import PartRecord
from migrator.ckpt.part_writer import write_part
from migrator.ckpt.piece_digests import StandStill, TensorsChanged
from migrator.ckpt.tensor_file import Layout, digest_of, memory, read_part
from migrator.errors import CkptCorrupt, CkptMismatch, RegistrationError, SaveFailed, StorageError, StorageForeignError
from migrator.storage import posix_calls
from migrator.storage.memory import Bucket, MemoryStorage, MemoryUpload
from migrator.storage.posix import PosixReader, PosixStorage, PosixUpload
from migrator.storage.posix_calls import read_all, write_all

CKPT = "000001-000000000001"
PART = f"{CKPT}/part-00000-of-00001.safetensors"


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    return PosixStorage(tmp_path, "job")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    """All sizes a few thousand times smaller, so that small tensors take many blocks and groups, and a thread."""
    for module in (digests, tensor_file):
        monkeypatch.setattr(module, "BLOCK", 1000)
    monkeypatch.setattr(piece_digests, "GROUP", 700)
    monkeypatch.setattr(piece_digests, "SMALL", 0)
    return 1000


def path_of(storage: PosixStorage) -> Path:
    return storage.directory / PART


def one_of_each() -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls complex32 experimental
        every = {
            f"kind/{name}": torch.randint(0, 2, (2 * 3 * dtype.itemsize,), dtype=torch.uint8).view(dtype).reshape(2, 3)
            for name, dtype in DTYPES.items()
        }
    return {
        **every,
        "model/fc.weight": torch.randn(64, 33),
        "transposed": torch.randn(7, 5).t(),
        "every other": torch.arange(40)[::2],
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "empty": torch.empty(0, 3),
        "number": torch.tensor(1.5),
        "64 dimensions": torch.randn([1] * 63 + [2]),
        "größe": torch.ones(1),
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }


def assert_bits(one: torch.Tensor, other: torch.Tensor) -> None:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert digest_of(one) == digest_of(other)


# --- raw bytes


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_memory_is_the_tensor_itself(dtype: torch.dtype) -> None:
    """Nothing is copied, whatever the dtype; what is written there is in the tensor."""
    tensor = torch.zeros(6 * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(2, 3)
    view = memory(tensor)
    view[:] = bytes(range(len(view)))
    assert bytes(tensor.reshape(-1).view(torch.uint8).tolist()) == bytes(range(6 * dtype.itemsize))


def test_memory_of_nothing_and_of_one_number() -> None:
    """Tensors without elements and without dimensions have bytes too."""
    assert memory(torch.empty(0, 4)).nbytes == 0
    assert memory(torch.tensor(1, dtype=torch.int16, requires_grad=False)).tobytes() == b"\x01\x00"
    assert memory(torch.nn.Parameter(torch.ones(3))).nbytes == 12


def stingy(call: Callable[..., int], most: int) -> Callable[..., int]:
    """A kernel that moves at most so many bytes a call."""

    def moved(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        first = next(buffer for buffer in buffers if len(buffer))
        return call(fd, [first[:most]], offset, *flags)

    return moved


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.binary(max_size=20), max_size=12), st.integers(0, 9), st.integers(1, 30))
def test_calls_that_move_only_a_part_are_gone_on_with(
    new_directory: Callable[[], Path], pieces: list[bytes], offset: int, most: int
) -> None:
    """What one call leaves undone the next one does, in the right place."""
    path = new_directory() / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", stingy(os.pwritev, most))
        patch.setattr(os, "preadv", stingy(os.preadv, most))
        end = write_all(fd, [memoryview(piece) for piece in pieces], offset)
        back = [memoryview(bytearray(len(piece))) for piece in pieces]
        assert read_all(fd, back, offset) == end == offset + sum(map(len, pieces))
    os.close(fd)
    assert [bytes(piece) for piece in back] == pieces
    assert path.read_bytes()[offset:] == b"".join(pieces)


def test_more_buffers_than_one_call_takes(tmp_path: Path) -> None:
    """The kernel takes 1024 at once; a model with more tensors is no special case."""
    pieces = [i.to_bytes(2, "big") for i in range(5000)]
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    write_all(fd, [memoryview(piece) for piece in pieces], 0)
    back = [memoryview(bytearray(2)) for _ in pieces]
    read_all(fd, back, 0)
    os.close(fd)
    assert [bytes(piece) for piece in back] == pieces


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_kernel_that_cannot_pass_the_cache_by_writes_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Old kernels and other file systems refuse the flag; then the write goes without."""
    real = os.pwritev

    def refuse(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            raise OSError(code, os.strerror(code))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", refuse)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    write_all(fd, [memoryview(b"abc")], 0, past_cache=True)
    os.close(fd)
    assert (tmp_path / "file").read_bytes() == b"abc"


def test_a_failure_is_told_at_once_and_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a refused flag is answered with another call: after an I/O error a second one may look well, and is not."""
    calls = []

    def fail(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        calls.append(flags)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(OSError, match="Input/output"):
        write_all(-1, [memoryview(b"abc")], 0, past_cache=True)
    assert len(calls) == 1


@pytest.mark.parametrize("size", [1, 9, 10, 11, 20, 35])
def test_a_buffer_larger_than_one_call_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """A call moves so much at most, and that much it does move."""
    monkeypatch.setattr(posix_calls, "_CALL_MAX", 10)
    real, moved = os.pwritev, []

    def write(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        moved.append(sum(map(len, buffers)))
        return real(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "pwritev", write)
    data = bytes(range(size))
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    assert write_all(fd, [memoryview(data), memoryview(data)], 0) == 2 * size
    os.close(fd)
    assert (tmp_path / "file").read_bytes() == 2 * data
    assert max(moved) <= 10


def test_a_file_that_ends_early_is_corrupt(tmp_path: Path) -> None:
    """Not an endless loop, and not zeros."""
    storage = PosixStorage(tmp_path, "job")
    storage.put("file", b"abc", exclusive=True)
    with storage.open("file") as file, pytest.raises(StorageForeignError, match="byte 3"):
        file.read([memoryview(bytearray(4))], 0)


def test_a_part_that_becomes_shorter_while_it_is_read_is_corrupt(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size was right a moment before."""
    record = write_part(storage, PART, {"a": torch.zeros(10_000)})
    os.truncate(path_of(storage), 9_000)
    monkeypatch.setattr(PosixStorage, "size", lambda *_: record.bytes)
    with pytest.raises(CkptCorrupt, match="ends already at byte 9000"):
        read_part(storage, CKPT, record)


# --- writing and reading


def test_every_dtype_and_shape_comes_back_bit_for_bit(storage: PosixStorage, small_blocks: int) -> None:
    """Over many blocks and groups, into fresh memory."""
    tensors = one_of_each()
    record = write_part(storage, PART, tensors, of_tensors=True)
    assert len(record.blocks) > 10
    back = read_part(storage, CKPT, record)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_bits(back[name], tensor)
        assert record.tensor_digests[name] == digest_of(tensor)


def test_a_part_opens_with_the_safetensors_library(storage: PosixStorage) -> None:
    """A ckpt outlives this package: any reader of .safetensors gets at the weights."""
    tensors = one_of_each()
    write_part(storage, PART, tensors)
    opened = safetensors.torch.load_file(path_of(storage))
    assert opened.keys() == tensors.keys()
    for name, tensor in tensors.items():
        if opened[name].dtype == tensor.dtype:
            assert_bits(opened[name], tensor)
        else:
            # What the format has no name for is there as bytes.
            assert opened[name].shape == (*tensor.shape, tensor.dtype.itemsize)
            assert digest_of(opened[name]) == digest_of(tensor)


def test_every_tensor_is_aligned(storage: PosixStorage) -> None:
    """Data begins at a page, and each tensor at a multiple of its element's size."""
    layout = Layout.of(one_of_each())
    assert len(layout.header) % 4096 == 0
    assert all(place.start % place.dtype.itemsize == 0 for place in layout.places)


def test_a_part_without_tensors_is_a_part(storage: PosixStorage) -> None:
    """A job may have nothing but small state."""
    record = write_part(storage, PART, {})
    assert read_part(storage, CKPT, record) == {}
    assert safetensors.torch.load_file(path_of(storage)) == {}


def test_tensors_are_read_straight_into_homes_that_fit(storage: PosixStorage, small_blocks: int) -> None:
    """No memory is taken for what has its place; what does not fit gets fresh memory and the home stays."""
    tensors = {name: torch.randn(40, 30) for name in "abcd"} | {"e": torch.randn(3)}
    record = write_part(storage, PART, tensors)
    homes = {
        "a": torch.nn.Parameter(torch.zeros(40, 30)),
        "b": torch.zeros(30, 40).t(),
        "c": torch.zeros(40, 30, dtype=torch.float64),
        "d": torch.zeros(1200),
        "stranger": torch.zeros(1),
    }
    back = read_part(storage, CKPT, record, homes)
    assert back["a"] is homes["a"]
    assert all(back[name] is not homes.get(name) for name in "bcde")
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor)
    assert not any(homes[name].any() for name in ("b", "c", "d"))


def test_a_tensor_without_a_home_may_be_larger_than_the_memory(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that nothing registered takes, of a size that is true: it does not fit, and no other ckpt would."""
    record = write_part(storage, PART, {"a": torch.zeros(10)})

    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(CkptMismatch, match="a takes 40 bytes, more than there are: not enough memory"):
        read_part(storage, CKPT, record)


def test_progress_reaches_the_end(storage: PosixStorage, small_blocks: int) -> None:
    """A user who waits is told how far it is, in both directions."""
    written, read = [], []
    tensors = {"a": torch.randn(900), "b": torch.randn(30)}
    record = write_part(storage, PART, tensors, after_block=lambda done, total: written.append((done, total)))
    read_part(storage, CKPT, record, progress=lambda done, total: read.append((done, total)))
    for steps in (written, read):
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)
        assert steps[-1] == (record.bytes, record.bytes)
        assert len(steps) > 1


def test_calls_are_large(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets at least a group where there is that much, and never more than a block beyond it. The first one is
    smaller, so that the disk begins early."""
    monkeypatch.setattr(piece_digests, "GROUP", 6000)
    monkeypatch.setattr(piece_digests, "FIRST", 900)
    monkeypatch.setattr(digests, "BLOCK", 8000)
    sizes: list[int] = []
    real = PosixUpload.write

    def write(upload: PosixUpload, buffers: Any, *, hold: bool = False) -> None:
        sizes.append(sum(map(len, buffers)))
        real(upload, buffers, hold=hold)

    monkeypatch.setattr(PosixUpload, "write", write)
    tensors = {f"small{i}": torch.zeros(100) for i in range(40)}
    write_part(storage, PART, {**tensors, "huge": torch.zeros(30_000), "last": torch.zeros(5)})
    assert 900 <= sizes[0] < 1800
    assert all(size >= 6000 for size in sizes[1:-1])
    assert all(size <= 14_000 for size in sizes)
    assert sum(sizes) == path_of(storage).stat().st_size
    sizes.clear()
    write_part(storage, PART, {"huge": torch.zeros(30_000)})
    assert sizes[0] == 900


def test_what_is_not_written_yet_may_be_exchanged_for_a_copy(storage: PosixStorage, small_blocks: int) -> None:
    """A copy put aside takes over in the middle of a large tensor, and the live one may change from then on."""
    live = {"a": torch.zeros(400), "large": torch.zeros(3000), "z": torch.zeros(400)}
    source = dict(live)
    reading = threading.Lock()
    written: list[int] = []

    def after(done: int, total: int) -> None:
        written.append(done)
        if len(written) == 3:
            copies = {name: tensor.clone() for name, tensor in live.items()}
            with reading:
                source.update(copies)
            for tensor in live.values():
                tensor.fill_(1)  # the training loop goes on

    still = StandStill(frozenset(live), reading)
    record = write_part(
        storage, PART, {name: lambda name=name: source[name] for name in live}, after_block=after, still=still
    )
    assert len(written) > 3, "it took several calls"
    back = read_part(storage, CKPT, record)
    assert all(not tensor.any() for tensor in back.values())


CHANGES: dict[str, tuple[int, str]] = {
    "a": (2, "a"),
    "large": (0, "large"),
    "z": (0, "z"),
    "large at its end": (-1, "large"),
}


@pytest.mark.parametrize("small", [True, False], ids=["one thread", "two threads"])
@pytest.mark.parametrize("changes", CHANGES)
def test_a_change_while_it_is_written_shows(
    storage: PosixStorage, small_blocks: int, monkeypatch: pytest.MonkeyPatch, changes: str, small: bool
) -> None:
    """Before its piece is written or behind it, in a single element."""
    monkeypatch.setattr(piece_digests, "SMALL", 1 << 30 if small else 0)
    live = {"a": torch.zeros(400), "large": torch.zeros(3000), "z": torch.zeros(400)}
    index, name = CHANGES[changes]

    def change() -> None:
        live[name][index] = 1.0

    with pytest.raises(TensorsChanged, match=name):
        write_part(storage, PART, live, still=StandStill(frozenset(live), at_the_moment=change))
    assert storage.list(CKPT) == []


def test_only_what_must_stand_still_is_computed_again(storage: PosixStorage, small_blocks: int) -> None:
    """The others lie between, and the digests go on behind them."""
    live = {"a": torch.zeros(400), "moves": torch.zeros(3000), "z": torch.zeros(400)}
    done: list[str] = []

    def after(at: int, total: int) -> None:
        live["moves"].add_(1)

    still = StandStill(frozenset({"a", "z"}), tensor_proven=done.append, all_proven=lambda: done.append("all"))
    write_part(storage, PART, {"a": live["a"], "moves": live["moves"], "z": live["z"]}, after_block=after, still=still)
    assert done == ["a", "z", "all"]

    def change() -> None:
        live["z"].add_(1)

    with pytest.raises(TensorsChanged, match="z"):
        write_part(storage, PART, live, still=replace(still, at_the_moment=change))


def test_nobody_puts_a_copy_in_place_of_what_is_being_read(
    storage: PosixStorage, small_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In either round: the loop would change it in the middle."""
    reading, rounds = threading.Lock(), []
    real = piece_digests._Stream.digest

    def digest(stream: Any, piece: Any, buffer: memoryview) -> str:
        rounds.append(reading.locked())
        return real(stream, piece, buffer)

    monkeypatch.setattr(piece_digests._Stream, "digest", digest)
    write_part(storage, PART, {"a": torch.zeros(3000)}, still=StandStill(frozenset("a"), reading))
    assert len(rounds) > 20
    assert all(rounds)


def test_what_may_be_taken_later_is_proven_later(small_blocks: int) -> None:
    """A storage that sends from the tensors' memory may do so until the part is finished."""
    storage, tensor = MemoryStorage(Bucket(), "job"), torch.zeros(3000)
    real = MemoryUpload.finish

    def finish(upload: MemoryUpload) -> None:
        real(upload)
        tensor[0] = 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryUpload, "finish", finish)
        with pytest.raises(TensorsChanged, match="a"):
            write_part(storage, PART, {"a": tensor}, hold=lambda: True, still=StandStill(frozenset("a")))
    tensor.zero_()
    write_part(storage, PART, {"a": tensor}, hold=lambda: True, still=StandStill(frozenset("a")))


def test_what_is_raised_at_that_moment_ends_the_writing(storage: PosixStorage, small_blocks: int) -> None:
    """It is raised by the thread that writes, and the other one has ended."""

    def refuse() -> None:
        raise KeyError("not now")

    for still in (StandStill(frozenset("a"), at_the_moment=refuse), StandStill(frozenset("a"), all_proven=refuse)):
        with pytest.raises(KeyError, match="not now"):
            write_part(storage, PART, {"a": torch.zeros(3000)}, still=still)
        assert "migrator-digests" not in {thread.name for thread in threading.enumerate()}


def test_where_no_thread_can_be_started_one_does_it_all(
    storage: PosixStorage, small_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last save must not fail for that."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    live = {"a": torch.ones(3000), "b": torch.ones(20, 30).t()}
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        record = write_part(storage, PART, live, still=StandStill(frozenset(live)))
    assert all(tensor.all() for tensor in read_part(storage, CKPT, record).values())


@pytest.mark.parametrize("place", ["first group", "room", "settled"])
def test_a_writing_that_is_given_up_ends_at_once(
    storage: PosixStorage, small_blocks: int, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Wherever the other thread is: computing, waiting for room, waiting for what is to be written."""
    monkeypatch.setattr(piece_digests, "COPIES", 0)
    live = {f"t{i}": torch.arange(600.0).reshape(20, 30).t() for i in range(20)}
    if place != "room":
        live = {name: tensor.contiguous() for name, tensor in live.items()}
    seen = threading.Event()

    def give_up(done: int, total: int) -> None:
        if place == "settled":
            assert seen.wait(10)
        raise KeyError("a notice came")

    still = StandStill(frozenset(live), at_the_moment=seen.set)
    with pytest.raises(KeyError, match="a notice came"):
        write_part(storage, PART, live, after_block=give_up, still=still)
    assert "migrator-digests" not in {thread.name for thread in threading.enumerate()}
    assert storage.list(CKPT) == []


def test_what_failed_keeps_no_tensor_alive(storage: PosixStorage, small_blocks: int) -> None:
    """Loops switch the garbage collector off; the memory of copies must be free again all the same."""
    gc.collect()
    gc.disable()
    try:
        tensors = {"a": torch.zeros(3000)}
        gone = weakref.ref(tensors["a"])

        def change() -> None:
            tensors["a"].add_(1)

        with contextlib.suppress(TensorsChanged):
            write_part(storage, PART, tensors, still=StandStill(frozenset("a"), at_the_moment=change))
        tensors.clear()
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("room", [0, 5000, 1 << 20])
def test_copies_take_no_more_than_their_room(
    storage: PosixStorage, small_blocks: int, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Of transposed tensors some wait to be written, and the others are not copied yet. One is always let in."""
    monkeypatch.setattr(piece_digests, "COPIES", room)
    live = {f"t{i}": torch.arange(600.0).reshape(20, 30).t() for i in range(20)}
    held: list[int] = []
    real = piece_digests.PieceDigests._buffer

    def buffer(self: Any, piece: Any, **more: Any) -> memoryview:
        found = real(self, piece, **more)
        held.append(sum(copy.nbytes for copy in self._copies.values()))
        return found

    monkeypatch.setattr(piece_digests.PieceDigests, "_buffer", buffer)
    record = write_part(storage, PART, live, still=StandStill(frozenset(live)))
    assert max(held) <= max(room, 2400)
    back = read_part(storage, CKPT, record)
    for name, tensor in live.items():
        assert torch.equal(back[name], tensor)


def test_a_copied_tensor_is_copied_once(storage: PosixStorage, small_blocks: int) -> None:
    """A transposed tensor of many slices: later slices come from the first copy, so they belong together."""
    tensor = torch.zeros(60, 50).t()

    def change(done: int, total: int) -> None:
        if done > 4096:  # the header
            tensor.fill_(1)

    record = write_part(storage, PART, {"a": tensor}, after_block=change)
    assert not read_part(storage, CKPT, record)["a"].any()


def test_a_tensor_that_changes_its_shape_ends_the_attempt(storage: PosixStorage) -> None:
    """The header is written by then; bytes of another shape must not go under it."""
    shapes = [torch.zeros(3), torch.zeros(4)]
    with pytest.raises(SaveFailed, match=r"a was .*3.* is .*4"):
        write_part(storage, PART, {"a": lambda: shapes.pop(0)})
    assert storage.list(CKPT) == []


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_names_that_the_format_cannot_hold_are_refused(storage: PosixStorage, name: str) -> None:
    """Rather than written into a file that nobody can read."""
    with pytest.raises(RegistrationError):
        write_part(storage, PART, {name: torch.zeros(1)})


def test_elements_that_the_format_cannot_hold_are_refused(storage: PosixStorage) -> None:
    """By name, before anything is written."""
    with pytest.raises(RegistrationError, match=r"a has elements of torch\.bits8, which a part cannot hold"):
        write_part(storage, PART, {"a": torch.zeros(2, dtype=torch.uint8).view(torch.bits8)})
    assert storage.list(CKPT) == []


def test_more_names_than_a_header_holds_are_refused(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """No reader of the format would open the file."""
    monkeypatch.setattr(tensor_file, "_HEADER_MAX", 8191)
    with pytest.raises(RegistrationError, match="the names of the tensors take 8192 bytes; at most 8191"):
        write_part(storage, PART, {"a" * 5000: torch.zeros(1)})
    assert storage.list(CKPT) == []

    monkeypatch.setattr(tensor_file, "_HEADER_MAX", 8192)
    assert write_part(storage, PART, {"a" * 5000: torch.zeros(1)}).bytes == 8196


def test_a_failed_write_leaves_no_part(storage: PosixStorage, small_blocks: int) -> None:
    """Not under its name, and nothing aside."""

    def fail(done: int, total: int) -> None:
        if done > 2000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_part(storage, PART, {"a": torch.zeros(3000)}, after_block=fail)
    assert list((storage.directory / CKPT).iterdir()) == []


def test_a_part_may_be_written_again_before_the_commit_and_never_after(storage: PosixStorage) -> None:
    """An attempt that was thrown away is repeated; a committed ckpt is not touched."""
    write_part(storage, PART, {"a": torch.zeros(3)})
    record = write_part(storage, PART, {"a": torch.ones(5)})
    storage.put(f"{CKPT}/manifest.json", b"{}", exclusive=True)
    with pytest.raises(SaveFailed, match="committed"):
        write_part(storage, PART, {"a": torch.zeros(3)})
    assert read_part(storage, CKPT, record)["a"].sum() == 5


# --- what is not what was committed


def test_every_flipped_byte_is_found(storage: PosixStorage) -> None:
    """Whatever bit of a part turns over, in the header, the padding or the data: it does not load."""
    record = write_part(storage, PART, {"a": torch.randn(5), "b": torch.arange(3)})
    data = bytearray(path_of(storage).read_bytes())
    fd = os.open(path_of(storage), os.O_WRONLY)
    for at in range(len(data)):
        os.pwrite(fd, bytes([data[at] ^ (1 << at % 8)]), at)
        with pytest.raises(CkptCorrupt):
            read_part(storage, CKPT, record)
        os.pwrite(fd, data[at : at + 1], at)
    os.close(fd)
    assert torch.equal(read_part(storage, CKPT, record)["b"], torch.arange(3))


def test_a_bad_block_is_named_with_file_and_tensors(storage: PosixStorage, small_blocks: int) -> None:
    """A reader of the log knows what was lost."""
    record = write_part(storage, PART, {"first": torch.zeros(1000), "second": torch.zeros(1000)})
    fd = os.open(path_of(storage), os.O_WRONLY)
    os.pwrite(fd, b"x", record.bytes - 1)
    os.close(fd)
    with pytest.raises(CkptCorrupt, match=f"{PART}: block {len(record.blocks)} of {len(record.blocks)} .*holds second"):
        read_part(storage, CKPT, record)


@pytest.mark.parametrize(("index", "inside"), [(5, "a"), (6, "b"), (7, "c")])
def test_only_what_lies_in_a_bad_block_is_named(
    storage: PosixStorage, small_blocks: int, index: int, inside: str
) -> None:
    """Tensors that end where the block begins, or begin where it ends, are whole."""
    tensors = {"a": torch.zeros(476), "b": torch.zeros(250), "c": torch.zeros(200)}
    record = write_part(storage, PART, tensors)
    assert [place.end for place in Layout.of(tensors).places] == [6000, 7000, 7800]
    with path_of(storage).open("r+b") as file:
        file.seek(1000 * index + 500)
        file.write(b"x")
    with pytest.raises(CkptCorrupt, match=rf"block {index + 1} of 8 .*\(it holds {inside}\)"):
        read_part(storage, CKPT, record)


def test_a_bad_block_behind_the_header_holds_none_of_it(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the blocks are as long as the header, the second one begins with the first tensor."""
    for module in (digests, tensor_file):
        monkeypatch.setattr(module, "BLOCK", 4096)
    record = write_part(storage, PART, {"a": torch.zeros(10)})
    with path_of(storage).open("r+b") as file:
        file.seek(4097)
        file.write(b"x")
    with pytest.raises(CkptCorrupt, match=r"\(it holds a\)"):
        read_part(storage, CKPT, record)


@pytest.mark.parametrize(("count", "inside"), [(5, "0, 1, 2, 3, 4"), (6, "0, 1, 2, 3, 4 and 1 more")])
def test_of_many_tensors_in_a_bad_block_some_are_named(
    storage: PosixStorage, small_blocks: int, count: int, inside: str
) -> None:
    """A line of a log, not a page."""
    tensors = {"a": torch.zeros(476), **{str(i): torch.zeros(10) for i in range(count)}}
    record = write_part(storage, PART, tensors)
    with path_of(storage).open("r+b") as file:
        file.seek(6001)
        file.write(b"x")
    with pytest.raises(CkptCorrupt, match=rf"\(it holds {inside}\)"):
        read_part(storage, CKPT, record)


def test_behind_a_bad_block_nothing_more_is_read(
    storage: PosixStorage, small_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a ckpt that is of no use not hundreds of gigabytes first: there is another one to load, and time is short."""
    record = write_part(storage, PART, {"a": torch.zeros(100_000)})
    with path_of(storage).open("r+b") as file:
        file.seek(20_500)
        file.write(b"x")
    is_given_up, read = threading.Event(), []

    def join(self: threading.Thread, timeout: float | None = None) -> None:
        is_given_up.set()
        real_join(self, timeout)

    def read_block(file: PosixReader, buffers: list[memoryview], offset: int) -> None:
        read.append(offset)
        if offset > 25_000:
            is_given_up.wait(60)
        read_range(file, buffers, offset)

    real_join = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", join)
    read_range = PosixReader.read
    monkeypatch.setattr(PosixReader, "read", read_block)
    with pytest.raises(CkptCorrupt, match="block 21 of 405"):
        read_part(storage, CKPT, record)
    assert len(read) < 40


def test_a_record_is_what_the_manifest_says_of_it(storage: PosixStorage) -> None:
    """What only its writer knows makes no other one of it, and nobody has to read it in a log."""
    record = write_part(storage, PART, {"a": torch.zeros(3)})
    assert record == replace(record, tensor_digests={})
    assert "tensor_digests" not in repr(record)


@pytest.mark.parametrize("change", [-1, +1, -4000, None])
def test_a_part_of_another_size_is_corrupt(storage: PosixStorage, change: int | None) -> None:
    """Cut, longer, or gone."""
    record = write_part(storage, PART, {"a": torch.randn(5)})
    if change is None:
        path_of(storage).unlink()
    else:
        os.truncate(path_of(storage), record.bytes + change)
    with pytest.raises(CkptCorrupt, match=f"{PART} is missing" if change is None else f"{PART}: it has"):
        read_part(storage, CKPT, record)


def test_a_file_cut_behind_our_back_is_corrupt(
    storage: PosixStorage, small_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when its size was right a moment ago: it is cut just before a block in its middle is read."""
    record = write_part(storage, PART, {"a": torch.randn(2_000)})

    def cut_and_read(file: PosixReader, buffers: list[memoryview], offset: int) -> None:
        if offset == 5000:
            os.truncate(path_of(storage), 5000)
        read_range(file, buffers, offset)

    read_range = PosixReader.read
    monkeypatch.setattr(PosixReader, "read", cut_and_read)
    with pytest.raises(CkptCorrupt, match="has become shorter"):
        read_part(storage, CKPT, record)


def test_digests_that_do_not_add_up_are_corrupt(storage: PosixStorage) -> None:
    """The manifest says the same thing twice; both must be true."""
    record = write_part(storage, PART, {"a": torch.randn(5)})
    with pytest.raises(CkptCorrupt, match="add up"):
        read_part(storage, CKPT, replace(record, digest="0" * 32))
    with pytest.raises(CkptCorrupt, match="add up"):
        read_part(storage, CKPT, replace(record, blocks=record.blocks * 2))
    twice = record.blocks * 2
    with pytest.raises(CkptCorrupt, match="add up"):
        read_part(storage, CKPT, replace(record, blocks=twice, digest=digest_of_blocks(twice)))


def test_a_bad_header_is_found_before_anything_is_read_on_its_word(storage: PosixStorage) -> None:
    """Nothing is allocated and no home is touched when the header is not the committed one."""
    record = write_part(storage, PART, {"a": torch.ones(5), "b": torch.ones(5)})
    data = path_of(storage).read_bytes()
    path_of(storage).write_bytes(data.replace(b'"a"', b'"c"', 1))
    homes = {"a": torch.zeros(5), "b": torch.zeros(5)}
    with pytest.raises(CkptCorrupt, match="holds the header"):
        read_part(storage, CKPT, record, homes)
    assert not homes["b"].any()


@pytest.mark.parametrize("is_known", [True, False])
def test_a_header_is_proven_by_its_own_digest_or_by_that_of_its_block(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """With its own nothing is read twice. Older records do not have it."""
    record = write_part(storage, PART, {"a": torch.ones(5000)})
    record = replace(record, header=record.header if is_known else None)
    spans: list[tuple[int, int]] = []
    real = PosixReader.read

    def read(reader: PosixReader, buffers: Any, offset: int) -> None:
        spans.append((offset, sum(map(len, buffers))))
        real(reader, buffers, offset)

    monkeypatch.setattr(PosixReader, "read", read)
    assert torch.equal(read_part(storage, CKPT, record)["a"], torch.ones(5000))
    assert spans == ([(0, 4096), (0, record.bytes)] if is_known else [(0, record.bytes)])


def test_a_header_with_the_digest_of_another_is_proven_by_its_block(storage: PosixStorage) -> None:
    """Whatever the record says of the header, the blocks decide."""
    record = write_part(storage, PART, {"a": torch.ones(5)})
    for header in ((4096, "0" * 32), (9, "0" * 32), (1 << 40, "0" * 32)):
        found = read_part(storage, CKPT, replace(record, header=header))
        assert torch.equal(found["a"], torch.ones(5))


def test_gaps_and_overlaps_are_found_in_the_header_itself() -> None:
    """Every byte belongs to one tensor."""
    for start, size in ((8, 16), (0, 8), (4, 12)):
        entries = {"__metadata__": META, "a": entry(), "b": entry(data_offsets=[start, start + 8])}
        text = json.dumps(entries).encode()
        header = len(text).to_bytes(8, "little") + text
        if start == 8:
            assert len(Layout.parse(header, len(header) + size).places) == 2
            continue
        with pytest.raises(CkptCorrupt, match="puts b at byte"):
            Layout.parse(header, len(header) + size)


def test_the_name_of_a_part_is_durable_when_it_was_written(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader commits on the word that the parts are safe, perhaps from another node."""
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        real(fd)
        place = Path(f"/proc/self/fd/{fd}").readlink()
        synced.append(f"{place.name} with {[p.name for p in place.iterdir()] if place.is_dir() else 'bytes'}")

    monkeypatch.setattr(os, "fsync", fsync)
    write_part(storage, PART, {"a": torch.ones(5)})
    assert synced[-2:] == [f"{CKPT} with {[Path(PART).name]}", f"job with {[CKPT]}"]


def forged(storage: PosixStorage, header: bytes, data: bytes, size: int | None = None) -> PartRecord:
    """A part with any header and data, and the digests to go with it."""
    content = (len(header) if size is None else size).to_bytes(8, "little") + header + data
    path_of(storage).parent.mkdir(parents=True, exist_ok=True)
    path_of(storage).write_bytes(content)
    block = block_digest([memoryview(content)])
    found = (block,) if content else ()
    return PartRecord(Path(PART).name, len(content), digest_of_blocks(found), found)


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


META = {"format": "pt", "migrator": "1"}

FORGERIES: list[Any] = [
    {"__metadata__": META, "a": entry(shape=[2**40])},
    {"__metadata__": META, "a": entry(shape=[-2])},
    {"__metadata__": META, "a": entry(shape=["a", 2**40])},
    {"__metadata__": META, "a": entry(shape=[True, 2])},
    {"__metadata__": META, "a": entry(shape="2")},
    {"__metadata__": META, "a": entry(shape=[0, 2**62, 2**62], data_offsets=[0, 0]), "b": entry()},
    {"__metadata__": META, "a": entry(shape=[0, 2**61], data_offsets=[0, 0]), "b": entry()},
    {"__metadata__": META, "a": entry(shape=[1] * 64 + [2])},
    {"__metadata__": META, "a": entry(data_offsets=[0, 2**60], shape=[2**58])},
    {"__metadata__": META, "a": entry(data_offsets=[8, 0])},
    {"__metadata__": META, "a": entry(data_offsets=[4, 12])},
    {"__metadata__": META, "a": entry(data_offsets=[0])},
    {"__metadata__": META, "a": entry(), "b": entry()},
    {"__metadata__": META, "a": entry(dtype="F31")},
    {"__metadata__": META, "a": entry(dtype=["F32"])},
    {"__metadata__": META, "a": []},
    {"__metadata__": META},
    {"__metadata__": META | {"dtypes": '{"a": "complex128"}'}, "a": entry()},
    {"__metadata__": META | {"dtypes": '{"a": "complex128"}'}, "a": entry(dtype="U8", shape=[8])},
    {"__metadata__": META | {"dtypes": '{"a": "complex64"}'}, "a": entry(shape=[1])},
    {"__metadata__": META | {"dtypes": '{"a": "complex64"}'}, "a": entry(shape=[1, 8])},
    {"__metadata__": META | {"dtypes": '{"a": "complex64"}'}, "a": entry(dtype="U8", shape=[])},
    {"__metadata__": META | {"dtypes": "["}, "a": entry()},
    {"__metadata__": META | {"dtypes": "[]"}, "a": entry()},
    {"__metadata__": 1, "a": entry()},
    {"a": entry()},
    [],
    None,
]


@pytest.mark.parametrize("header", FORGERIES, ids=lambda header: json.dumps(header)[-50:])
def test_headers_that_lie_are_corrupt(storage: PosixStorage, header: Any) -> None:
    """Even with digests to match: nothing is allocated or read on the word of a header that does not add up."""
    record = forged(storage, json.dumps(header).encode(), bytes(8))
    with pytest.raises(CkptCorrupt, match=PART):
        read_part(storage, CKPT, record)


def test_an_honest_header_of_other_hands_is_read(storage: PosixStorage) -> None:
    """The forgeries above fail for their lies, not for their form."""
    record = forged(storage, json.dumps({"__metadata__": META, "a": entry()}).encode(), bytes(8))
    assert torch.equal(read_part(storage, CKPT, record)["a"], torch.zeros(2))


@pytest.mark.parametrize("size", [0, 1, 10**6, 2**63, 2**64 - 1])
def test_a_header_length_that_lies_is_corrupt(storage: PosixStorage, size: int) -> None:
    """The first eight bytes are believed no more than the rest."""
    record = forged(storage, json.dumps({"__metadata__": META, "a": entry()}).encode(), bytes(8), size)
    with pytest.raises(CkptCorrupt, match=f"{PART}: its header {'is not one' if size == 1 else 'claims'}"):
        read_part(storage, CKPT, record)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__"]),
        st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "dtypes"]),
            st.sampled_from(["F32", "U8", "", "{}"])
            | st.lists(st.integers(-1, 9) | st.booleans() | st.text(max_size=2) | st.integers(), max_size=3)
            | st.none(),
        )
        | st.none(),
    )
    | st.binary(max_size=20)
)
def test_hostile_headers_are_corrupt_and_nothing_worse(new_directory: Callable[[], Path], header: Any) -> None:
    """Any JSON, and any bytes, either are a true header or CkptCorrupt."""
    storage = PosixStorage(new_directory(), "job")
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    record = forged(storage, text, bytes(8))
    try:
        read_part(storage, CKPT, record)
    except CkptCorrupt:
        pass


def test_an_empty_or_tiny_file_is_corrupt(storage: PosixStorage) -> None:
    """Shorter than the length of its header."""
    path_of(storage).parent.mkdir(parents=True)
    for content in (b"", b"{}"):
        path_of(storage).write_bytes(content)
        found = (block_digest([memoryview(content)]),) if content else ()
        record = PartRecord(Path(PART).name, len(content), digest_of_blocks(found), found)
        with pytest.raises(CkptCorrupt):
            read_part(storage, CKPT, record)


def test_a_disk_that_fails_while_reading_is_not_called_corrupt(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ckpt may be whole; a load that would take the one before it must know the difference."""
    record = write_part(storage, PART, {"a": torch.randn(5)})

    def fail(*arguments: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StorageError) as failure:
        read_part(storage, CKPT, record)
    assert failure.value.transient


@pytest.mark.parametrize("piece", [1, 7, 300, 999, 1000, 4096])
@pytest.mark.parametrize("spoilt", [0, 1, 2])
def test_blocks_are_read_in_pieces(
    storage: PosixStorage, small_blocks: int, monkeypatch: pytest.MonkeyPatch, piece: int, spoilt: int
) -> None:
    """Of any size, through all tensors; a block that was spoilt on the way is read once more as a whole."""
    tensors = {f"t{i}": torch.randn(n, generator=torch.Generator().manual_seed(i)) for i, n in enumerate((3, 400, 77))}
    record = write_part(storage, PART, tensors)
    monkeypatch.setattr(PosixReader, "piece", piece)
    real, bad = PosixReader.read, [spoilt]

    def read(self: PosixReader, buffers: list[memoryview], offset: int) -> None:
        real(self, buffers, offset)
        if offset >= small_blocks and bad[0] and buffers:
            bad[0] -= 1
            buffers[0][0] ^= 1

    monkeypatch.setattr(PosixReader, "read", read)
    monkeypatch.setattr(PosixReader, "threads", 1)
    if spoilt == 2 and piece >= small_blocks:
        with pytest.raises(CkptCorrupt, match="block 2 of"):
            read_part(storage, CKPT, record)
        return
    found = read_part(storage, CKPT, record)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_load_needs_no_threads(
    storage: PosixStorage, small_blocks: int, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """A container's limit on processes is one on threads."""
    tensors = {"a": torch.randn(3000), "b": torch.randn(77)}
    record = write_part(storage, PART, tensors)
    real, started = threading.Thread.start, list[threading.Thread]()

    def start(self: threading.Thread) -> None:
        if len(started) == most:
            raise RuntimeError("can't start new thread")
        started.append(self)
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(PosixReader, "threads", 4)
    seen: list[int] = []
    found = read_part(storage, CKPT, record, progress=lambda done, size: seen.append(done))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert len(started) == most
    assert seen[-1] == record.bytes
    assert not any(thread.is_alive() for thread in started)


def test_no_thread_reads_when_a_load_has_failed(
    storage: PosixStorage, small_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The descriptor is closed then, and its number is another file's."""
    record = write_part(storage, PART, {"a": torch.randn(3000)})
    is_reading, may_go_on, reading = threading.Event(), threading.Event(), list[int]()
    real_read, real_close, real_join = PosixReader.read, PosixReader.close, threading.Thread.join
    left: list[int] = []

    def read(self: PosixReader, buffers: list[memoryview], offset: int) -> None:
        if offset >= small_blocks:
            reading.append(offset)
            is_reading.set()
            assert may_go_on.wait(60)
            reading.remove(offset)
        real_read(self, buffers, offset)

    def join(self: threading.Thread, timeout: float | None = None) -> None:
        may_go_on.set()
        real_join(self, timeout)

    def close(self: PosixReader) -> None:
        left.append(len(reading))
        may_go_on.set()
        real_close(self)

    monkeypatch.setattr(PosixReader, "read", read)
    monkeypatch.setattr(PosixReader, "close", close)
    monkeypatch.setattr(threading.Thread, "join", join)

    def stop(done: int, size: int) -> None:
        assert is_reading.wait(60)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_part(storage, CKPT, record, progress=stop)
    assert left == [0]


ODD_STRIDES = {
    "one of a row": lambda: torch.randn(1, 5)[:, 0],
    "one of a matrix": lambda: torch.randn(3, 5)[2:, 4:],
    "none of a row": lambda: torch.randn(0, 5)[:, 0],
    "a view of one": lambda: torch.randn(7).as_strided((1, 1), (3, 5)),
}


@pytest.mark.parametrize("kind", ODD_STRIDES)
def test_one_element_may_have_any_stride(storage: PosixStorage, kind: str) -> None:
    """It counts as contiguous whatever it is; and it is where its value lies, as all are."""
    tensor = ODD_STRIDES[kind]()
    back = read_part(storage, CKPT, write_part(storage, PART, {"a": tensor}))["a"]
    assert torch.equal(back, tensor)
    if tensor.numel():
        memory(tensor)[:] = memory(torch.zeros(1))
        assert tensor.sum() == 0
    assert digest_of(tensor) == digest_of(tensor.clone())
    tree = codec.encode({"a": tensor}, put=lambda *_: None, path="x")
    assert torch.equal(codec.decode(tree, get=lambda *_: torch.empty(0))["a"], tensor)
