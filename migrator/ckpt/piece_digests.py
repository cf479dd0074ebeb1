"""The pieces of a part and their digests, and the proof that the tensors stood still while they were written.

The digest of each piece is computed twice: before it is written, by a thread that runs ahead of the writing; and after
it, by the same thread, when it has been through all pieces once. So the file holds what these tensors held, all of them
together, at the moment between the two: each piece was the same before that moment and after it, and was written in
between. Any change is seen, unless it was undone. Both computations run beside the disk, which is slower. Of tensors on
a device, and between one part and the next, only the caller's marks show a change.

A piece is fetched anew each time: the caller may have copied a tensor meanwhile and let the training loop change the
live one.

The price: a thread for each part that is not small.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from migrator.ckpt import digests
from migrator.ckpt.tensor_file import Layout, Place, is_plain, memory, on_cpu
from migrator.errors import SaveFailed

FIRST = 4 << 20
"""Bytes that the first call writes at least, so that the disk begins early."""
GROUP = 16 << 20
"""Bytes that one call writes at least, if there are so many."""
COPIES = 64 << 20
"""Bytes that copies which wait to be written take at most, unless one is larger. Tensors are copied that do not lie in
memory as in a file: transposed, or on a device."""
SMALL = 4 << 20
"""A part of fewer bytes is written without a thread."""
_TICK_S = 0.5
"""Seconds of one piece of a wait for the other thread."""


class TensorsChanged(Exception):  # noqa: N818 - internal
    """Tensors changed while they were written: the part is of no moment at all."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names


@dataclass(frozen=True)
class StandStill:
    """What has to stand still while a part is written."""

    names: frozenset[str] = frozenset()
    """The tensors that somebody may change."""
    reading: AbstractContextManager[Any] = nullcontext()
    """Held while the thread reads a tensor; the caller takes it to put a copy in a tensor's place."""
    at_the_moment: Callable[[], None] = lambda: None
    """Called at the moment whose bytes are written. What it raises ends the writing."""
    tensor_proven: Callable[[str], None] = lambda _: None
    """Called with each tensor that is proven, and not read any more."""
    all_proven: Callable[[], None] = lambda: None
    """Called when all are, by the thread that writes. What it raises ends the writing."""


@dataclass(frozen=True)
class _Piece:
    """Bytes of a tensor, or of the header, that lie in one block."""

    place: Place | None
    start: int
    end: int
    block: int


def _pieces(layout: Layout) -> list[_Piece]:
    """All bytes of the part, in order."""
    found = []
    spans: list[tuple[Place | None, int, int]] = [(None, 0, len(layout.header))]
    for place, begin, end in [*spans, *((place, place.start, place.end) for place in layout.places)]:
        at = begin
        while at < end:
            stop = min(end, (at // digests.BLOCK + 1) * digests.BLOCK)
            if at < FIRST < stop:
                stop = FIRST  # the first write waits for the first group alone
            found.append(_Piece(place, at - begin, stop - begin, at // digests.BLOCK))
            at = stop
    return found


class _Stream:
    """The digests of blocks whose pieces come in order."""

    def __init__(self) -> None:
        self._block = -1
        self._hash = xxhash.xxh3_128()

    def digest(self, piece: _Piece, buffer: memoryview) -> str:
        """That of the block up to the end of this piece."""
        if piece.block != self._block:
            self._block, self._hash = piece.block, xxhash.xxh3_128()
        self._hash.update(buffer)
        return self._hash.hexdigest()

    def copy(self) -> Any:
        return self._hash.copy()

    def go_on_behind(self, piece: _Piece, state: Any) -> None:
        self._block, self._hash = piece.block, state


class PieceDigests:
    """The pieces of a part, and their digests before and after the writing."""

    def __init__(self, layout: Layout, tensors: Mapping[str, Any], still: StandStill, *, of_tensors: bool) -> None:
        self._layout = layout
        self._tensors = tensors
        self._still = still
        self._pieces = _pieces(layout)
        self._last = {piece.place.name: i for i, piece in enumerate(self._pieces) if piece.place is not None}
        """The last piece of each tensor."""
        self._cond = threading.Condition()
        self._known: list[str] = []
        """The digests of the pieces, as far as they were computed."""
        self._behind: dict[int, Any] = {}
        """Of each piece that the second round passes over: the state of the digest behind it."""
        self._taken = 0
        """How many pieces were handed out to be written."""
        self._settled = 0
        """Of how many the storage needs the tensors' memory no more."""
        self._is_held = False
        """The storage may still take bytes of what was written."""
        self._is_finished = False
        self._has_told = False
        self._is_done = False
        """All have been through the second computation."""
        self._views: dict[str, tuple[torch.Tensor, memoryview]] = {}
        """Of the tensors that lie in memory as in a file: the bytes of what was fetched last."""
        self._copies: dict[str, torch.Tensor] = {}
        """Of the other tensors: copies that are not written yet."""
        self._copied = 0
        self._is_short_of_room = False
        self._is_over = False
        self._error: BaseException | None = None
        self._of_tensors: dict[str, Any] | None = {} if of_tensors else None
        self._thread: threading.Thread | None = None
        if layout.size > SMALL:
            self._thread = threading.Thread(target=self._run, name="migrator-digests", daemon=True)

    def __enter__(self) -> PieceDigests:
        if self._thread is not None:
            try:
                self._thread.start()
            except RuntimeError:  # there are as many threads as are allowed
                self._thread = None
        return self

    def __exit__(self, *_: object) -> None:
        with self._cond:
            self._is_over = True
            self._cond.notify_all()
        if self._thread is not None:
            self._thread.join()
        # An error keeps its frames alive, and these the tensors, until the garbage is collected.
        self._error = None
        for held in (self._views, self._copies, self._behind):
            held.clear()

    # The thread that writes.

    def groups(self) -> Iterator[list[memoryview]]:
        """What each call writes."""
        if self._thread is None:
            self._first()
        while self._taken < len(self._pieces):
            begin, end = self._taken, self._next_group()
            buffers = [self._buffer(piece) for piece in self._pieces[begin:end]]
            self._taken = end
            yield buffers

    def written(self, *, is_held: bool) -> None:
        """The last group was. `is_held`: its bytes may be taken until the upload is finished."""
        with self._cond:
            self._is_held |= is_held
            if not self._is_held:
                self._settled = self._taken
            for name in [name for name in self._copies if self._last[name] < self._taken]:
                self._copied -= self._copies.pop(name).nbytes
            self._cond.notify_all()

    def prove(self, *, is_finished: bool = False) -> None:
        """Wait until all was computed again. Behind an upload that holds bytes the second call does it."""
        with self._cond:
            if is_finished:
                self._is_finished, self._settled = True, len(self._pieces)
                self._cond.notify_all()
        if self._thread is None and not self._is_done and (is_finished or not self._is_held):
            self._second()
        with self._cond:
            while not (self._is_done or self._error or (self._is_held and not is_finished)):
                self._wait_for_thread()
        self._check()
        if self._is_done and not self._has_told:
            self._has_told = True
            self._still.all_proven()

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple({piece.block: known for piece, known in zip(self._pieces, self._known, strict=True)}.values())

    @property
    def of_tensors(self) -> dict[str, bytes]:
        if self._of_tensors is None:
            return {}
        empty = xxhash.xxh3_64().digest()
        return {
            place.name: self._of_tensors[place.name].digest() if place.name in self._of_tensors else empty
            for place in self._layout.places
        }

    def _next_group(self) -> int:
        """The end of the next group; waits until its pieces have digests."""
        with self._cond:
            while True:
                self._check()
                size, end, enough = 0, self._taken, _least_bytes(self._taken)
                while end < len(self._known) and size < enough:
                    size += self._pieces[end].end - self._pieces[end].start
                    end += 1
                if size >= enough or end == len(self._pieces) or (end > self._taken and self._is_short_of_room):
                    return end
                self._wait_for_thread()

    def _wait_for_thread(self) -> None:
        self._cond.wait(_TICK_S)
        if self._thread is not None and not (self._thread.is_alive() or self._error or self._is_done):
            raise SaveFailed("the thread that computes digests has ended")

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # The thread that computes, or the same one if the part is small.

    def _run(self) -> None:
        try:
            self._first()
            self._second()
        except BaseException as error:  # raised by the thread that writes
            with self._cond:
                self._error = error
                self._cond.notify_all()

    def _first(self) -> None:
        stream, told, fresh = _Stream(), 0, 0
        for i, piece in enumerate(self._pieces):
            if self._is_over:
                return
            self._wait_for_room(piece)
            with self._still.reading:
                buffer = self._buffer(piece, keep=True)
                found = stream.digest(piece, buffer)
                if self._of_tensors is not None and piece.place is not None:
                    self._of_tensors.setdefault(piece.place.name, xxhash.xxh3_64()).update(buffer)
            if self._still.names and not self._is_proven(piece):
                self._behind[i] = stream.copy()
            self._known.append(found)
            fresh += piece.end - piece.start
            if fresh >= _least_bytes(told) or i + 1 == len(self._pieces):
                told, fresh = i + 1, 0
                self._tell()
        if self._still.names:
            self._still.at_the_moment()

    def _second(self) -> None:
        if not self._still.names:
            self._is_done = True
            self._tell()
            return
        stream, copies = _Stream(), dict[str, torch.Tensor]()
        for i, piece in enumerate(self._pieces):
            if self._is_over or (self._settled <= i and not self._is_settled(i)):
                return
            if not self._is_proven(piece):
                stream.go_on_behind(piece, self._behind.pop(i))
                continue
            assert piece.place is not None
            with self._still.reading:
                found = stream.digest(piece, self._buffer(piece, copies=copies))
            if found != self._known[i]:
                raise TensorsChanged([piece.place.name])
            if i == self._last[piece.place.name]:
                self._still.tensor_proven(piece.place.name)
        self._is_done = True
        self._tell()

    def _is_settled(self, i: int) -> bool:
        with self._cond:
            while self._settled <= i and not self._is_over:
                self._cond.wait(_TICK_S)
            return not self._is_over

    def _tell(self) -> None:
        with self._cond:
            self._cond.notify_all()

    def _is_proven(self, piece: _Piece) -> bool:
        return piece.place is not None and piece.place.name in self._still.names

    def _wait_for_room(self, piece: _Piece) -> None:
        place = piece.place
        if place is None or self._thread is None or place.name in self._copies:
            return
        live = self._source(place)
        if live is self._views.get(place.name, (None,))[0] or is_plain(live):
            return
        with self._cond:
            while self._copies and self._copied + place.end - place.start > COPIES and not self._is_over:
                self._is_short_of_room = True
                self._cond.notify_all()
                self._cond.wait(_TICK_S)
            self._is_short_of_room = False

    def _buffer(
        self, piece: _Piece, *, keep: bool = False, copies: dict[str, torch.Tensor] | None = None
    ) -> memoryview:
        """The bytes of a piece as they are now. A tensor that has to be copied is copied once, not for each piece.

        `keep`: the copy is what will be written. `copies`: where the copy is kept for the next piece.
        """
        place = piece.place
        if place is None:
            return memoryview(self._layout.header)[piece.start : piece.end]
        held = self._copies if copies is None else copies
        tensor = held.get(place.name)
        if tensor is not None:
            return memory(tensor)[piece.start : piece.end]
        live = self._source(place)
        # The same tensor lies in the same memory: the caller's handle is its own, and nobody gives it other data.
        known, view = self._views.get(place.name, (None, None))
        if view is None or known is not live:
            tensor = on_cpu(live)
            view = memory(tensor)
            if tensor.data_ptr() == live.data_ptr():
                self._views[place.name] = (live, view)
            elif copies is not None:
                copies.clear()
                copies[place.name] = tensor
            elif keep:
                with self._cond:
                    self._copies[place.name] = tensor
                    self._copied += tensor.nbytes
        return view[piece.start : piece.end]

    def _source(self, place: Place) -> torch.Tensor:
        live = fetched(self._tensors[place.name])
        if live.dtype != place.dtype or live.shape != place.shape:
            raise SaveFailed(
                f"{place.name} was {place.dtype} of shape {place.shape} when its save began "
                f"and is {live.dtype} of shape {tuple(live.shape)} now; the attempt is of no use"
            )
        return live


def _least_bytes(begin: int) -> int:
    """How many bytes one call writes at least, if it begins with the piece of this number."""
    return GROUP if begin else min(FIRST, GROUP)


def fetched(source: Any) -> torch.Tensor:
    return source if isinstance(source, torch.Tensor) else source()
