"""A save that comes when a later life has begun without it says so, and no other one does."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from migrator.ckpt.generations import ckpts, claim, go_on, gone_on_without
from migrator.ckpt.manifest import ckpt_name
from migrator.storage.posix import LocalStorage
from tests.support.harness import Job, Process, until
from tests.unit.ckpt.test_generations import save
from tests.jobs.test_notices import COUNT, another_pod, answer, request, stopped


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "root", "job")


def begin(storage: LocalStorage, *, fresh: bool = False) -> list[str]:
    """A life that looks for what it may load."""
    generation = claim(storage, fresh=fresh, about={})
    return go_on(storage, generation.number, lambda: ckpts(storage, generation.lineage))


# What is known.


def test_who_began_before_a_ckpt_does_not_have_it(storage: LocalStorage) -> None:
    """Whatever it went on from; who has it, or comes later, is no reason to say anything."""
    begin(storage)
    save(storage, 1, 10)
    assert gone_on_without(storage, 1, ckpt_name(1, 10)) is None

    assert begin(storage) == [ckpt_name(1, 10)]
    save(storage, 1, 20)
    assert gone_on_without(storage, 1, ckpt_name(1, 10)) is None
    assert gone_on_without(storage, 1, ckpt_name(1, 20)) == (
        f"a later life of the job (generation 2) went on from {ckpt_name(1, 10)} and does not have it"
    )
    assert gone_on_without(storage, 2, ckpt_name(2, 30)) is None


def test_a_life_that_begins_anew_has_nothing(storage: LocalStorage) -> None:
    """The lives behind it continue that one."""
    begin(storage)
    save(storage, 1, 10)
    begin(storage, fresh=True)

    assert gone_on_without(storage, 1, ckpt_name(1, 10)) == (
        "a later life of the job (generation 2) began anew and does not have it"
    )


def test_a_life_that_still_looks_will_find_it(storage: LocalStorage) -> None:
    """It has its number, and waits for the very save that is being made."""
    begin(storage)
    claim(storage, fresh=False, about={})
    save(storage, 1, 10)

    assert gone_on_without(storage, 1, ckpt_name(1, 10)) is None


def test_a_ckpt_that_comes_while_a_life_looks_is_either_found_or_said_to_be_late(storage: LocalStorage) -> None:
    """Between its first look and its note: the second look finds it."""
    begin(storage)
    generation = claim(storage, fresh=False, about={})
    looks: list[str | None] = []

    def look() -> list[str]:
        found = ckpts(storage, generation.lineage)
        if not looks:
            save(storage, 1, 10)  # committed, and looked for a later life, before there is a note
            looks.append(gone_on_without(storage, 1, ckpt_name(1, 10)))
        return found

    assert go_on(storage, generation.number, look) == [ckpt_name(1, 10)]
    assert looks == [None]
    assert gone_on_without(storage, 1, ckpt_name(1, 10)) is None


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'{"from":7}', b"[" * 100_000])
def test_a_note_that_cannot_be_read_is_no_sign_that_all_is_well(storage: LocalStorage, text: bytes) -> None:
    """A later life has looked, and it is not known what it found."""
    begin(storage)
    begin(storage)
    storage.put("generations/000002.from", text, exclusive=False)
    save(storage, 1, 10)

    assert "does not have it" in (gone_on_without(storage, 1, ckpt_name(1, 10)) or "")


def note_of_second_life(storage: LocalStorage, **note: object) -> None:
    storage.put("generations/000002.from", json.dumps(note).encode(), exclusive=False)


@pytest.mark.parametrize("origin", [ckpt_name(1, 10), ckpt_name(1, 5), None])
def test_a_life_that_looks_once_more_is_waited_for(
    storage: LocalStorage, origin: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its note says before may still be mended: the ckpt came between its two looks."""
    begin(storage)
    begin(storage)
    save(storage, 1, 10)
    note_of_second_life(storage, looks=True, **{"from": ckpt_name(1, 5)})
    monkeypatch.setattr(time, "sleep", lambda _: note_of_second_life(storage, **{"from": origin}))

    late = gone_on_without(storage, 1, ckpt_name(1, 10))
    assert (late is None) == (origin == ckpt_name(1, 10))


def test_a_life_that_died_while_it_looked_is_not_waited_for_long(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it would have found is not known: that is not said to be well."""
    begin(storage)
    begin(storage)
    save(storage, 1, 10)
    note_of_second_life(storage, looks=True, **{"from": ckpt_name(1, 5)})
    monkeypatch.setattr("migrator.ckpt.generations._LOOKS_S", 0.05)

    assert "does not have it" in (gone_on_without(storage, 1, ckpt_name(1, 10)) or "")


# What is said.


def overtaken(job: Job, **env: str) -> tuple[Process, Process]:
    """A life that trains, and a later one that has begun to train beside it."""
    stopped(job.write(COUNT), after=10)
    old = job.run(**env)
    old.wait_for("^step 40$")
    later = job.run(MIGRATOR_SIGNAL=another_pod(job))
    later.wait_for("^loaded")
    return old, later


def test_a_late_save_is_told_to_all_who_ask(job: Job) -> None:
    """The log, the answer to the hook, the container's last message."""
    message = job.directory / "termination-log"
    message.touch()
    old, later = overtaken(job, MIGRATOR_TERMINATION_LOG=str(message))
    (before,) = job.ckpts()
    request(job, "r")

    assert old.wait() == 143, old.text
    said = f"a later life of the job (generation 3) went on from {before} and does not have it"
    found = answer(job)
    assert (found.word, found.fields["late"]) == ("resume", said)
    assert [event["means"] for event in old.events("later_life")] == [f'"{said}"']
    (leaving,) = old.events("leaving")
    assert leaving["why"] == f'"saved, but {said}"'
    assert message.read_text().startswith(f"migrator: saved, but {said}: ckpt 000002-")
    later.kill()
    assert later.wait() == 143, later.text
    assert not later.events("later_life")
    assert later.events("leaving")[0]["why"] == "saved"


def test_a_periodic_save_of_a_life_that_was_replaced_says_so_once(job: Job) -> None:
    """It trains for nobody, and its owner learns it before the pod ends."""
    old, _ = overtaken(job, MIGRATOR_EVERY="20")
    old.wait_for("later_life")
    before = len(old.events("committed"))
    until(lambda: len(old.events("committed")) >= before + 2, "two more saves")

    assert len(old.events("later_life")) == 1


def test_a_life_that_waits_for_the_save_has_it(job: Job) -> None:
    """Begun before the ckpt was there, and told by nothing but the mark: that is the ordinary way, and all is well."""
    stopped(job.write(COUNT), after=10)
    old = job.run(HOLD_COMMIT="1")
    old.wait_for("^step 40$")
    old.kill()
    old.wait_for("^holds the commit$")
    later = job.run(STEPS="1", MIGRATOR_SIGNAL=another_pod(job))
    later.wait_for("waiting_for_leaving")
    (job.directory / "go").touch()

    assert old.wait() == 143, old.text
    assert "late" not in answer(job).fields
    assert not old.events("later_life")
