"""How fast a part goes up to S3 and comes back, what that costs in CPU and memory, beside other ways to do it.

    python benchmarks/s3.py [--mb 1000] [--rounds 3] [--against server|sink|both] [--only "ROW;..."] [--memory]

All move the same bytes between the memory of a training and a server on loopback. Up: tensors, or one buffer of the
same size, are in memory. Down: they are there too, and the bytes have to get into them; every row's bytes are compared
afterwards. Ours writes and verifies digests of every byte, the others do not. What takes no tensors gets one buffer,
which is less work than a state is.

- `server`: SeaweedFS, a real one. It shares the machine, so it sets the pace; look at the CPU.
- `sink`: `s3_sink.py`, which moves as few bytes as possible. The pace is that of the client.

Each row runs in a fresh process, in turn with all others, in another order each round, several rounds; medians.
Imports, the client and one small transfer come first and do not count. CPU is that of this process (user and system).
Memory is the peak beyond what the process had when the transfer began, with the state.

Every library is used at its fastest, as far as its public interface goes (`ROWS`). "raw HTTP" is the limit:
`http.client` on a few threads, parts and ranges straight from and to memory. `--memory` shows ours alone, for growing
states.

Libraries that are not part of the development environment get one of their own, `.venv-peers`.

All that it starts ends with it. If it is killed (SIGKILL), the directories `s3-bench-*` stay in /dev/shm and /tmp.

The price: for each GB of the state, 2 GB of /dev/shm and 3 GB for a row's process, and on the disk of TMPDIR 1 GB for
each row and round against the server. Loopback has no latency: far from the server, more requests at the same time pay
off than here.
"""

from __future__ import annotations

import argparse
import gc
import http.client
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s3_sink import end_with_parent

if TYPE_CHECKING:
    import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BUCKET = "bench"
REGION = "us-east-1"
WORKER_S = 900.0
"""Seconds for one row, at most."""
INSTALL_S = 300.0
"""Seconds for pip, at most."""
SERVER_PER_RUN = 1.1
"""Bytes on the server's disk for each byte that is sent, about."""

BLOCK = 64 << 20
"""Bytes of random data, which are repeated: no server finds that out."""
TENSOR = 4 << 20
CKPT, PART = "000001-000000000001", "part-00000-of-00001.safetensors"
KEPT, TORCH_KEY = "kept", "kept/torch.pt"
"""Where the objects lie that are read."""
MEMORY_MB = (250, 1000, 2000)

Action = Callable[[], object]


# What a row works with, in its own process.


@dataclass
class Work:
    """One transfer: how much, where the files are that were made for all rows, and the server."""

    megabytes: int
    directory: Path
    endpoint: str
    is_signed: bool
    token: str
    """Makes this run's keys its own."""

    @property
    def key(self) -> str:
        """Of the object that goes up."""
        return f"up/{self.token}/object"

    @property
    def part_key(self) -> str:
        """Of the object that comes down; the part of ours, for all who want bytes alone."""
        return f"{KEPT}/job/{CKPT}/{PART}"

    @property
    def part_path(self) -> Path:
        return self.directory / PART

    @property
    def size(self) -> int:
        return self.part_path.stat().st_size

    @cached_property
    def _block(self) -> torch.Tensor:
        import numpy
        import torch

        return torch.from_numpy(numpy.frombuffer(numpy.random.default_rng(0).bytes(BLOCK), dtype=numpy.int32).copy())

    def state(self, *, is_empty: bool = False) -> dict[str, torch.Tensor]:
        """Tensors of 4 MiB; empty ones are in memory already, too."""
        import torch

        count = max(1, self.megabytes * 1_000_000 // TENSOR)
        found = {f"layer{i}.weight": torch.zeros(TENSOR // 4, dtype=torch.int32).fill_(7) for i in range(count)}
        if not is_empty:
            for i, tensor in enumerate(found.values()):
                tensor.copy_(self._piece(i))
        return found

    def _piece(self, i: int) -> torch.Tensor:
        return self._block[i % (BLOCK // TENSOR) * TENSOR // 4 :][: TENSOR // 4]

    def check(self, state: Mapping[str, torch.Tensor]) -> None:
        import torch

        wrong = [name for i, (name, tensor) in enumerate(state.items()) if not torch.equal(tensor, self._piece(i))]
        if wrong or not state:
            raise AssertionError(f"these tensors have other bytes than were written: {wrong[:3]}")

    def buffer(self, *, is_empty: bool = False) -> bytearray:
        """As large as the part, with its bytes."""
        data = bytearray(b"\7") * self.size
        if not is_empty:
            with self.part_path.open("rb") as file:
                file.readinto(data)
        return data

    def check_buffer(self, data: bytearray) -> None:
        with self.part_path.open("rb") as file:
            at = 0
            while piece := file.read(BLOCK):
                if data[at : at + len(piece)] != piece:
                    raise AssertionError(f"the bytes from {at} on are not those that were written")
                at += len(piece)
        if at != len(data):
            raise AssertionError(f"there are {len(data)} bytes, not {at}")


@dataclass
class Ready:
    """A transfer that is about to begin."""

    action: Action
    check: Action
    """After it, and not part of it: whether it did what it says."""


def ranges_of(size: int, piece: int) -> list[tuple[int, int]]:
    return [(at, min(size, at + piece)) for at in range(0, size, piece)]


def at_once(threads: int, action: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(action, items))


def sized(work: Work, key: str, *, least: int) -> Action:
    """Whether an object is there and has at least so many bytes."""

    def check() -> None:
        found = Raw(work).size(key)
        if found < least:
            raise AssertionError(f"{key} has {found} bytes, expected {least}")

    return check


# Ours.


def _ours(work: Work, kind: str, prefix: str) -> Any:
    import torch

    from migrator.ckpt.manifest import parts_from
    from migrator.ckpt.part_writer import write_part
    from migrator.ckpt.tensor_file import read_part
    from migrator.storage.object_storage import ObjectStorage
    from migrator.storage.obstore_client import ObstoreClient
    from migrator.storage.s3_client import S3Client

    client = ObstoreClient(BUCKET) if kind == "obstore" else S3Client(BUCKET)
    small = ObjectStorage(client, f"warm/{work.token}", "job")
    home = {"small": torch.zeros(1 << 18)}
    record = write_part(small, f"{CKPT}/{PART}", home)
    read_part(small, CKPT, parts_from([record.to_json()])[0], home)
    return ObjectStorage(client, prefix, "job")


def ours_up(work: Work, kind: str) -> Ready:
    from migrator.ckpt.part_writer import write_part

    storage, state = _ours(work, kind, f"up/{work.token}"), work.state()
    check = sized(work, f"up/{work.token}/job/{CKPT}/{PART}", least=work.size)
    # As a pod writes that must leave: the training stands still until the ckpt is there.
    return Ready(lambda: write_part(storage, f"{CKPT}/{PART}", state, hold=lambda: True), check)


def ours_down(work: Work, kind: str) -> Ready:
    from migrator.ckpt.manifest import parts_from
    from migrator.ckpt.tensor_file import read_part

    storage, homes = _ours(work, kind, KEPT), work.state(is_empty=True)
    (record,) = parts_from([json.loads((work.directory / "record.json").read_text())])
    return Ready(lambda: read_part(storage, CKPT, record, homes), lambda: work.check(homes))


# s3fs: `pipe_file` has a bytes object sent in parts of `chunksize`, `max_concurrency` of them together, then the next
# ones. `put` does the same with a file. Over HTTP, botocore computes a SHA-256 of every body unless told not to.


S3FS_CHUNK, S3FS_AT_ONCE = 16 << 20, 8
S3FS_RANGE, S3FS_READERS = 8 << 20, 8


def _s3fs(work: Work) -> Any:
    import s3fs

    found = s3fs.S3FileSystem(
        endpoint_url=work.endpoint,
        config_kwargs={
            "max_pool_connections": 64,
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "s3": {"payload_signing_enabled": False},
        },
        use_listings_cache=False,
        skip_instance_cache=True,
    )
    found.pipe_file(f"{BUCKET}/warm/{work.token}/small", bytes(1 << 20))
    found.cat_file(f"{BUCKET}/warm/{work.token}/small", start=0, end=1000)
    return found


def s3fs_pipe(work: Work) -> Ready:
    fs, data = _s3fs(work), bytes(work.buffer())
    path = f"{BUCKET}/{work.key}"
    return Ready(
        lambda: fs.pipe_file(path, data, chunksize=S3FS_CHUNK, max_concurrency=S3FS_AT_ONCE),
        sized(work, work.key, least=work.size),
    )


def s3fs_put(work: Work) -> Ready:
    fs, path = _s3fs(work), str(work.part_path)
    return Ready(
        lambda: fs.put_file(path, f"{BUCKET}/{work.key}", chunksize=S3FS_CHUNK, max_concurrency=S3FS_AT_ONCE),
        sized(work, work.key, least=work.size),
    )


def s3fs_ranges(work: Work) -> Ready:
    fs, data = _s3fs(work), work.buffer(is_empty=True)
    view, path = memoryview(data), f"{BUCKET}/{work.part_key}"

    def one(span: tuple[int, int]) -> None:
        view[span[0] : span[1]] = fs.cat_file(path, start=span[0], end=span[1])

    return Ready(
        lambda: at_once(S3FS_READERS, one, ranges_of(len(data), S3FS_RANGE)),
        lambda: work.check_buffer(data),
    )


def s3fs_cat(work: Work) -> Ready:
    fs, data = _s3fs(work), work.buffer(is_empty=True)
    path = f"{BUCKET}/{work.part_key}"

    def action() -> None:
        data[:] = fs.cat_file(path, chunksize=S3FS_RANGE, max_concurrency=S3FS_READERS)

    return Ready(action, lambda: work.check_buffer(data))


def torch_up(work: Work) -> Ready:
    import torch

    fs, state = _s3fs(work), work.state()

    def action() -> None:
        with fs.open(f"{BUCKET}/{work.key}", "wb", block_size=S3FS_CHUNK) as file:
            torch.save(state, file)

    return Ready(action, sized(work, work.key, least=sum(tensor.nbytes for tensor in state.values())))


def torch_down(work: Work) -> Ready:
    import torch

    fs, homes = _s3fs(work), work.state(is_empty=True)

    def action() -> None:
        with fs.open(f"{BUCKET}/{TORCH_KEY}", "rb", block_size=S3FS_CHUNK, cache_type="readahead") as file:
            take(torch.load(file, weights_only=True), homes)

    return Ready(action, lambda: work.check(homes))


def take(found: Mapping[str, torch.Tensor], homes: Mapping[str, torch.Tensor]) -> None:
    """As `load_state_dict` does."""
    for name, home in homes.items():
        home.copy_(found[name])


# boto3: `upload_fileobj` and `download_fileobj` with a file that is memory, and a `TransferConfig`.


class Memory(io.RawIOBase):
    """A file over a buffer, that copies nothing but what it has to."""

    def __init__(self, data: bytearray) -> None:
        self._view = memoryview(data)
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._view))[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        end = len(self._view) if size is None or size < 0 else self._at + size
        found = bytes(self._view[self._at : end])
        self._at += len(found)
        return found

    def write(self, data: Any) -> int:
        self._view[self._at : self._at + len(data)] = data
        self._at += len(data)
        return len(data)


BOTO_CHUNK, BOTO_THREADS, BOTO_IO = 16 << 20, 4, 4 << 20


def _boto(work: Work) -> tuple[Any, Any]:
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=work.endpoint,
        config=Config(
            max_pool_connections=64,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"payload_signing_enabled": False, "addressing_style": "path"},
        ),
    )
    transfer = TransferConfig(
        multipart_threshold=BOTO_CHUNK,
        multipart_chunksize=BOTO_CHUNK,
        max_concurrency=BOTO_THREADS,
        io_chunksize=BOTO_IO,
        max_io_queue=64,
        preferred_transfer_client="classic",
    )
    small = f"warm/{work.token}/small"
    client.upload_fileobj(Memory(bytearray(1 << 20)), BUCKET, small, Config=transfer)
    client.download_fileobj(BUCKET, small, Memory(bytearray(1 << 20)), Config=transfer)
    return client, transfer


def boto_up(work: Work) -> Ready:
    (client, transfer), data = _boto(work), work.buffer()
    return Ready(
        lambda: client.upload_fileobj(Memory(data), BUCKET, work.key, Config=transfer),
        sized(work, work.key, least=work.size),
    )


def boto_down(work: Work) -> Ready:
    (client, transfer), data = _boto(work), work.buffer(is_empty=True)
    return Ready(
        lambda: client.download_fileobj(BUCKET, work.part_key, Memory(data), Config=transfer),
        lambda: work.check_buffer(data),
    )


# s3torchconnector: the AWS Common Runtime in Rust and C; `S3Checkpoint` is what its documentation has for ckpts.


CRT_PART, CRT_GBPS = 8 << 20, 100.0
CRT_RANGE, CRT_READERS = 32 << 20, 4


def _connector_options(work: Work) -> dict[str, Any]:
    from s3torchconnector import S3ClientConfig

    config = S3ClientConfig(throughput_target_gbps=CRT_GBPS, part_size=CRT_PART, force_path_style=True)
    return {"region": REGION, "endpoint": work.endpoint, "s3client_config": config}


def _connector(work: Work) -> Any:
    from s3torchconnector import S3Checkpoint

    found = S3Checkpoint(**_connector_options(work))
    small = f"s3://{BUCKET}/warm/{work.token}/small"
    with found.writer(small) as writer:
        writer.write(bytes(1 << 20))
    with found.reader(small) as reader:
        reader.read()
    return found


def connector_up(work: Work) -> Ready:
    import torch

    ckpt, state = _connector(work), work.state()

    def action() -> None:
        with ckpt.writer(f"s3://{BUCKET}/{work.key}") as writer:
            torch.save(state, writer)

    return Ready(action, sized(work, work.key, least=sum(tensor.nbytes for tensor in state.values())))


def connector_down(work: Work) -> Ready:
    import torch

    ckpt, homes = _connector(work), work.state(is_empty=True)

    def action() -> None:
        with ckpt.reader(f"s3://{BUCKET}/{TORCH_KEY}") as reader:
            take(torch.load(reader, weights_only=True), homes)

    return Ready(action, lambda: work.check(homes))


def connector_bytes_up(work: Work) -> Ready:
    ckpt, data = _connector(work), work.buffer()

    def action() -> None:
        with ckpt.writer(f"s3://{BUCKET}/{work.key}") as writer:
            for start, end in ranges_of(len(data), CRT_PART):
                writer.write(memoryview(data)[start:end])

    return Ready(action, sized(work, work.key, least=work.size))


def connector_bytes_down(work: Work) -> Ready:
    from s3torchconnector import S3MapDataset, S3ReaderConstructor

    # The reader of `S3Checkpoint` keeps all that it has read. Only those of datasets can be another one.
    objects = S3MapDataset.from_objects(
        [f"s3://{BUCKET}/warm/{work.token}/small", f"s3://{BUCKET}/{work.part_key}"],
        reader_constructor=S3ReaderConstructor.range_based(buffer_size=0),
        transform=lambda reader: reader,
        **_connector_options(work),
    )
    _connector(work)
    objects[0].readinto(bytearray(1000))
    data = work.buffer(is_empty=True)

    def one(span: tuple[int, int]) -> None:
        reader, (at, end) = objects[1], span
        reader.seek(at)
        while some := reader.readinto(memoryview(data)[at:end]):
            at += some

    return Ready(
        lambda: at_once(CRT_READERS, one, ranges_of(len(data), CRT_RANGE)),
        lambda: work.check_buffer(data),
    )


# The limit.


RAW_PART, RAW_THREADS = 32 << 20, 4


class Raw:
    """Requests without a library: bodies are sent from where they lie, and received where they belong."""

    def __init__(self, work: Work) -> None:
        self._host = urllib.parse.urlsplit(work.endpoint).netloc
        self._is_signed = work.is_signed
        self._own = threading.local()

    def upload(self, key: str, data: memoryview) -> None:
        text = self._asked("POST", key, "uploads=")[1]
        name = text.partition(b"<UploadId>")[2].partition(b"</UploadId>")[0].decode()
        query = f"uploadId={urllib.parse.quote(name, safe='')}"

        def one(item: tuple[int, tuple[int, int]]) -> str:
            number, (start, end) = item
            return self._asked("PUT", key, f"partNumber={number}&{query}", data[start:end])[0]["etag"]

        piece = min(RAW_PART, max(5 << 20, len(data) // RAW_THREADS))
        etags = at_once(RAW_THREADS, one, list(enumerate(ranges_of(len(data), piece), 1)))
        parts = "".join(
            f"<Part><PartNumber>{i}</PartNumber><ETag>{etag}</ETag></Part>" for i, etag in enumerate(etags, 1)
        )
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        self._asked("POST", key, query, memoryview(body))

    def download(self, key: str, data: memoryview) -> None:
        def one(span: tuple[int, int]) -> None:
            self._asked("GET", key, into=data[span[0] : span[1]], headers={"Range": f"bytes={span[0]}-{span[1] - 1}"})

        piece = min(RAW_PART, max(1 << 20, len(data) // RAW_THREADS))
        at_once(RAW_THREADS, one, ranges_of(len(data), piece))

    def size(self, key: str) -> int:
        return int(self._asked("HEAD", key)[0]["content-length"])

    def delete(self, key: str) -> None:
        self._asked("DELETE", key)

    def _asked(
        self,
        method: str,
        key: str,
        query: str = "",
        body: memoryview | None = None,
        *,
        into: memoryview | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[dict[str, str], bytes]:
        connection = getattr(self._own, "connection", None)
        if connection is None:
            connection = self._own.connection = http.client.HTTPConnection(self._host, timeout=60)
        target = f"/{BUCKET}/{key}" + (f"?{query}" if query else "")
        sent = {**(headers or {}), **({"Content-Length": "0"} if body is None and method in ("PUT", "POST") else {})}
        connection.request(method, target, body, self._signed(method, target, sent) if self._is_signed else sent)
        answer = connection.getresponse()
        if answer.status >= 300:
            raise ConnectionError(f"{method} {target}: {answer.status} {answer.read()[:300]!r}")
        got = 0
        while into is not None and got < len(into) and (some := answer.readinto(into[got:])):
            got += some
        if into is not None and got != len(into):
            raise ConnectionError(f"{method} {target}: {got} bytes came, not {len(into)}")
        return {name.lower(): value for name, value in answer.getheaders()}, answer.read()

    def _signed(self, method: str, target: str, headers: Mapping[str, str]) -> dict[str, str]:
        import botocore.auth
        import botocore.awsrequest
        import botocore.credentials

        class Unsigned(botocore.auth.S3SigV4Auth):  # type: ignore[misc]
            """Signs the head alone."""

            def payload(self, request: Any) -> str:
                return "UNSIGNED-PAYLOAD"

        known = botocore.credentials.Credentials(os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
        request = botocore.awsrequest.AWSRequest(method, f"http://{self._host}{target}", headers=dict(headers))
        Unsigned(known, "s3", REGION).add_auth(request)
        return dict(request.headers.items())


def raw_up(work: Work) -> Ready:
    raw, data = Raw(work), work.buffer()
    raw.upload(f"warm/{work.token}/small", memoryview(bytes(1 << 20)))
    return Ready(lambda: raw.upload(work.key, memoryview(data)), sized(work, work.key, least=work.size))


def raw_down(work: Work) -> Ready:
    raw, data = Raw(work), work.buffer(is_empty=True)
    raw.size(work.part_key)
    return Ready(lambda: raw.download(work.part_key, memoryview(data)), lambda: work.check_buffer(data))


@dataclass(frozen=True)
class Row:
    """One way to do it."""

    up: Callable[[Work], Ready] | None
    down: Callable[[Work], Ready] | None
    note: str
    package: str | None = None
    """What has to be installed for it, in an environment of its own."""


OURS = "ours, obstore"
ROWS = {
    OURS: Row(lambda w: ours_up(w, "obstore"), lambda w: ours_down(w, "obstore"), "`write_part`, `read_part`"),
    "ours, s3fs": Row(lambda w: ours_up(w, "s3fs"), lambda w: ours_down(w, "s3fs"), "the same without obstore"),
    "s3fs": Row(
        s3fs_pipe,
        s3fs_ranges,
        f"bodies not signed; `pipe_file` of bytes ({S3FS_AT_ONCE} x {S3FS_CHUNK >> 20} MiB at once), `cat_file` of "
        f"ranges ({S3FS_RANGE >> 20} MiB) on {S3FS_READERS} threads",
    ),
    "s3fs, other": Row(s3fs_put, s3fs_cat, "`put_file` of a file in /dev/shm; one `cat_file(max_concurrency=)`"),
    "torch.save, s3fs": Row(torch_up, torch_down, "`fs.open` and `torch.save`, `torch.load`"),
    "boto3": Row(
        boto_up,
        boto_down,
        f"bodies not signed; `upload_fileobj`, `download_fileobj` ({BOTO_THREADS} x {BOTO_CHUNK >> 20} MiB)",
        "boto3",
    ),
    "s3torchconnector": Row(
        connector_bytes_up,
        connector_bytes_down,
        f"bytes alone: the writer of `S3Checkpoint` ({CRT_PART >> 20} MiB a part), range-based readers of "
        f"`S3MapDataset` ({CRT_RANGE >> 20} MiB) on {CRT_READERS} threads",
        "s3torchconnector",
    ),
    "torch.save, s3torchconnector": Row(
        connector_up,
        connector_down,
        "`torch.save` to its writer, `torch.load` of its reader, as documented",
        "s3torchconnector",
    ),
    "raw HTTP": Row(raw_up, raw_down, f"the limit: `http.client`, {RAW_THREADS} x {RAW_PART >> 20} MiB at once"),
}


# One row in its process.


def fill(work: Work, is_server: bool) -> None:
    """Make what is read by all rows: a part of ours, and a file of `torch.save`."""
    import torch

    from migrator.ckpt.part_writer import write_part
    from migrator.storage.posix import PosixStorage

    place = work.directory / "posix"
    record = write_part(PosixStorage(place, "job"), f"{CKPT}/{PART}", work.state())
    next(place.rglob(PART)).rename(work.part_path)
    shutil.rmtree(place)
    (work.directory / "record.json").write_text(json.dumps(record.to_json()))
    torch.save(work.state(), work.directory / "torch.pt")
    if is_server:
        raw = Raw(work)
        for key, path in ((work.part_key, work.part_path), (TORCH_KEY, work.directory / "torch.pt")):
            raw.upload(key, memoryview(path.read_bytes()))


def memory_kb() -> tuple[int, int]:
    """What this process has in memory, and the most it had."""
    text = Path("/proc/self/status").read_text()
    now, most = (re.search(rf"{name}:\s+(\d+) kB", text) for name in ("VmRSS", "VmHWM"))
    assert now is not None, text
    assert most is not None, text
    return int(now[1]), int(most[1])


def measured(ready: Ready) -> dict[str, float]:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before_kb, _ = memory_kb()
    used, start_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    ready.action()
    took_s, after = time.perf_counter() - start_s, resource.getrusage(resource.RUSAGE_SELF)
    extra_kb = memory_kb()[1] - before_kb
    ready.check()
    cpu_s = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    return {"s": took_s, "cpu_s": cpu_s, "extra_mb": extra_kb * 1024 / 1e6}


def work_on(job: Mapping[str, Any]) -> None:
    """The main function of a worker."""
    end_with_parent()
    work = Work(job["megabytes"], Path(job["directory"]), job["endpoint"], job["is_signed"], job["token"])
    if job["row"] is None:
        fill(work, is_server=job["is_signed"])
        print("{}")
        return
    made = getattr(ROWS[job["row"]], job["way"])
    print(json.dumps(measured(made(work)) | {"bytes": work.size}))
    sys.stdout.flush()
    os._exit(0)  # some libraries have threads that end slowly


# The parent of all.


@dataclass
class Setting:
    """A server that runs, and the files for its rows."""

    name: str
    endpoint: str
    directory: Path
    megabytes: int
    env: Mapping[str, str]
    pythons: Mapping[str, str]
    """The interpreter for each package that is not in the development environment."""
    count: int = 0

    def run(self, row: str | None, way: str = "") -> dict[str, Any]:
        """One row in a fresh process; `{"error": ...}` if it does not run."""
        self.count += 1
        job = {
            "row": row,
            "way": way,
            "megabytes": self.megabytes,
            "directory": str(self.directory),
            "endpoint": self.endpoint,
            "is_signed": self.name == "server",
            "token": str(self.count),
        }
        package = None if row is None else ROWS[row].package
        python = sys.executable if package is None else self.pythons[package]
        try:
            done = subprocess.run(
                [python, str(HERE / "s3.py"), "--job", json.dumps(job)],
                check=False,
                capture_output=True,
                text=True,
                timeout=WORKER_S,
                env={**os.environ, **self.env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )
        except subprocess.TimeoutExpired:
            return {"error": f"it took more than {WORKER_S:.0f} s"}
        lines = done.stdout.splitlines()
        if done.returncode or not lines:
            said = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
            return {"error": f"its process ended with {done.returncode}: {said:.300}"}
        found: dict[str, Any] = json.loads(lines[-1])
        return found


@contextmanager
def scratch(where: Path | None) -> Iterator[Path]:
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="s3-bench-", dir=where or (shm if shm.is_dir() else None)) as directory:
        yield Path(directory)


@contextmanager
def against(name: str, megabytes: int, pythons: Mapping[str, str], place: Path | None) -> Iterator[Setting]:
    """The sink or the server, with all that is read from it."""
    with scratch(place) as directory:
        starts = _sink if name == "sink" else _server
        with starts(directory) as (endpoint, env):
            setting = Setting(name, endpoint, directory, megabytes, env, pythons)
            filled = setting.run(None)
            if "error" in filled:
                sys.exit(f"the objects to be read could not be made: {filled['error']}")
            yield setting


@contextmanager
def _sink(directory: Path) -> Iterator[tuple[str, dict[str, str]]]:
    process = subprocess.Popen(
        [sys.executable, str(HERE / "s3_sink.py"), "--objects", str(directory)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()  # it writes this or ends
        if not port:
            sys.exit("the sink did not start")
        endpoint = f"http://127.0.0.1:{port}"
        env = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_ENDPOINT_URL": endpoint}
        yield endpoint, {**env, "AWS_REGION": REGION, "AWS_DEFAULT_REGION": REGION}
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def _server(directory: Path) -> Iterator[tuple[str, dict[str, str]]]:
    del directory  # its data goes to a disk: it is much
    from migrator.testing.s3_server import S3Server, why_not

    if why_not():
        sys.exit(why_not())
    with tempfile.TemporaryDirectory(prefix="s3-bench-") as data, S3Server(Path(data)) as server:
        server.make_bucket(BUCKET)
        yield server.endpoint, server.env()


def environments(packages: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """The interpreter for each package, and why there is none for some."""
    found, lacks = {}, {}
    place = ROOT / ".venv-peers"
    python = place / "bin" / "python"
    for package in packages:
        if _has(sys.executable, package):
            found[package] = sys.executable
            continue
        try:
            if not python.exists():
                subprocess.run([sys.executable, "-m", "venv", str(place)], check=True, capture_output=True)
                (place / ".gitignore").write_text("*\n")
            # What this environment has is there too and is not installed again, so that all have the same botocore.
            version = f"python{sys.version_info.major}.{sys.version_info.minor}"
            shared = place / "lib" / version / "site-packages" / "development.pth"
            shared.write_text(sysconfig.get_path("purelib") + "\n")
            if not _has(str(python), package):
                # One at a time: for boto3 and s3fs together pip goes back to a very old s3fs.
                install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
                subprocess.run(
                    [*install, "-c", str(ROOT / "constraints.txt"), package],
                    check=True,
                    capture_output=True,
                    timeout=INSTALL_S,
                )
            found[package] = str(python)
        except (OSError, subprocess.SubprocessError) as error:
            lacks[package] = f"cannot be installed: {error}"
    return found, lacks


def _has(python: str, package: str) -> bool:
    ask = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    return subprocess.run([python, "-c", ask, package], check=False, capture_output=True).returncode == 0


def compare(setting: Setting, names: list[str], rounds: int, lacks: Mapping[str, str]) -> None:
    """All rows in turn, and a table for each direction."""
    results: dict[str, dict[str, list[dict[str, Any]]]] = {"up": {}, "down": {}}
    errors: dict[tuple[str, str], str] = {}
    for turn in range(rounds):
        for way, of_way in results.items():
            # Another order in each round: a row may pay for what the one before has left in the server's caches.
            for name in random.Random(turn).sample(names, len(names)):
                row = ROWS[name]
                os.sync()
                if getattr(row, way) is None or (way, name) in errors:
                    continue
                found = (
                    {"error": lacks[row.package]} if row.package and row.package in lacks else setting.run(name, way)
                )
                if "error" in found:
                    errors[way, name] = found["error"]
                else:
                    of_way.setdefault(name, []).append(found)
    for way, of_way in results.items():
        print(f"\n**{way}, {setting.name}**: {setting.megabytes} MB, median of {rounds}\n")
        print(
            "| | GB/s | of ours | CPU s per GB | of ours | MB beyond the state |\n| --- | --- | --- | --- | --- | --- |"
        )
        mine = medians(of_way[OURS]) if OURS in of_way else None
        for name in names:
            if (way, name) in errors:
                print(f"| {name} | does not run: {errors[way, name].replace('|', '/')} | | | | |")
            elif name in of_way:
                rate, cpu, extra = medians(of_way[name])
                times = [f"{rate / mine[0]:.2f}", f"{cpu / mine[1]:.2f}"] if mine else ["-", "-"]
                print(f"| {name} | {rate:.2f} | {times[0]} | {cpu:.2f} | {times[1]} | {extra:.0f} |")


def medians(runs: list[dict[str, Any]]) -> tuple[float, float, float]:
    """GB per second, CPU seconds per GB, MB beyond the state."""
    return (
        statistics.median(run["bytes"] / 1e9 / run["s"] for run in runs),
        statistics.median(run["cpu_s"] / (run["bytes"] / 1e9) for run in runs),
        statistics.median(run["extra_mb"] for run in runs),
    )


def memory(rounds: int, place: Path | None) -> None:
    """The peak beyond the state, of ours, for growing states."""
    names = [name for name in ROWS if name.startswith("ours")]
    print("\n**MB beyond the state** (the largest of all rounds)\n")
    print("| | " + " | ".join(f"{size / 1000:g} GB" for size in MEMORY_MB) + " |\n|" + " --- |" * (len(MEMORY_MB) + 1))
    cells: dict[tuple[str, str], list[str]] = {}
    for megabytes in MEMORY_MB:
        with against("sink", megabytes, {}, place) as setting:
            for name in names:
                for way in ("up", "down"):
                    runs = [setting.run(name, way) for _ in range(rounds)]
                    wrong = [run["error"] for run in runs if "error" in run]
                    cell = wrong[0] if wrong else f"{max(run['extra_mb'] for run in runs):.0f}"
                    cells.setdefault((name, way), []).append(cell)
    for (name, way), found in cells.items():
        print(f"| {name}, {way} | " + " | ".join(found) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1000, help="megabytes of the state (1000)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each row runs (3)")
    parser.add_argument("--against", choices=["server", "sink", "both"], default="both")
    parser.add_argument("--only", help="names of rows, separated by semicolons")
    parser.add_argument("--memory", action="store_true", help="the memory of ours alone, for growing states")
    parser.add_argument("--dir", type=Path, help="where the objects lie that are made beforehand (/dev/shm)")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        work_on(json.loads(arguments.job))
        return
    names = arguments.only.split(";") if arguments.only else list(ROWS)
    unknown = [name for name in names if name not in ROWS]
    if unknown or arguments.mb < 8 or arguments.rounds < 1:
        parser.error(f"unknown: {unknown}; there are {'; '.join(ROWS)}" if unknown else "at least 8 MB and 1 round")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what was begun is taken away
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f} before it began" + (": NOT IDLE" if load > 0.5 else ""))
    if arguments.memory:
        memory(arguments.rounds, arguments.dir)
        return
    pythons, lacks = environments(sorted({package for name in names if (package := ROWS[name].package)}))
    for name in ("server", "sink") if arguments.against == "both" else (arguments.against,):
        if name == "server":
            needed = (len(names) * arguments.rounds + 2) * arguments.mb * 1e6 * SERVER_PER_RUN
            free = shutil.disk_usage(tempfile.gettempdir()).free
            if free < needed:
                sys.exit(
                    f"{tempfile.gettempdir()} has {free / 1e9:.0f} GB; the server needs {needed / 1e9:.0f} (TMPDIR)"
                )
        with against(name, arguments.mb, pythons, arguments.dir) as setting:
            compare(setting, names, arguments.rounds, lacks)
    print("\n" + "\n".join(f"- {name}: {ROWS[name].note}" for name in names))


if __name__ == "__main__":
    main()
