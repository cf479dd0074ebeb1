"""Ranges over plain HTTP: filled as asked for, or left to the library."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from migrator.storage.object_storage import ObjectStorage
from migrator.storage.obstore_client import ObstoreClient
from migrator.storage.plain_http import PlainHttp, plain_http
from migrator.storage.s3_client import S3Client

DATA = bytes(range(256)) * 200
ETAG = '"one"'


class Store(http.server.ThreadingHTTPServer):
    """Answers ranged requests with 206, unless a test spoils that."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.connections = 0
        self.spoil: Callable[[int, dict[str, str], bytes], tuple[int, dict[str, str], bytes]] | None = None
        """Of an answer: the status, the headers and the body."""
        self.spoilt = 1
        """How many answers are."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Store

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def do_GET(self) -> None:
        store = self.server
        store.asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        first, last = (int(n) for n in self.headers["Range"].removeprefix("bytes=").split("-"))
        body = DATA[first : last + 1]
        status, headers = 206, {"Content-Range": f"bytes {first}-{first + len(body) - 1}/{len(DATA)}", "ETag": ETAG}
        headers |= {"Content-Length": str(len(body)), "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
        if self.headers.get("If-Match", ETAG) != ETAG:
            status, headers, body = 412, {"Content-Length": "0"}, b""
        elif store.spoil is not None and store.spoilt > 0:
            store.spoilt -= 1
            status, headers, body = store.spoil(status, headers, body)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        if int(headers.get("Content-Length", 0)) != len(body):
            self.close_connection = True

    def do_HEAD(self) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": str(len(DATA)), "ETag": ETAG}.items():
            self.send_header(name, value)
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """To nobody."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with Store() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        for name, value in {
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_ACCESS_KEY_ID": "me",
            "AWS_SECRET_ACCESS_KEY": "mysecret",
            "AWS_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def plain(store: Store) -> PlainHttp:
    return PlainHttp(store.endpoint, "us-east-1", "bucket", 5.0)


def test_ranges_come_over_one_connection_and_are_signed(store: Store, plain: PlainHttp) -> None:
    for offset in (0, 1000, len(DATA) - 300):
        buffer = bytearray(300)
        assert plain.fill("a/key with+signs", memoryview(buffer), offset, etag=ETAG)
        assert buffer == DATA[offset : offset + 300]
    assert store.connections == 1
    paths = {path for path, _ in store.asked}
    assert len(paths) == 1, "signed once"
    (path,) = paths
    assert path.startswith("/bucket/a/key%20with%2Bsigns?")
    assert "X-Amz-Signature=" in path
    assert "mysecret" not in path
    assert {headers["if-match"] for _, headers in store.asked} == {ETAG}


def test_another_version_is_not_read(plain: PlainHttp) -> None:
    assert not plain.fill("key", memoryview(bytearray(300)), 0, etag='"another"')


Answer = tuple[int, dict[str, str], bytes]


def whole(_: int, headers: dict[str, str], __: bytes) -> Answer:
    return 200, {"Content-Length": str(len(DATA)), "ETag": ETAG, "Last-Modified": headers["Last-Modified"]}, DATA


def elsewhere(status: int, headers: dict[str, str], body: bytes) -> Answer:
    return status, headers | {"Content-Range": f"bytes 0-299/{len(DATA)}"}, body[::-1]


def shorter(status: int, headers: dict[str, str], body: bytes) -> Answer:
    return status, headers, body[:100]


def short_range(status: int, headers: dict[str, str], body: bytes) -> Answer:
    return status, headers | {"Content-Length": "100"}, body[:100]


def longer(status: int, headers: dict[str, str], body: bytes) -> Answer:
    return status, headers | {"Content-Length": "400"}, body + bytes(100)


def busy(_: int, __: dict[str, str], ___: bytes) -> Answer:
    return 503, {"Content-Length": "0"}, b""


def nonsense(_: int, __: dict[str, str], ___: bytes) -> Answer:
    return 206, {"Content-Range": "?", "Content-Length": "x"}, b""


SPOILS = [whole, elsewhere, shorter, short_range, longer, busy, nonsense]


@pytest.mark.parametrize("spoil", SPOILS)
def test_an_odd_answer_fills_nothing_and_the_next_one_does(store: Store, plain: PlainHttp, spoil: Any) -> None:
    store.spoil = spoil
    buffer = bytearray(300)
    assert not plain.fill("key", memoryview(buffer), 1000, etag=ETAG)
    assert plain.fill("key", memoryview(buffer), 1000, etag=ETAG)
    assert buffer == DATA[1000:1300]
    assert store.connections == 2, "what is left of an odd answer is not taken for the next one"


@pytest.mark.parametrize("spoil", SPOILS)
def test_the_library_reads_what_came_oddly(store: Store, spoil: Any) -> None:
    store.spoil = spoil
    client, buffer = S3Client("bucket"), bytearray(300)
    assert client.read("key", memoryview(buffer), 1000, etag=ETAG) == 300
    assert buffer == DATA[1000:1300]
    assert len(store.asked) >= 2


@pytest.mark.parametrize("client", [S3Client, ObstoreClient])
def test_a_store_that_never_sends_a_range_is_read_right(store: Store, client: type[S3Client]) -> None:
    """The whole object comes each time, to each library."""
    store.spoil, store.spoilt = whole, 99
    buffer = bytearray(300)
    assert client("bucket").read("key", memoryview(buffer), 1000, etag=None) == 300
    assert buffer == DATA[1000:1300]


def test_no_connection_stays_when_an_object_has_been_read(store: Store) -> None:
    storage = ObjectStorage(S3Client("bucket"), "", "job")
    assert isinstance(storage.client, S3Client)
    plain = storage.client._plain
    assert plain is not None
    with storage.open("part") as file:
        file.read([memoryview(bytearray(300))], 0)
        assert len(plain._idle) == 1
    assert plain._idle == []


def test_a_url_is_not_used_until_its_credentials_expire(
    store: Store, plain: PlainHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kept_s in (300.0, 0.0):
        monkeypatch.setattr("migrator.storage.plain_http._KEPT_S", kept_s)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
        assert plain.fill("key", memoryview(bytearray(3)), 0, etag=None)
    signed = iter(range(9))
    monkeypatch.setattr(plain._client, "generate_presigned_url", lambda *_, **__: f"http://h/p?{next(signed)}")
    for _ in range(2):
        assert plain.fill("key", memoryview(bytearray(3)), 0, etag=None)
    assert [path for path, _ in store.asked[-2:]] == ["/p?0", "/p?1"]


@pytest.mark.parametrize("endpoint", [None, "https://store.example"])
def test_only_plain_http_is_read_so(endpoint: str | None) -> None:
    assert plain_http(endpoint, "us-east-1", "bucket", 5.0) is None


def test_not_by_a_proxy(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert plain_http("http://store.example", "us-east-1", "bucket", 5.0) is None
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert plain_http(store.endpoint, "us-east-1", "bucket", 5.0) is not None


def test_without_credentials_the_library_says_so(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    made = plain_http(store.endpoint, "us-east-1", "bucket", 5.0)
    assert made is None or not made.fill("key", memoryview(bytearray(3)), 0, etag=None)
