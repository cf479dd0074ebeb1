"""How an upload is cut, and what a ranged read makes of odd answers."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrator.storage import obstore_client
from migrator.storage.obstore_client import PART, SENDERS, ObstoreClient, _cut
from migrator.storage.s3_client import S3Client, pace

MB = 1 << 20


@given(st.integers(0, 50 << 40), st.booleans())
def test_every_size_fits_the_parts_that_s3_takes(size: int, is_careful: bool) -> None:
    part, senders = pace(size, SENDERS, is_careful=is_careful)
    assert 5 * MB <= part <= 5 << 30 or size > 40 << 40
    assert part * 10_000 >= size
    assert 1 <= senders <= SENDERS


@given(st.integers(1, 100 << 30))
def test_what_is_under_way_is_a_quarter_of_the_object_or_one_part(size: int) -> None:
    """So on a link that is just fast enough for the object each request has time to arrive."""
    part, senders = pace(size, SENDERS, is_careful=False)
    assert part * senders <= max(size / 4, 5 * MB)
    assert pace(size, SENDERS, is_careful=True)[1] == 1


def test_large_objects_are_sent_at_full_speed() -> None:
    for size in (0, SENDERS * PART * 4, 100 << 30):
        assert pace(size, SENDERS, is_careful=False) == (PART, SENDERS)


@pytest.fixture(scope="module")
def part() -> Iterator[int]:
    """Bytes of a part, fewer than usual."""
    with patch.object(obstore_client, "PART", MB):
        yield MB


@given(st.lists(st.sampled_from([0, 1, 1000, 256 << 10, (256 << 10) - 1, MB - 1, MB + 5]), max_size=4))
def test_pieces_are_the_buffers_in_order_and_only_those_that_hold_still_are_not_copied(
    part: int, sizes: list[int]
) -> None:
    buffers = [memoryview(bytearray([i + 1]) * size) for i, size in enumerate(sizes)]
    said = b"".join(buffers)
    held, copied = list(_cut(buffers, hold=True)), list(_cut(buffers, hold=False))
    assert b"".join(held) == b"".join(copied) == said
    assert all(0 < len(piece) <= part for piece in (*held, *copied))
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
    assert b"".join(copied) == said
    large = [piece for piece in held if isinstance(piece, memoryview)]
    assert sum(map(len, large)) == sum(size for size in sizes if size >= 256 << 10)
    assert not any(any(piece[:1000]) for piece in large)


class _Whole(http.server.BaseHTTPRequestHandler):
    """A store that does not know ranges."""

    DATA = bytes(range(256)) * 100

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.DATA)))
        self.send_header("ETag", '"one"')
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.end_headers()
        self.wfile.write(self.DATA)

    def log_message(self, *_: object) -> None:
        """To nobody."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Whole]]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Whole) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
            "AWS_ACCESS_KEY_ID": "me",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        yield _Whole
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("client", [S3Client, ObstoreClient])
def test_a_store_that_sends_the_whole_object_for_a_range_is_read_right(
    store: type[_Whole], client: type[S3Client]
) -> None:
    buffer = bytearray(300)
    assert client("bucket").read("key", memoryview(buffer), 1000, etag=None) == 300
    assert bytes(buffer) == store.DATA[1000:1300]
