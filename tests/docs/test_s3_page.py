"""The page about S3: its commands run as they stand there, and its numbers are those of the code."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from migrator.storage import object_storage, obstore_client, s3_client
from migrator.testing.s3_server import S3Server, why_not
from tests.docs.test_pages import doc
from tests.support.harness import ROOT, kill_group, processes_with, until

PAGE = doc("s3.md")


def section(heading: str) -> str:
    (found,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGE, flags=re.M | re.S)
    return str(found)


def test_the_times_and_sizes_are_those_of_the_code() -> None:
    """Who plans a grace by the page plans with what happens."""
    text = " ".join(PAGE.split())
    assert f"nothing comes for {s3_client.READ_S:.0f} seconds" in text
    assert f"made again, {s3_client.TRIES} times in all at most" in text
    assert s3_client._OF_GRACE == 1 / 6
    assert s3_client._UPLOAD_OF_GRACE == 5 / 12
    assert "silence is a sixth of the grace, for a part that is sent 5/12 of it" in text
    assert f"a request that begins then is made {s3_client.HURRIED_TRIES} times at most" in text
    assert f"a range that is read, is tried {object_storage._TRIES} times" in text
    assert object_storage._CLOCK_S == 60
    assert "by more than a minute" in text
    # As the clients say of themselves.
    held = max(s3_client.PART * (obstore_client.SENDERS + 4), s3_client.PART * (s3_client.SENDERS + 2))
    assert held < 210 * 1_000_000
    assert f"asks for them again every {obstore_client._KEPT_S:.0f} seconds" in text
    assert f"ranges of {object_storage.RANGE >> 20} MB, eight at a time" in text
    assert object_storage.READERS == 8


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.skipif(why_not() is not None, reason=f"LOUD: {why_not()}")
def test_the_commands_for_one_machine_leave_ckpts_in_the_bucket(tmp_path: Path) -> None:
    """As they stand there; only the port is given. At their end nothing runs any more."""
    (commands,) = re.findall(r"^```sh\n(.*?)^```$", section("On one machine"), flags=re.M | re.S)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    said = tmp_path / "said.txt"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "MIGRATOR_"))}
    env |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    env |= {"MIGRATOR_SIGNAL": str(tmp_path / "signal"), "PIP_NO_INDEX": "1"}  # pip finds it installed
    with contextlib.closing(S3Server(tmp_path)) as free:  # its ports are ours, and it is not started
        with said.open("w") as out:
            shell = subprocess.Popen(
                ["sh", "-eu", "-c", commands],
                cwd=tmp_path,
                env={**env, "PORT": str(free.port)},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            code = shell.wait(100)
            until(lambda: not processes_with(tmp_path), "the server to end", context=said.read_text)
        finally:
            kill_group(shell.pid)
            Path(f"/tmp/seaweedfs-s3-{free.port}.sock").unlink(missing_ok=True)

    text = said.read_text()
    assert code == 0, text
    committed = re.findall(r" committed ckpt=(\S+)", text)
    assert [name.partition("-")[2] for name in committed] == ["000000000100", "000000000200", "000000000300"], text
    listed = re.findall(r"^my-bucket/jobs/default/(0\S+)/manifest.json$", text, re.M)
    assert listed == committed[1:], text
