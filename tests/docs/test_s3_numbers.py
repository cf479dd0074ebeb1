"""The numbers of docs/s3.md are those of the code."""

from __future__ import annotations

from migrator.storage import object_storage, obstore_client, s3_client
from tests.support.harness import ROOT

MB = 1_000_000


def test_the_numbers_of_the_page_are_those_of_the_code() -> None:
    """Times, tries and sizes."""
    page = " ".join((ROOT / "docs" / "s3.md").read_text().split())
    assert f"nothing comes for {s3_client.READ_S:.0f} seconds" in page
    assert f"made again, {s3_client.TRIES} times in all at most" in page
    assert s3_client._OF_GRACE == 1 / 6
    assert s3_client._UPLOAD_OF_GRACE == 5 / 12
    assert "silence is a sixth of the grace, for a part that is sent 5/12 of it" in page
    assert f"a request is made {s3_client.HURRIED_TRIES} times at most" in page
    assert f"tried again as a whole, {object_storage._TRIES} times at most" in page
    assert object_storage._CLOCK_S == 60
    assert "by more than a minute" in page
    # As the clients say of themselves.
    held = max(s3_client.PART * (obstore_client.SENDERS + 4), s3_client.PART * (s3_client.SENDERS + 2))
    assert held < 170 * MB
    assert f"keeps what it got for {obstore_client._KEPT_S / 60:.0f} minutes at most" in page
    assert f"ranges of {object_storage.RANGE >> 20} MB, eight at a time" in page
    assert object_storage.READERS == 8
