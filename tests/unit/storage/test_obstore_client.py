"""How an upload is cut, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import obstore
import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.exceptions import GenericError

from migrator.errors import StorageError
from migrator.storage import obstore_client
from migrator.storage.obstore_client import PART, SENDERS, ObstoreClient, ObstoreUpload, _cut
from migrator.storage.s3_client import pace

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


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> ObstoreClient:
    """Of a store that is never asked."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    return ObstoreClient("bucket")


@pytest.mark.parametrize(
    ("said", "is_careful"),
    [("operation timed out", True), ("<Code>ExpiredToken</Code>", False), ("<Code>QuotaExceeded</Code>", False)],
)
def test_only_what_may_be_a_slow_link_makes_the_next_upload_careful(
    client: ObstoreClient, monkeypatch: pytest.MonkeyPatch, said: str, is_careful: bool
) -> None:
    """Behind renewed credentials every second counts."""

    def put(*_: Any, **__: Any) -> None:
        raise GenericError(said)

    monkeypatch.setattr(obstore, "put", put)
    with pytest.raises(StorageError):
        client.upload("key")
    assert client.is_careful is is_careful


def test_an_upload_that_failed_meanwhile_hides_no_error(client: ObstoreClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why it was given up says more."""
    ends = threading.Event()

    def put(_: Any, __: str, pieces: Iterator[bytes], **___: Any) -> None:
        next(pieces)
        ends.wait(30)

    monkeypatch.setattr(obstore, "put", put)
    upload = client.upload("key")
    assert isinstance(upload, ObstoreUpload)
    with pytest.raises(KeyError, match="newer step"), upload:  # noqa: PT012
        upload.write([memoryview(bytes(obstore_client.PART))])
        # As its thread leaves it a moment before it ends.
        upload._error, upload._is_over = GenericError("cut"), True
        raise KeyError("given up for a newer step")
    ends.set()
    upload._thread.join()
