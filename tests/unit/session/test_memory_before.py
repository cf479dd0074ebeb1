"""The line about the memory of the life before: when it is logged, how loud, and what it says."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from migrator.ckpt.memory_note import MemoryNote, put_note
from migrator.ckpt.names import memory_note_name
from migrator.errors import StorageError
from migrator.platform import container, memory
from migrator.platform.memory import Memory
from migrator.session.memory_before import log_memory_before
from migrator.storage.posix import PosixStorage
from tests.support.volume import live, save

MI = 1 << 20
NOTE = MemoryNote(
    peak=1000 * MI, limit=4000 * MI, copy=0, copied=0, kills=0, killed=0, container="another", pod="train-x"
)


class Job:
    """A job that has had one life."""

    def __init__(self, storage: PosixStorage, caplog: pytest.LogCaptureFixture) -> None:
        self.storage = storage
        self._caplog = caplog
        live(storage)

    def note(self, rank: int = 0, **says: Any) -> None:
        put_note(self.storage, 1, rank, replace(NOTE, **says))

    def says(self) -> tuple[str, dict[str, Any]] | None:
        """Level and fields of what the next life logs; None: it logs nothing."""
        self._caplog.clear()
        with self._caplog.at_level(logging.INFO, logger="migrator"):
            log_memory_before(self.storage, 1)
        records = [vars(record) for record in self._caplog.records]
        assert len(records) <= 1
        for record in records:
            assert record["migrator_event"] == "memory_before"
            return record["levelname"], record["migrator_fields"]
        return None

    @property
    def level(self) -> str | None:
        said = self.says()
        return None if said is None else said[0]


@pytest.fixture
def job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Job:
    return Job(PosixStorage(tmp_path / "root", "job"), caplog)


def test_a_life_that_left_no_note_is_not_spoken_of(job: Job) -> None:
    """It ended knowingly, or is of an older version. Nor is there anything before the first life."""
    assert job.says() is None
    log_memory_before(job.storage, None)
    assert job.says() is None


def test_a_life_with_room_left_is_an_info(job: Job) -> None:
    """It was killed, for whatever reason; the numbers are there for whoever knows that it was memory."""
    job.note(copy=500 * MI)
    said = job.says()

    assert said is not None
    level, fields = said
    assert level == "INFO"
    assert (fields["generation"], fields["pod"]) == (1, "train-x")
    assert (fields["peak_bytes"], fields["limit_bytes"], fields["copy_bytes"]) == (1000 * MI, 4000 * MI, 500 * MI)
    assert fields["means"] == (
        "the life before ended without a last save; its container may use 4000Mi and was seen to use 1000Mi; a "
        "periodic save needs 500Mi for its copy, which is not in that; if the pod says OOMKilled, it took the rest "
        "between two looks"
    )


@pytest.mark.parametrize(
    ("says", "level"),
    [
        ({"peak": 3599 * MI}, "INFO"),
        ({"peak": 3600 * MI}, "WARNING"),
        ({"peak": 3000 * MI, "copy": 599 * MI}, "INFO"),
        ({"peak": 3000 * MI, "copy": 600 * MI}, "WARNING"),
        ({"peak": 3000 * MI, "copy": 600 * MI, "copied": 600 * MI}, "INFO"),
        ({"peak": 3599 * MI, "copy": 600 * MI, "copied": 900 * MI}, "INFO"),
        ({"peak": 9000 * MI, "limit": None}, "INFO"),
        ({"peak": 5, "limit": 0}, "INFO"),
        ({"killed": 1}, "WARNING"),
        ({"killed": 1, "limit": None}, "WARNING"),
    ],
)
def test_it_is_a_warning_if_memory_was_nearly_used_up(job: Job, says: dict[str, Any], level: str) -> None:
    """From nine tenths of the limit on, with what a periodic save would copy; or if the kernel counts a kill."""
    job.note(**says)

    assert job.level == level


def test_a_warning_says_what_to_set(job: Job) -> None:
    """In the form of a yaml, and at least as much as the limit was. Only a count of the kernel makes it certain."""

    def advice(**says: Any) -> str:
        job.note(**says)
        said = job.says()
        assert said is not None
        return re.sub(r"^.*; ", "", said[1]["means"])

    is_oom = "if the pod says OOMKilled or exit code 137, "
    assert advice(peak=3900 * MI) == is_oom + "set resources.limits.memory above 4000Mi"
    # With what a copy never takes.
    assert advice(peak=3500 * MI, copy=500 * MI) == is_oom + "set resources.limits.memory above 4256Mi"
    assert advice(peak=3900 * MI, copy=9, copied=9) == is_oom + "set resources.limits.memory above 4156Mi"
    assert advice(peak=1 * MI, killed=2) == "set resources.limits.memory above 4000Mi"
    assert advice(peak=10 * MI + 1, killed=2, limit=None) == (
        "set resources.requests.memory to 11Mi or more, so that the node has it"
    )
    said = job.says()
    assert said is not None
    assert said[1]["means"].startswith(
        "memory ran out in the life before, and the kernel killed 2 of its processes; its container has no limit and "
        "was seen to use 11Mi; "
    )
    assert said[1]["limit_bytes"] == "none"


def test_a_life_that_left_is_not_spoken_of(job: Job) -> None:
    """Its pod may still be there when the next life begins, with the note that it is about to delete."""
    job.note(peak=4000 * MI)
    save(job.storage, 1, 10)
    assert job.level == "WARNING"
    save(job.storage, 1, 20, leaving=True)
    assert job.says() is None
    job.note(peak=4000 * MI, killed=1)
    assert job.level == "WARNING"


@pytest.mark.parametrize("says", [{"leaving": "yes"}, {"leaving": 1}, {"leaving": None}])
def test_only_the_true_word_means_that_it_left(job: Job, says: dict[str, Any]) -> None:
    """Whatever else a manifest may have there."""
    job.note(peak=4000 * MI)
    save(job.storage, 1, 20, **says)

    assert job.level == "WARNING"


def test_a_pod_that_was_lost_while_the_others_left_is_spoken_of(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ckpt says whose state it lacks: that pod did not leave."""
    from migrator.ckpt import catalog

    job.note(rank=0, peak=4000 * MI)
    job.note(rank=4, peak=3900 * MI, pod="train-y")
    name = save(job.storage, 1, 20, leaving=True)
    manifest = catalog.whole(job.storage, name)
    for missing, pod in (([4, 5], "train-y"), ([], None), (["4", True, None], None), ("4", None)):
        lacking = replace(manifest, extra={"missing": missing})
        monkeypatch.setattr(catalog, "whole", lambda *_, lacking=lacking: lacking)
        said = job.says()
        assert (said and said[1]["pod"]) == pod


def test_of_several_pods_the_worst_is_spoken_of(job: Job) -> None:
    """One line, however many were killed. A kill that is certain comes first."""
    for rank, part in enumerate((0.5, 0.95, 0.8)):
        job.note(rank=rank, peak=int(part * 4000 * MI), pod=f"train-{rank}")
    said = job.says()
    assert said is not None
    assert said[1]["pod"] == "train-1"
    job.note(rank=2, killed=1, pod="train-2")
    said = job.says()
    assert said is not None
    assert said[1]["pod"] == "train-2"


def test_in_the_same_container_the_kernel_s_count_is_known(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent has started its ranks again, without a new container: what was counted since is what was killed."""
    here = container.container_life()
    assert here
    for kills, is_same, level in ((5, True, "WARNING"), (4, True, "INFO"), (5, False, "INFO"), (None, True, "INFO")):
        monkeypatch.setattr(memory, "of_container", lambda kills=kills: Memory(used=1, limit=2, kills=kills))
        job.note(kills=4, container=here if is_same else f"{here}1")
        assert job.level == level
    job.note(kills=None, container=here)
    assert job.level == "INFO"


@pytest.mark.parametrize("verb", ["list", "get"])
def test_a_storage_that_fails_ends_nothing(job: Job, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """The line is missing then, and the life begins."""

    def fail(*_: Any, **__: Any) -> Any:
        raise StorageError("it fails")

    job.note(peak=4000 * MI)
    monkeypatch.setattr(job.storage, verb, fail)
    assert job.says() is None


def test_a_hostile_note_is_one_line_and_no_more(job: Job) -> None:
    """No TAB, no line end, and a name that is cut off."""
    job.note(peak=(1 << 62) - 1, limit=1, copy=(1 << 62) - 1, killed=(1 << 62) - 1, pod="\n\tEpoch\t1" * 50)
    said = job.says()
    assert said is not None
    assert len(said[1]["pod"]) == 64
    (job.storage.directory / memory_note_name(1, 0)).write_bytes(b"[" * 100_000)
    assert job.says() is None
