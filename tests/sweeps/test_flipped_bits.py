"""Every byte of a ckpt, changed, lost, moved or exchanged: it is found, named, and the ckpt before it comes back.

The damage is done to real ckpts, of one rank and of two, on a real file system; found it has to be by the very
load of a life. What counts is the state that comes back, to the last bit, and that nothing on the disk is touched.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from migrator.ckpt import catalog, digests, generations, leaving_mark, tensor_file
from migrator.ckpt.manifest import Manifest
from migrator.ckpt.names import MANIFEST
from migrator.ckpt.tensor_file import Layout
from migrator.errors import CkptCorrupt, NoUsableCkpt
from migrator.session import restore
from tests.support import chance
from tests.support.damaged_ckpt import Ckpts, Return, aside, on_disk, resealed, two_ckpts, within

SECTOR, PAGE = 512, 4096
STRIDE = 211
"""Of so many places one is looked at by the load of a whole life, all of them by what reads the file."""


@pytest.fixture(scope="module")
def one(new_directory: Callable[[], Path]) -> Ckpts:
    return two_ckpts(new_directory() / "root")


@pytest.fixture(scope="module")
def two(new_directory: Callable[[], Path]) -> Ckpts:
    """Of two ranks: two shares, a part of each rank's own, and the records of the ranks."""
    return two_ckpts(new_directory() / "root", size=2)


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def ckpts(request: pytest.FixtureRequest) -> Iterator[Ckpts]:
    """Two ckpts that nothing but the test may change: when it has taken its damage back all is as before."""
    found: Ckpts = request.getfixturevalue("one" if request.param == 1 else "two")
    before = on_disk(found.storage.root)
    yield found
    assert on_disk(found.storage.root) == before


class Reader:
    """Reads damaged ckpts, again and again, into the same objects."""

    def __init__(self, ckpts: Ckpts) -> None:
        self.ckpts = ckpts
        self._manifest = catalog.whole(ckpts.storage, ckpts.newest)
        self._lives = [ckpts.life(rank=rank) for rank in range(ckpts.size)]
        self._turn = 0

    def refuses(self, path: Path) -> str:
        """What is said of this file of the newest ckpt. It is read as a load does; the files beside it are not."""
        with pytest.raises(CkptCorrupt) as refusal:
            self._read(path)
        said = str(refusal.value)
        assert self.ckpts.newest in said
        assert ("manifest" if path.name == MANIFEST else path.name) in said
        return said

    def _read(self, path: Path) -> None:
        if path.name == MANIFEST:
            catalog.whole(self.ckpts.storage, self.ckpts.newest)
            return
        (record,) = (part for part in self._manifest.parts if part.name == path.name)
        restore.read(self.ckpts.storage, replace(self._manifest, parts=(record,)), {})

    def goes_back(self) -> None:
        """A life loads the older ckpt, whatever it had in its objects, and says which one was bad."""
        life = self._life()
        with within(30):
            assert life.load() == self.ckpts.older
        assert life.bad == {self.ckpts.newest}
        assert life.state == self.ckpts.states[self.ckpts.older, life._rank]

    def takes_the_newest(self) -> None:
        life = self._life()
        with within(30):
            assert life.load() == self.ckpts.newest
        assert life.bad == set()
        assert life.state == self.ckpts.states[self.ckpts.newest, life._rank]

    def _life(self) -> Return:
        """One rank after the other: each has to find what is wrong by itself."""
        self._turn += 1
        return self._lives[self._turn % len(self._lives)].again()


@contextmanager
def rewritten(path: Path, data: bytes) -> Iterator[None]:
    """Other bytes in the same file."""
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)


# Bits.


def each_flip(path: Path, bits: Callable[[int], tuple[int, ...]]) -> Iterator[tuple[int, int]]:
    """The file with one bit changed, as often as it has places for that."""
    data = path.read_bytes()
    fd = os.open(path, os.O_WRONLY)
    try:
        for at, byte in enumerate(data):
            for bit in bits(at):
                os.pwrite(fd, bytes([byte ^ 1 << bit]), at)
                yield at, bit
            os.pwrite(fd, bytes([byte]), at)
    finally:
        os.close(fd)
        path.write_bytes(data)


def one_bit(at: int) -> tuple[int, ...]:
    """A bit of each byte, and each of the eight again and again."""
    return ((at ^ at >> 3) & 7,)


def all_bits(at: int) -> tuple[int, ...]:
    return tuple(range(8))


def check_each_flip(ckpts: Ckpts, bits: Callable[[int], tuple[int, ...]]) -> int:
    reader, done = Reader(ckpts), 0
    for path in ckpts.files():
        last = path.stat().st_size - 1
        for at, _ in each_flip(path, bits):
            reader.refuses(path)
            done += 1
            if done % STRIDE == 0 or at in (0, last):
                reader.goes_back()
    reader.takes_the_newest()
    return done


@pytest.mark.slow
def test_every_changed_byte_is_found_and_leads_back(ckpts: Ckpts) -> None:
    """In manifest, headers, padding and tensors, of shares and of a rank's own: named, and the older ckpt comes."""
    assert check_each_flip(ckpts, one_bit) == sum(path.stat().st_size for path in ckpts.files())


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_flipped_bit_is_found_and_leads_back(one: Ckpts) -> None:
    """The same for each single bit."""
    assert check_each_flip(one, all_bits) == 8 * sum(path.stat().st_size for path in one.files())


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Blocks so small that a small ckpt has many."""
    for module in (digests, tensor_file):
        monkeypatch.setattr(module, "BLOCK", 1 << 10)
    return 1 << 10


def layout_of(path: Path) -> Layout:
    data = path.read_bytes()
    return Layout.parse(data[: 8 + int.from_bytes(data[:8], "little")], len(data))


def test_what_lies_in_a_damaged_block_is_named(small_blocks: int, tmp_path: Path) -> None:
    """The edges of each of many blocks, and bytes between: the message has the block's number and the tensors in it."""
    ckpts = two_ckpts(tmp_path, width=32)
    reader = Reader(ckpts)
    (path,) = ckpts.parts()
    layout, count = layout_of(path), -(-path.stat().st_size // small_blocks)
    assert count > 10
    named = set()
    for at, _ in each_flip(path, lambda at: one_bit(at) if at % small_blocks % 93 == 0 else ()):
        said = reader.refuses(path)
        assert f"block {at // small_blocks + 1} of {count} " in said
        begin = at // small_blocks * small_blocks
        inside = [place.name for place in layout.places if place.start < begin + small_blocks and place.end > begin]
        if at < len(layout.header):
            assert "the header" in said
        else:
            found = said.partition("(it holds ")[2].rstrip(")").partition(" and ")[0].split(", ")
            assert found == inside[:5]
            named |= set(found)
        if at % small_blocks == 0:
            reader.goes_back()
    assert {name.split("/")[0] for name in named} == {"model", "optimizer", "metrics", "random"}


def check_large(ckpts: Ckpts, samples: int) -> int:
    """The first and the last byte of each block, and some between; returns how many blocks there were."""
    reader = Reader(ckpts)
    (path,) = ckpts.parts()
    size, block = path.stat().st_size, digests.BLOCK
    dice = torch.Generator().manual_seed(7)
    fd = os.open(path, os.O_RDWR)
    try:
        for begin in range(0, size, block):
            end = min(size, begin + block)
            inside = torch.randint(begin, end, (samples,), generator=dice).tolist()
            for number, at in enumerate([begin, end - 1, *inside]):
                byte = os.pread(fd, 1, at)
                os.pwrite(fd, bytes([byte[0] ^ 1 << number % 8]), at)
                assert f"block {at // block + 1} of {-(-size // block)} " in reader.refuses(path)
                if number < 2:
                    reader.goes_back()
                os.pwrite(fd, byte, at)
    finally:
        os.close(fd)
    reader.takes_the_newest()
    return -(-size // block)


def test_the_edges_of_every_block_are_proven(small_blocks: int, tmp_path: Path) -> None:
    """Of many blocks the first byte, the last one and some between: the older ckpt comes back over all of it."""
    assert check_large(two_ckpts(tmp_path, ballast=12_000), samples=2) > 50


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_edges_of_every_block_of_a_large_ckpt_are_proven(tmp_path: Path) -> None:
    """The same with blocks as large as they are, two and a bit of them."""
    assert check_large(two_ckpts(tmp_path, ballast=(150 << 20) // 4), samples=4) == 3


# What may change.


def test_records_of_ranks_and_hidden_files_are_not_even_opened(two: Ckpts, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the commit the manifest alone says what counts: whatever else there is may be damaged, and is not read."""
    opened = []
    real = os.open

    def watched(path: Any, *arguments: Any, **more: Any) -> int:
        opened.append(Path(path).name)
        return real(path, *arguments, **more)

    monkeypatch.setattr(os, "open", watched)
    reader = Reader(two)
    for _ in range(two.size):
        reader.takes_the_newest()
    there = {path.name for path in two.path(two.newest).iterdir()}
    assert len(there) > len(two.files())
    assert there & set(opened) == {path.name for path in two.files()}


def test_what_does_not_count_may_be_anything(two: Ckpts) -> None:
    """Records of ranks damaged or gone, strangers and things written aside beside the parts: the state is right."""
    reader = Reader(two)
    directory = two.path(two.newest)
    records = sorted(directory.glob("rank-*.json"))
    assert len(records) == 2
    for path in records:
        for number, _ in enumerate(each_flip(path, one_bit)):
            if number % 499 == 0:
                reader.takes_the_newest()
        for data in (b"", b"{}", bytes(5000)):
            with rewritten(path, data):
                reader.takes_the_newest()
        with aside(path):
            reader.takes_the_newest()
            path.mkdir()
            reader.takes_the_newest()
    strangers = [".manifest.json.0123456789ab.tmp", ".manifest.json.claim", "part-00002-of-00002.safetensors", "notes"]
    for name in strangers:
        (directory / name).write_bytes(b"nothing of a ckpt")
    (directory / "rank-00007.json").symlink_to("/dev/zero")
    (directory / "kept").mkdir()
    reader.takes_the_newest()
    reader.takes_the_newest()
    for name in [*strangers, "rank-00007.json"]:
        (directory / name).unlink()
    (directory / "kept").rmdir()


def test_every_changed_byte_of_a_life_s_record_keeps_all_ckpts_in_reach(one: Ckpts, tmp_path: Path) -> None:
    """The next life finds both ckpts, whichever record is damaged; only it then deletes less."""
    storage = one.storage
    found = 0
    for path in sorted(one.path("generations").iterdir()):
        number = int(path.stem)
        for _ in each_flip(path, one_bit):
            found += 1
            taken = generations.numbers(storage)
            reached, proven = generations._lineage(storage, 3, 2, taken)
            assert reached == (3, 2, 1)
            assert proven == {3, *range(number, 3)}
            assert catalog.ckpts(storage, reached) == [one.newest, one.older]
            if found % 100 == 0:
                claimed = generations.claim(storage, fresh=False, about={})
                one.path("generations", f"{claimed.number:06d}.json").unlink()
                assert (claimed.lineage, claimed.proven) == ((3, 2, 1), proven)
    assert found > 250


# Lengths, sectors and pages.


def test_every_cut_is_found(ckpts: Ckpts) -> None:
    """Each file at each length below its own, down to nothing."""
    reader = Reader(ckpts)
    for path in ckpts.files():
        data = path.read_bytes()
        shorter = [0, *chance.some(f"cuts of {path.name}", range(1, len(data)), 0.4)]
        for length in reversed(shorter):
            os.truncate(path, length)
            reader.refuses(path)
            if length % (7 * STRIDE) == 0:
                reader.goes_back()
        path.write_bytes(data)
    reader.takes_the_newest()


@pytest.mark.parametrize(
    "more", [b"\0", b"\n", bytes(SECTOR), bytes(PAGE), None], ids=["0", "n", "512", "4096", "twice"]
)
def test_every_appendix_is_found(ckpts: Ckpts, more: bytes | None) -> None:
    """A byte, a block of zeros, the same file once more."""
    reader = Reader(ckpts)
    for path in ckpts.files():
        data = path.read_bytes()
        with rewritten(path, data + (data if more is None else more)):
            reader.refuses(path)
            reader.goes_back()


@pytest.mark.parametrize("size", [SECTOR, PAGE])
@pytest.mark.parametrize("fill", [0x00, 0xFF])
def test_every_sector_and_page_that_reads_as_nothing_is_found(ckpts: Ckpts, size: int, fill: int) -> None:
    """As after a power cut, or from a device that gave up a block. Where there was nothing else, nothing is wrong."""
    reader = Reader(ckpts)
    changed = same = 0
    for path in ckpts.files():
        data = path.read_bytes()
        for begin in range(0, len(data), size):
            lost = bytes([fill]) * len(data[begin : begin + size])
            if lost == data[begin : begin + size]:
                same += 1
                continue
            changed += 1
            with rewritten(path, data[:begin] + lost + data[begin + size :]):
                reader.refuses(path)
                if changed % 7 == 1:
                    reader.goes_back()
    assert changed > 5 * ckpts.size
    assert same < changed


def test_every_page_in_the_place_of_another_one_is_found(ckpts: Ckpts) -> None:
    """True bytes at a wrong place: within a file, and from one file to another."""
    reader = Reader(ckpts)
    pages = [
        (path, begin, path.read_bytes()[begin : begin + PAGE])
        for path in ckpts.files()
        for begin in range(0, path.stat().st_size, PAGE)
    ]
    tried = 0
    for (path, begin, true), (_, _, other) in itertools.permutations(pages, 2):
        data = path.read_bytes()
        moved = other[: len(true)].ljust(len(true), b"\0")
        if moved == true:
            continue
        with rewritten(path, data[:begin] + moved + data[begin + len(true) :]):
            reader.refuses(path)
            tried += 1
            if tried % 13 == 0:
                reader.goes_back()
    assert tried > 30


# Whole files.


def test_parts_exchanged_with_one_another_are_found(two: Ckpts) -> None:
    """Each with each, also those of the same size."""
    reader = Reader(two)
    files = two.parts()
    assert len({path.stat().st_size for path in files}) < len(files), "some are of the same size"
    for one_part, other in itertools.combinations(files, 2):
        first, second = one_part.read_bytes(), other.read_bytes()
        with rewritten(one_part, second), rewritten(other, first):
            reader.refuses(one_part)
            reader.refuses(other)
            reader.goes_back()
            reader.goes_back()
        for target, source in ((one_part, second), (other, first)):
            with rewritten(target, source):
                reader.refuses(target)
                reader.goes_back()


def test_a_file_that_is_missing_is_named(ckpts: Ckpts) -> None:
    """A part alone. Without a manifest there is no ckpt, and nothing to name."""
    reader = Reader(ckpts)
    for path in ckpts.parts():
        with aside(path):
            assert f"{path.name} is missing" in reader.refuses(path)
            reader.goes_back()
    with aside(ckpts.path(ckpts.newest, MANIFEST)):
        life = ckpts.life()
        assert life.load() == ckpts.older
        assert (life.bad, life.state) == (set(), ckpts.states[ckpts.older, 0])


def test_a_file_of_the_older_ckpt_in_the_newest_is_found(ckpts: Ckpts) -> None:
    """The same names and the same sizes, whole and committed, but not of this ckpt: the manifest, too."""
    reader = Reader(ckpts)
    for path in ckpts.files():
        old = ckpts.path(ckpts.older, path.name)
        if path.name != MANIFEST:
            assert old.stat().st_size == path.stat().st_size
        with rewritten(path, old.read_bytes()):
            assert (ckpts.older in reader.refuses(path)) == (path.name == MANIFEST)
            reader.goes_back()
    old_files = {path: ckpts.path(ckpts.older, path.name).read_bytes() for path in ckpts.files()}
    with aside(ckpts.path(ckpts.newest)):
        ckpts.path(ckpts.newest).mkdir()
        for path, data in old_files.items():
            path.write_bytes(data)
        reader.refuses(ckpts.path(ckpts.newest, MANIFEST))
        reader.goes_back()


def test_the_older_ckpt_s_manifest_that_claims_to_be_the_newest_finds_no_parts_of_its_own(one: Ckpts) -> None:
    """Names, sizes and its own digest are right; the parts' digests are not."""
    reader = Reader(one)
    step = Manifest.from_bytes(one.path(one.newest, MANIFEST).read_bytes()).step
    forged = resealed(one.path(one.older, MANIFEST), lambda payload: payload.update(generation=2, step=step))
    with rewritten(one.path(one.newest, MANIFEST), forged):
        (part,) = one.parts()
        life = one.life()
        assert life.load() == one.older
        assert life.bad == {one.newest}
        assert life.state == one.states[one.older, 0]
        with pytest.raises(CkptCorrupt, match=part.name):
            restore.load(one.storage, one.newest, life._registry)
    reader.takes_the_newest()


def test_a_part_of_another_job_is_found(one: Ckpts, tmp_path: Path) -> None:
    """Two jobs of one script on one root have the same names and sizes."""
    stranger = two_ckpts(tmp_path, seed=40, job="other")
    reader = Reader(one)
    assert stranger.newest == one.newest
    for path, other in zip(one.parts(), stranger.parts(), strict=True):
        assert path.stat().st_size == other.stat().st_size
        with rewritten(path, other.read_bytes()):
            reader.refuses(path)
            reader.goes_back()
    theirs = one.path(one.newest, MANIFEST), stranger.path(stranger.newest, MANIFEST).read_bytes()
    with rewritten(*theirs):
        reader.goes_back()


def test_without_a_whole_ckpt_the_start_ends_with_an_error_that_names_them_all(ckpts: Ckpts) -> None:
    """Both damaged: no start at step 0, both are named with what is wrong, and both stay where they are."""
    newest, older = ckpts.parts()[0], ckpts.path(ckpts.older, MANIFEST)
    with rewritten(newest, bytes(newest.stat().st_size)), rewritten(older, b""):
        before = on_disk(ckpts.storage.root)
        life = ckpts.life()
        with pytest.raises(NoUsableCkpt) as refusal:
            life.load()
        assert newest.name in str(refusal.value)
        assert f"{ckpts.older}: the manifest" in str(refusal.value)
        assert life.bad == {ckpts.newest, ckpts.older}
        assert on_disk(ckpts.storage.root) == before


def test_a_life_whose_ckpts_were_deleted_by_a_later_one_says_so(one: Ckpts) -> None:
    """It had looked for ckpts, and was frozen until the pod that replaced it had saved and deleted them."""
    candidates = one.life().candidates()
    later = generations.claim(one.storage, fresh=False, about={})
    refusal = rf"a later life of the job \(generation {later.number}\) has begun"
    with (
        aside(one.path(one.newest)),
        aside(one.path(one.older)),
        pytest.raises(NoUsableCkpt, match=refusal),
    ):
        candidates.load_newest()
    one.path("generations", f"{later.number:06d}.json").unlink()


def test_a_ckpt_that_is_deleted_while_it_is_read_leads_back(one: Ckpts, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a later life, between its last byte and the moment at which it counts as loaded."""
    read = restore.read

    def read_and_lose(storage: Any, found: Manifest, homes: Any) -> Any:
        tensors = read(storage, found, homes)
        if found.ckpt == one.newest:
            one.path(one.newest).rename(one.path(".away"))
        return tensors

    monkeypatch.setattr(restore, "read", read_and_lose)
    life = one.life()
    try:
        assert life.load() == one.older
    finally:
        one.path(".away").rename(one.path(one.newest))
    assert life.bad == {one.newest}
    assert life.state == one.states[one.older, 0]


# Things that are no files.


def put_socket(path: Path) -> None:
    # Their names must be short, so it is made somewhere near and moved.
    there = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{there}/s")
        (path.parent / "s").rename(path)
    finally:
        os.close(there)


def put_device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("LOUD: making a device takes root")


STRANGE: dict[str, Callable[[Path], Any]] = {
    "an empty file": lambda path: path.write_bytes(b""),
    "a directory": lambda path: path.mkdir(),
    "a directory with the file in it": lambda path: shutil.copytree(path.parent, path, ignore=lambda *_: {path.name}),
    "a pipe": os.mkfifo,
    "a socket": put_socket,
    "a device": put_device,
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a directory": lambda path: path.symlink_to("/etc"),
    "a link to an endless file": lambda path: path.symlink_to("/dev/zero"),
    "a link to the right bytes": lambda path: path.symlink_to(f"{path.name}.away"),
}


@pytest.mark.parametrize("strange", STRANGE)
def test_a_file_that_became_something_else_is_found_and_nobody_hangs(ckpts: Ckpts, strange: str) -> None:
    """Whatever lies in the place of a manifest or a part: named, the older ckpt comes back, and it all stays there.

    Also a link to the right bytes: what it leads to may go, or change, without anybody looking at this job.
    """
    reader = Reader(ckpts)
    for path in ckpts.files():
        with aside(path):
            STRANGE[strange](path)
            before = on_disk(ckpts.path(ckpts.newest))
            reader.goes_back()
            with within(10):
                reader.refuses(path)
            assert on_disk(ckpts.path(ckpts.newest)) == before


def test_hard_links_are_files_like_others(ckpts: Ckpts, tmp_path: Path) -> None:
    """As a backup by `cp -al` makes them, of the newest ckpt and in its place."""
    reader = Reader(ckpts)
    with aside(ckpts.path(ckpts.newest)) as away:
        ckpts.path(ckpts.newest).mkdir()
        for path in away.iterdir():
            os.link(path, ckpts.path(ckpts.newest, path.name))
        reader.takes_the_newest()


@pytest.mark.parametrize(
    "strange", ["nothing", "an empty directory", *(name for name in STRANGE if "with" not in name)]
)
def test_a_ckpt_that_became_something_else_leads_back(ckpts: Ckpts, strange: str) -> None:
    """In the place of the whole directory: the one before it comes back, and it all stays there."""
    path = ckpts.path(ckpts.newest)
    make = {"nothing": lambda path: None, "an empty directory": lambda path: path.mkdir()}.get(strange)
    with aside(path):
        (make or STRANGE[strange])(path)
        before = on_disk(ckpts.storage.root)
        life = ckpts.life()
        with within(30):
            assert life.load() == ckpts.older
        assert life.state == ckpts.states[ckpts.older, 0]
        assert life.bad <= {ckpts.newest}
        assert on_disk(ckpts.storage.root) == before


@pytest.mark.parametrize("strange", STRANGE)
@pytest.mark.parametrize("name", ["000001.json", "000002.json", "000002.leaving"])
def test_a_record_or_mark_that_became_something_else_stops_no_life(one: Ckpts, name: str, strange: str) -> None:
    """The next life has its number, finds both ckpts, and waits for nobody for ever."""
    path = one.path("generations", name)
    is_new = not path.exists()
    if is_new:
        path.write_bytes(b'{"grace_s": 5}')
    with aside(path):
        if "with" in strange:
            path.mkdir()
            (path / name).write_bytes(b"{}")
        else:
            STRANGE[strange](path)
        times = itertools.count(0.0, 10.0)
        with within(20):
            claimed = generations.claim(one.storage, fresh=False, about={})
            one.path("generations", f"{claimed.number:06d}.json").unlink()
            leaving_mark.wait_for_leaving(
                one.storage, claimed.lineage, clock=lambda: next(times), sleep=lambda seconds: None
            )
        assert claimed.lineage == (3, 2, 1)
        assert catalog.ckpts(one.storage, claimed.lineage) == [one.newest, one.older]
    if is_new:
        path.unlink()


def test_a_root_and_a_job_behind_a_link_work(one: Ckpts, tmp_path: Path) -> None:
    """People link their root to a volume. It is they who say where the job lies; what lies in it is ours."""
    root = tmp_path / "linked"
    root.symlink_to(one.storage.root)
    linked = replace(one, storage=type(one.storage)(root, one.storage.directory.name))
    assert linked.life().load() == one.newest
