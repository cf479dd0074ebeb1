"""An S3 server on loopback that keeps nothing: what it measures is the client.

    python benchmarks/s3_sink.py [--port P] [--objects DIRECTORY]

A real server on the same machine costs more CPU than the client that is measured. This one speaks just enough S3 (PUT,
GET with ranges, HEAD, DELETE, LIST, multipart uploads, `If-None-Match` and `If-Match`) and moves as few bytes as
possible:

- The kernel throws the body of a large PUT away (`recv_into` with `MSG_TRUNC`); it is never copied to this process.
- A GET is answered by `sendfile`: of the file in DIRECTORY that has the last part of the key's name, else of one buffer
  of zeros. Only objects of at most `SMALL` bytes are kept, so that they can be read back.

Each connection has a thread. Nearly all of their time is spent in the kernel, without the interpreter's lock.

The first line on stdout is the port. It ends with the process that started it.

The price: signatures are not checked, checksums are not compared, a listing has one page. And it shares the machine's
cores with the client: on two cores, a client that keeps both busy is slowed down by what the kernel does for the sink.
"""

from __future__ import annotations

import argparse
import ctypes
import email.utils
import hashlib
import mmap
import os
import re
import signal
import socket
import struct
import threading
import time
import urllib.parse
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

HOST = "127.0.0.1"
SMALL = 4 << 20
"""Bytes of a body at most that is kept."""
IDLE_S = 300
"""Seconds for which a connection may be silent."""
PR_SET_PDEATHSIG = 1

_AT_ONCE = 1 << 28
"""Bytes that one call throws away at most. It is address space only: nothing is ever written there."""
_BLANK = 64 << 20
"""Bytes of the buffer that stands for all that was not kept."""
_HEAD = 1 << 16
"""Bytes of a request's head at most."""


def end_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@dataclass(frozen=True)
class Kept:
    """An object; `data` is None if it was thrown away."""

    size: int
    data: bytes | None
    path: Path | None = None
    modified_s: float = field(default_factory=time.time)
    etag: str = field(default_factory=lambda: f'"{uuid.uuid4().hex}"')


@dataclass(frozen=True)
class Request:
    """One request, its body already received."""

    method: str
    bucket: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    size: int
    body: bytes | None
    """None if it was thrown away."""


class RefusedError(Exception):
    """An answer with an error of S3."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code


class Sink:
    """What is known of the objects, for all connections."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._objects: dict[str, Kept] = {}
        self._uploads: dict[str, dict[int, tuple[int, bytes | None]]] = {}
        self._keys: dict[str, tuple[str, float]] = {}
        self._nowhere = mmap.mmap(-1, _AT_ONCE)
        self._blank = os.memfd_create("blank")
        os.write(self._blank, bytes(_BLANK))

    def serve(self, connection: socket.socket) -> None:
        """All requests of one connection."""
        # A timeout of Python's own would make the socket non-blocking, and MSG_WAITALL void.
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", IDLE_S, 0))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with closing(connection), suppress(OSError):
            rest = b""
            while True:
                head, rest = _head(connection, rest)
                if not head:
                    return
                request, rest = self._received(connection, head, rest)
                try:
                    self._answer(connection, request)
                except RefusedError as error:
                    body = f"<Error><Code>{error.code}</Code><Message>{error.code}</Message></Error>".encode()
                    _send(connection, error.status, {}, b"" if request.method == "HEAD" else body)
                if request.headers.get("connection", "").lower() == "close":
                    return

    def _received(self, connection: socket.socket, head: bytes, rest: bytes) -> tuple[Request, bytes]:
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        url = urllib.parse.urlsplit(target)
        _, bucket, *key = urllib.parse.unquote(url.path).split("/", 2)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        size = int(headers.get("content-length", "0"))
        if headers.get("expect", "").lower() == "100-continue":
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        is_kept = size <= SMALL
        body, rest = rest[:size], rest[size:]
        missing = size - len(body)
        if is_kept:
            body += _exactly(connection, missing)
        else:
            self._throw_away(connection, missing)
        if "x-amz-decoded-content-length" in headers:
            size = int(headers["x-amz-decoded-content-length"])
            body = b"".join(_chunks(body)) if is_kept else b""
        found = Request(method, bucket, "".join(key), query, headers, size, body if is_kept else None)
        return found, rest

    def _throw_away(self, connection: socket.socket, missing: int) -> None:
        while missing:
            some = connection.recv_into(self._nowhere, min(missing, _AT_ONCE), socket.MSG_TRUNC | socket.MSG_WAITALL)
            if not some:
                raise ConnectionError("the client ended within a body")
            missing -= some

    def _answer(self, connection: socket.socket, request: Request) -> None:
        method, query = request.method, request.query
        if not request.key:
            _send(connection, 200, {}, self._of_bucket(request))
        elif method in ("GET", "HEAD"):
            self._give(connection, request)
        elif method == "POST" and "uploads" in query:
            name = uuid.uuid4().hex
            with self._lock:
                self._uploads[name] = {}
                self._keys[name] = (request.key, time.time())
            _send(connection, 200, {}, _xml("InitiateMultipartUploadResult", UploadId=name, Key=request.key))
        elif method == "POST" and "uploadId" in query:
            kept = self._complete(request)
            _send(connection, 200, {}, _xml("CompleteMultipartUploadResult", ETag=kept.etag, Key=request.key))
        elif method == "PUT" and "uploadId" in query:
            with self._lock:
                self._pending(query["uploadId"])[int(query["partNumber"])] = (request.size, request.body)
            _send(connection, 200, {"ETag": f'"{uuid.uuid4().hex}"'})
        elif method == "PUT":
            etag = "" if request.body is None else f'"{hashlib.md5(request.body).hexdigest()}"'
            kept = Kept(request.size, request.body, etag=etag or f'"{uuid.uuid4().hex}"')
            with self._lock:
                self._put(request, kept)
            _send(connection, 200, {"ETag": kept.etag})
        elif method == "DELETE":
            with self._lock:
                if "uploadId" in query:
                    self._pending(query["uploadId"])
                    del self._uploads[query["uploadId"]], self._keys[query["uploadId"]]
                else:
                    self._objects.pop(request.key, None)
            _send(connection, 204, {})
        else:
            raise RefusedError(501, "NotImplemented")

    def _pending(self, name: str) -> dict[int, tuple[int, bytes | None]]:
        if name not in self._uploads:
            raise RefusedError(404, "NoSuchUpload")
        return self._uploads[name]

    def _complete(self, request: Request) -> Kept:
        name = request.query["uploadId"]
        with self._lock:
            parts = [part for _, part in sorted(self._pending(name).items())]
            size = sum(size for size, _ in parts)
            data = b"".join(body or b"" for _, body in parts) if size <= SMALL else None
            kept = Kept(size, data)
            self._put(request, kept)
            del self._uploads[name], self._keys[name]
            return kept

    def _put(self, request: Request, kept: Kept) -> None:
        found = self._objects.get(request.key)
        is_wrong = request.headers.get("if-none-match") == "*" and found is not None
        if "if-match" in request.headers:
            is_wrong |= found is None or found.etag != request.headers["if-match"]
        if is_wrong:
            raise RefusedError(412, "PreconditionFailed")
        self._objects[request.key] = kept

    def _found(self, key: str) -> Kept:
        with self._lock:
            found = self._objects.get(key)
        if found is not None:
            return found
        path = None if self._directory is None else self._directory / key.rpartition("/")[2]
        if path is None or not path.is_file():
            raise RefusedError(404, "NoSuchKey")
        stat = path.stat()
        return Kept(stat.st_size, None, path, stat.st_mtime, f'"{stat.st_ino:x}-{stat.st_size:x}"')

    def _give(self, connection: socket.socket, request: Request) -> None:
        found = self._found(request.key)
        if request.headers.get("if-match", found.etag) != found.etag:
            raise RefusedError(412, "PreconditionFailed")
        headers = {
            "ETag": found.etag,
            "Last-Modified": email.utils.formatdate(found.modified_s, usegmt=True),
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        status, begin, end = 200, 0, found.size
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
        if asked:
            first, last = asked.groups()
            begin = int(first) if first else max(0, found.size - int(last))
            end = min(found.size, int(last) + 1) if first and last else found.size
            if begin >= end:
                raise RefusedError(416, "InvalidRange")
            status = 206
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{found.size}"
        if request.method == "HEAD" or found.data is not None:
            data = (found.data or b"")[begin:end]
            _send(connection, status, headers, b"" if request.method == "HEAD" else data, size=end - begin)
            return
        _send(connection, status, headers, size=end - begin, is_more=True)
        with self._source(found) as (fd, limit):
            while begin < end:
                at = begin % limit
                begin += os.sendfile(connection.fileno(), fd, at, min(end - begin, limit - at))

    @contextmanager
    def _source(self, found: Kept) -> Iterator[tuple[int, int]]:
        """A descriptor that holds the object, and after how many bytes it begins again."""
        if found.path is None:
            yield self._blank, _BLANK
            return
        fd = os.open(found.path, os.O_RDONLY)
        try:
            yield fd, found.size
        finally:
            os.close(fd)

    def _of_bucket(self, request: Request) -> bytes:
        if request.method != "GET":
            return b""
        prefix, delimiter = request.query.get("prefix", ""), request.query.get("delimiter", "")
        with self._lock:
            if "uploads" in request.query:
                rows = [
                    f"<Upload><Key>{escape(key)}</Key><UploadId>{name}</UploadId>"
                    f"<Initiated>{_iso(began_s)}</Initiated></Upload>"
                    for name, (key, began_s) in self._keys.items()
                    if key.startswith(prefix)
                ]
                return _xml("ListMultipartUploadsResult", IsTruncated="false", rows="".join(rows))
            objects, directories = [], set()
            for key, kept in sorted(self._objects.items()):
                if not key.startswith(prefix):
                    continue
                below, found, _ = key.removeprefix(prefix).partition(delimiter) if delimiter else (key, "", "")
                if found:
                    directories.add(f"{prefix}{below}{delimiter}")
                    continue
                objects.append(
                    f"<Contents><Key>{escape(key)}</Key><Size>{kept.size}</Size><ETag>{escape(kept.etag)}</ETag>"
                    f"<LastModified>{_iso(kept.modified_s)}</LastModified></Contents>"
                )
        common = (f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(directories))
        rows = [*objects, *common]
        return _xml("ListBucketResult", IsTruncated="false", KeyCount=str(len(rows)), rows="".join(rows))


def _head(connection: socket.socket, rest: bytes) -> tuple[bytes, bytes]:
    """The head of the next request, and what came behind it; empty at the end of the connection."""
    while b"\r\n\r\n" not in rest:
        if len(rest) > _HEAD:
            raise ConnectionError("no head of a request is so long")
        some = connection.recv(_HEAD)
        if not some:
            return b"", b""
        rest += some
    head, _, rest = rest.partition(b"\r\n\r\n")
    return head, rest


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        some = connection.recv(size - len(data))
        if not some:
            raise ConnectionError("the client ended within a body")
        data += some
    return bytes(data)


def _chunks(body: bytes) -> Iterator[bytes]:
    """The data in a body that is `aws-chunked`."""
    while body:
        size_line, _, body = body.partition(b"\r\n")
        size = int(size_line.partition(b";")[0], 16)
        if size == 0:
            return
        yield body[:size]
        body = body[size + 2 :]


def _send(
    connection: socket.socket,
    status: int,
    headers: Mapping[str, str],
    body: bytes = b"",
    *,
    size: int | None = None,
    is_more: bool = False,
) -> None:
    lines = [
        f"HTTP/1.1 {status} {'OK' if status < 300 else 'Refused'}",
        f"Date: {email.utils.formatdate(usegmt=True)}",
        "Server: sink",
        f"x-amz-request-id: {uuid.uuid4().hex[:16]}",
        *([] if status == 204 else [f"Content-Length: {len(body) if size is None else size}"]),
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + body, socket.MSG_MORE if is_more else 0)


def _xml(name: str, *, rows: str = "", **fields: str) -> bytes:
    inner = "".join(f"<{field}>{escape(value)}</{field}>" for field, value in fields.items())
    space = "http://s3.amazonaws.com/doc/2006-03-01/"
    return f'<?xml version="1.0" encoding="UTF-8"?><{name} xmlns="{space}">{inner}{rows}</{name}>'.encode()


def _iso(time_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(time_s))


def main() -> None:
    end_with_parent()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="0: a free one (0)")
    parser.add_argument("--objects", type=Path, help="a directory of objects that can be read")
    arguments = parser.parse_args()
    sink = Sink(arguments.objects)
    with socket.create_server((HOST, arguments.port), backlog=128) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=sink.serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main()
