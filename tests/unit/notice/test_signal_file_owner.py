"""One process owns the signal file: a second one is told so at once, and disturbs neither trainer nor hook."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from migrator.notice.signal_file import SignalFile
from migrator.notice.signal_file_owner import SignalFileOwner
from migrator.session.rank_group import RankGroup


def test_whoever_only_looks_leaves_no_owner(tmp_path: Path) -> None:
    """Ranks look at the same time, before the lowest of them takes it."""
    file = tmp_path / "pod" / "signal"
    assert [SignalFileOwner(file).other() for _ in range(3)] == [None] * 3

    owner = SignalFileOwner(file)
    owner.take()
    assert file.with_name(".signal.owner").read_text().startswith(f"{os.getpid()} (")
    owner.release()
    owner.release()
    assert list(file.parent.iterdir()) == []


def test_where_no_lock_can_be_had_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is no reason not to train."""
    (tmp_path / ".signal.owner").mkdir()
    SignalFileOwner(tmp_path / "signal").take()

    assert 'watch_weak way="the signal file\'s owner"' in caplog.text


def test_a_file_that_its_owner_takes_away_just_now_is_not_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two processes would each hold a lock, on two files."""
    file = tmp_path / "signal"
    before, owner = SignalFileOwner(file), SignalFileOwner(file)
    before.take()
    lockf = fcntl.lockf
    ended: list[None] = []

    def locked_too_late(fd: int, how: int) -> None:
        if not ended:
            ended.append(before.release())
        lockf(fd, how)

    monkeypatch.setattr(fcntl, "lockf", locked_too_late)
    owner.take()

    assert os.path.samestat(os.fstat(owner._fd), file.with_name(".signal.owner").stat())
    owner.release()


# The end.


def pod_of(pids: list[int]) -> RankGroup:
    """What a rank knows of its pod, when the others have not said `bye` where it has looked."""
    team = object.__new__(RankGroup)
    team.pids = pids
    team.ranks = SimpleNamespace(lines=lambda what: [], size=len(pids))  # type: ignore[assignment]
    return team


def test_of_ranks_that_end_at_the_same_moment_one_takes_the_file_away(tmp_path: Path) -> None:
    """Each notes its end before it looks whether the others have: so not both leave it to the other."""
    file, other = SignalFile(tmp_path / "signal"), os.getppid()
    pod = pod_of([os.getpid(), other])
    file.note_end()
    assert not pod.is_last_of_pod(file.ended())

    (tmp_path / "signal.ended").write_text(f"{other}\n{os.getpid()}\n")
    assert pod.is_last_of_pod(file.ended())
    file.forget_ends()
    assert file.ended() == set()
