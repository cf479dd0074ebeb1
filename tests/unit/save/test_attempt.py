"""One attempt to save: what is written, and what is believed at the commit."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from migrator.ckpt import catalog
from migrator.ckpt.catalog import whole
from migrator.ckpt.generations import Generation, claim
from migrator.ckpt.names import MANIFEST, ckpt_name, own_name, part_name
from migrator.ckpt.rank_record import RankRecord
from migrator.ckpt.tensor_file import read_part
from migrator.errors import StorageError, StorageFullError, StorageNotFoundError, StorageTransientError
from migrator.loop.gate import Gate
from migrator.save.attempt import Attempt
from migrator.save.commit import commit
from migrator.save.context import SaveContext
from migrator.save.results import Unclean
from migrator.save.staging import StagingBuffer
from migrator.state.capture import Capture, Capturer
from migrator.storage.base import Storage
from migrator.storage.memory import Bucket, MemoryStorage, MemoryUpload
from migrator.storage.posix import PosixStorage, PosixUpload
from tests.support.crashes import Toy
from tests.support.volume import Calls, names_in, save


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    return PosixStorage(tmp_path / "root", "job")


FIRST = ckpt_name(1, 10)


def attempts(
    storage: Storage,
    *,
    size: int = 1,
    toys: list[Toy] | None = None,
    may_open: bool = False,
    on_block: Callable[[], None] = lambda: None,
    **more: Any,
) -> list[Attempt]:
    """The same save as each rank of a job sees it; nothing is written yet."""
    generation = Generation(1, None, (1,), frozenset({1}))
    made = []
    for rank in range(size):
        toy = toys[rank] if toys else Toy(rank)
        toy.metrics["rank"] = rank
        capturer = Capturer(toy.registry)
        gate = Gate(capturer)
        gate.publish(capturer.take(10, None, full=True))
        capture = gate.take(0)
        assert capture is not None
        context = SaveContext(storage, generation, "job", toy.registry, capturer, gate, rank=rank, size=size, **more)
        made.append(
            Attempt(
                context,
                capture,
                staging=StagingBuffer(),
                may_open=may_open,
                on_block=lambda done, total: on_block(),
                members=tuple(range(size)),
            )
        )
    return made


@pytest.fixture
def shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has a share, however small the state."""
    monkeypatch.setattr("migrator.ranks.shares.SHARE_BYTES", 1)


def test_a_save_of_the_same_step_is_joined_and_made_durable(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt that failed at the last moment may have made it: it is neither written again nor believed unsynced."""
    (first,), (second,) = attempts(storage), attempts(storage)
    assert first.standing() is None
    saved_first = first.run()
    assert first.is_committed()
    before = names_in(storage.directory / FIRST)
    with monkeypatch.context() as patch:
        calls = Calls(patch)
        joined = second.run()
    assert (joined.ckpt, joined.step, joined.size) == (saved_first.ckpt, 10, saved_first.size)
    assert calls.made == [("fsync", FIRST), ("fsync", "job")]
    assert names_in(storage.directory / FIRST) == before


def test_who_does_not_see_the_root_finds_nothing_standing(storage: PosixStorage) -> None:
    """It does not even look."""
    attempts(storage)[0].run()
    assert attempts(storage, writes=False)[0].standing() is None


def test_a_commit_whose_answer_got_lost_is_one(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is there: whatever the call said, the ckpt exists, and it is made durable."""
    (attempt,) = attempts(storage)
    attempt.share()
    real = PosixStorage.put

    def put(of: PosixStorage, name: str, data: bytes, **more: Any) -> None:
        real(of, name, data, **more)
        raise StorageTransientError("the answer got lost", errno=errno.EIO)

    monkeypatch.setattr(PosixStorage, "put", put)
    assert attempt.commit().ckpt == FIRST
    assert catalog.whole(storage, FIRST).step == 10


def test_a_commit_that_failed_is_none(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is not there: the failure is told."""
    (attempt,) = attempts(storage)
    attempt.share()

    def put(*_: Any, **__: Any) -> None:
        raise StorageFullError("the volume is full", errno=errno.ENOSPC)

    monkeypatch.setattr(PosixStorage, "put", put)
    with pytest.raises(StorageError, match="full"):
        attempt.commit()
    assert storage.list(FIRST) == [part_name(0, 1)]


def no_links_and_a_dead_claim(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Any, target: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    (storage.directory / FIRST / f".{MANIFEST}.claim").touch()


def test_a_claim_that_was_never_used_keeps_nobody_from_committing(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its maker has died, or is slow: then its manifest is as good as this one."""
    (attempt,) = attempts(storage)
    attempt.share()
    no_links_and_a_dead_claim(storage, monkeypatch)
    assert attempt.commit().ckpt == FIRST
    assert catalog.whole(storage, FIRST).step == 10


@pytest.mark.parametrize("claimed", [False, True], ids=["link", "claimed by the dead"])
def test_a_ckpt_whose_parts_were_swept_is_not_committed(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch, claimed: bool
) -> None:
    """A later life has taken this one for dead: there is no manifest that names what is gone."""
    (attempt,) = attempts(storage)
    attempt.share()
    if claimed:
        no_links_and_a_dead_claim(storage, monkeypatch)
    claim(storage, fresh=False, about={})
    claim(storage, fresh=False, about={})
    storage.delete(f"{FIRST}/{part_name(0, 1)}")
    with pytest.raises(StorageNotFoundError, match="A later life"):
        attempt.commit()
    assert storage.list(FIRST) == []


def test_who_comes_second_joins_and_replaces_nothing(storage: PosixStorage) -> None:
    """Both ranks commit what both have written; the first manifest stays, to the byte."""
    one, other = attempts(storage, size=2)
    for attempt in (one, other):
        attempt.share()
    for attempt in (one, other):
        assert attempt.look().missing() == []
    assert not one.commit().is_joined
    manifest = storage.get(f"{FIRST}/{MANIFEST}")
    joined = other.commit()
    assert (joined.ckpt, joined.is_joined) == (FIRST, True)
    assert storage.get(f"{FIRST}/{MANIFEST}") == manifest


def test_a_manifest_that_is_there_already_is_this_one_or_that_of_another_rank(storage: PosixStorage) -> None:
    """The same bytes were committed by this rank, whose first try has acted; others are returned."""
    (attempt,) = attempts(storage)
    attempt.share()
    attempt.commit()
    there = catalog.whole(storage, FIRST)
    assert commit(storage, there) is None
    other = replace(there, written={"host": "another"})
    assert commit(storage, other) == there


def test_each_rank_writes_its_share_and_says_so(storage: PosixStorage, shared_out: None) -> None:
    """A part and a record of each; the manifest names both parts."""
    one, other = attempts(storage, size=2)
    one.share()
    assert storage.list(FIRST) == [part_name(0, 2, rank=0), "rank-00000.json"]
    assert one.look().missing() == [1]
    other.share()
    assert storage.list(FIRST)[1:] == [part_name(1, 2, rank=1), "rank-00000.json", "rank-00001.json"]
    assert one.look().missing() == other.look().missing() == []
    assert one.help() is None
    one.commit()
    parts = catalog.whole(storage, FIRST).parts
    assert [part.name for part in parts] == [part_name(0, 2, rank=0), part_name(1, 2, rank=1)]


def test_a_share_that_nobody_wrote_is_written_by_who_is_there(storage: PosixStorage, shared_out: None) -> None:
    """Under a name of its own, and the others hear of it."""
    one, other = attempts(storage, size=2)
    one.share()
    assert one.look().missing() == [1]
    assert one.help() == 1
    assert one.look().missing() == []
    assert one.help() is None
    record = RankRecord.from_bytes(storage.get(f"{FIRST}/rank-00000.json"))
    assert {share: part.name for share, part in record.shares.items()} == {
        0: part_name(0, 2, rank=0),
        1: part_name(1, 2, rank=0),
    }
    one.commit()
    assert catalog.whole(storage, FIRST).ranks == 2
    assert other.standing() is not None


def test_what_is_not_what_the_others_were_told_of_is_not_written(storage: PosixStorage, shared_out: None) -> None:
    """A tensor that changed between the digest and the write: its share would be put together with those of others."""
    toys = [Toy(0), Toy(1)]
    one, _ = attempts(storage, size=2, toys=toys)
    one.share()
    # By way of numpy nothing counts the change.
    for parameter in toys[0].model.parameters():
        parameter.numpy()[:] = 7
    with pytest.raises(Unclean, match="model"):
        one.help()
    assert one.look().missing() == [1]


def test_a_second_try_writes_under_other_names(storage: PosixStorage, shared_out: None) -> None:
    """A slow write of the first one never lands in what the second one has finished."""
    toy = Toy(0)
    (first, _) = attempts(storage, size=2, toys=[toy, Toy(1)])
    first.share()
    tries = first._context.tries
    (second, _) = attempts(storage, size=2, toys=[toy, Toy(1)], tries=tries)
    second.share()
    parts = [name for name in storage.list(FIRST) if name.startswith("part")]
    assert parts == [part_name(0, 2, rank=0, attempt=2), part_name(0, 2, rank=0)]


def test_what_is_a_ranks_own_and_large_has_a_part_of_its_own(
    storage: PosixStorage, shared_out: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside its share, under a name that says whose it is."""
    monkeypatch.setattr("migrator.save.frozen_state.OWN_INLINE_BYTES", 0)
    one, other = attempts(storage, size=2)
    one.share()
    other.share()
    one.look()
    one.commit()
    names = {part.name for part in catalog.whole(storage, FIRST).parts}
    assert names == {part_name(0, 2, rank=0), part_name(1, 2, rank=1), own_name(0), own_name(1)}


def test_who_does_not_see_the_root_writes_nothing(storage: PosixStorage, shared_out: None) -> None:
    """It only hands on what is its own."""
    one, other = attempts(storage, size=2, writes=False)
    other.share()
    assert storage.list(FIRST) == ["rank-00001.json"]
    record = RankRecord.from_bytes(storage.get(f"{FIRST}/rank-00001.json"))
    assert (dict(record.shares), record.own) == ({}, None)
    assert one.standing() is None


def test_a_job_of_one_rank_writes_one_part_and_no_record(storage: PosixStorage) -> None:
    """Nobody would read it."""
    (attempt,) = attempts(storage)
    saved_one = attempt.run()
    assert storage.list(FIRST) == [MANIFEST, part_name(0, 1)]
    assert saved_one.size == storage.size(f"{FIRST}/{part_name(0, 1)}")


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mark sees a change: what is left are the digests."""
    monkeypatch.setattr(Capturer, "changed", lambda self, capture: [])


def changed(toy: Toy) -> None:
    for parameter in toy.model.parameters():
        parameter.numpy()[:] = 7


def test_what_changed_since_the_safe_point_is_not_even_begun(storage: PosixStorage) -> None:
    """The marks are looked at before the first byte."""
    toy = Toy()
    (attempt,) = attempts(storage, toys=[toy])
    toy.set(7.0)
    with pytest.raises(Unclean, match="model"):
        attempt.share()
    assert storage.list(FIRST) == []


def test_a_share_that_is_not_what_was_told_is_refused_by_its_digest(
    storage: PosixStorage, shared_out: None, unseen: None
) -> None:
    """Also if it is now in memory what was written: the other ranks count on what they were told."""
    toy = Toy()
    one, _ = attempts(storage, size=2, toys=[toy, Toy(1)])
    one.share()
    changed(toy)
    with pytest.raises(Unclean, match="model"):
        one.help()


@pytest.mark.parametrize("size", [1, 2])
def test_what_changed_while_it_was_written_is_refused_by_its_digest(
    storage: PosixStorage, shared_out: None, unseen: None, size: int
) -> None:
    """What was written is good, but the next share would not be of the same moment."""
    toy = Toy()
    one = attempts(storage, size=size, toys=[toy, Toy(1)], on_block=lambda: changed(toy))[0]
    with pytest.raises(Unclean, match="model"):
        one.share()


def test_what_changed_while_another_ranks_share_was_written_is_refused(
    storage: PosixStorage, shared_out: None, unseen: None
) -> None:
    """The rank that writes it reads it from its own memory."""
    toy = Toy()
    blocks = []

    def on_block() -> None:
        blocks.append(1)
        if len(blocks) > 1:
            changed(toy)

    one, _ = attempts(storage, size=2, toys=[toy, Toy(1)], on_block=on_block)
    one.share()
    assert len(blocks) == 1
    with pytest.raises(Unclean, match="model"):
        one.help()


def test_a_rank_without_a_share_proves_its_state_too(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own state goes into the record, and it has to be that of the safe point when the record is made."""
    toy = Toy(1)
    _, other = attempts(storage, size=2, toys=[Toy(0), toy])
    real = Attempt._digests_of_same

    def digests(attempt: Attempt) -> dict[str, str]:
        found = real(attempt)
        toy.set(7.0)
        return found

    monkeypatch.setattr(Attempt, "_digests_of_same", digests)
    with pytest.raises(Unclean, match="model"):
        other.share()
    assert storage.list(FIRST) == []


@pytest.mark.parametrize("size", [1, 2])
def test_small_state_is_copied_aside_and_the_loop_goes_on(
    storage: PosixStorage, shared_out: None, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """What the loop changes from then on is not in the ckpt; state of just that size is small."""
    monkeypatch.setattr("migrator.save.attempt.SMALL_BYTES", 4 * 320 // size)
    toys = [Toy(rank) for rank in range(size)]
    real = Gate.open

    def opened(gate: Gate, *arguments: Any, **more: Any) -> Any:
        """The loop steps at once."""
        for toy in toys:
            changed(toy)
        return real(gate, *arguments, **more)

    monkeypatch.setattr(Gate, "open", opened)
    made = attempts(storage, size=size, toys=toys, may_open=True)
    for attempt in made:
        for toy in toys:
            toy.set(0.0)
        attempt._capture = attempt._context.capturer.take(10, None, full=True)
        attempt.share()
        assert attempt._is_apart
    made[0].look()
    made[0].commit()
    for part in catalog.whole(storage, FIRST).parts:
        for name, tensor in read_part(storage, FIRST, part).items():
            assert not (name.startswith("model/") and tensor.any()), name


def test_what_the_loop_may_change_is_taken_before_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a storage that sends from the tensors' own memory, and may do so until the part is finished."""
    monkeypatch.setattr("migrator.save.attempt.SMALL_BYTES", -1)
    monkeypatch.setattr("migrator.ckpt.piece_digests.GROUP", 1)
    storage, toy, real = MemoryStorage(Bucket(), "job"), Toy(0), Gate.open

    def opened(gate: Gate) -> None:
        changed(toy)
        real(gate)

    monkeypatch.setattr(Gate, "open", opened)
    (attempt,) = attempts(storage, toys=[toy], may_open=True)
    toy.set(0.0)
    attempt._capture = attempt._context.capturer.take(10, None, full=True)
    attempt.run()
    assert attempt._is_apart
    for part in catalog.whole(storage, FIRST).parts:
        for name, tensor in read_part(storage, FIRST, part).items():
            assert not (name.startswith("model/") and tensor.any()), name


def test_the_last_save_sends_from_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the loop waits nothing changes them, so they are not copied."""
    holds: list[bool] = []
    real = MemoryUpload.write

    def write(upload: MemoryUpload, buffers: Any, *, hold: bool = False) -> None:
        holds.append(hold)
        real(upload, buffers, hold=hold)

    monkeypatch.setattr(MemoryUpload, "write", write)
    for may_open, waits in ((False, True), (False, False), (True, False)):
        monkeypatch.setattr(Gate, "someone_waits", property(lambda _, waits=waits: waits))
        attempts(MemoryStorage(Bucket(), "job"), may_open=may_open)[0].run()
    # In an evaluation the script may put other weights in for a while. A periodic save of a small state has copies.
    assert holds == [True, False, True]


def test_a_second_try_has_a_file_of_its_own_where_the_first_may_act_late() -> None:
    """An upload that was given up could replace it behind its digest."""
    storage = MemoryStorage(Bucket(), "job")
    (attempt,) = attempts(storage)
    attempt.share()
    (again,) = attempts(storage)
    again._context.tries.update(attempt._context.tries)
    again.run()
    (part,) = catalog.whole(storage, FIRST).parts
    assert part.name == part_name(0, 1, rank=0, attempt=2)
    assert storage.list(FIRST) == [MANIFEST, part.name, part_name(0, 1)]


def test_a_second_try_on_a_volume_takes_no_more_room(storage: PosixStorage) -> None:
    """There the first one can do nothing any more."""
    (attempt,) = attempts(storage)
    attempt.share()
    (again,) = attempts(storage)
    again._context.tries.update(attempt._context.tries)
    again.run()
    assert storage.list(FIRST) == [MANIFEST, part_name(0, 1)]


def test_the_last_save_lets_no_loop_go_on(storage: PosixStorage) -> None:
    """Nothing follows it that could be lost."""
    (attempt,) = attempts(storage, may_open=False)
    attempt.share()
    assert not attempt._is_apart


def test_large_state_is_not_copied_before_the_loop_waits(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory would be taken for nothing."""
    monkeypatch.setattr("migrator.save.attempt.SMALL_BYTES", 4 * 320 - 1)
    apart: list[bool] = []
    made = attempts(storage, may_open=True, on_block=lambda: apart.append(made[0]._is_apart))
    made[0].share()
    assert apart == [False]


def test_a_copy_that_is_not_what_it_was_made_of_is_refused(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch, unseen: None
) -> None:
    """The state changed while it was copied: the copies are of no moment at all."""
    monkeypatch.setattr(
        StagingBuffer, "copies", lambda self, of: {key: tensor.clone() + 1 for key, tensor in of.items()}
    )
    (attempt,) = attempts(storage, may_open=True)
    with pytest.raises(Unclean, match="model"):
        attempt.share()
    assert storage.list(FIRST) == []


@pytest.mark.parametrize(("device", "members"), [("cpu", (1, 2)), ("meta", (1,))])
def test_what_lies_on_a_device_is_not_shared_out(device: str, members: tuple[int, ...]) -> None:
    """There is no digest of it, so nobody knows whether it is the same on all ranks: the lowest writes it."""
    attempt: Any = object.__new__(Attempt)
    attempt._same, attempt._tensors = {"model": ["w"]}, {"w": torch.zeros(4, device=device)}
    attempt._members, attempt._capture = (1, 2), Capture(7, {}, {}, {}, None)

    assert attempt._planned().members == members


@pytest.mark.parametrize(
    ("lives", "why"),
    [(1, "No later life of the job has begun"), (2, r"A later life of the job \(generation 2\) has begun")],
)
def test_why_a_part_is_gone(tmp_path: Path, lives: int, why: str) -> None:
    """A later life is blamed only if there is one."""
    storage = PosixStorage(tmp_path / "root", "job")
    for _ in range(lives):
        claim(storage, fresh=False, about={})
    manifest = whole(storage, save(storage, 1, 5))
    for part in (storage.directory / manifest.ckpt).iterdir():
        part.unlink()
    with pytest.raises(StorageError, match=why):
        commit(storage, manifest)


# The gate opens behind the proof.


class Opening:
    """What happens in which order while an attempt of a state that is not small writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, waits: bool = False) -> None:
        self.said: list[str] = []
        monkeypatch.setattr("migrator.save.attempt.SMALL_BYTES", -1)
        monkeypatch.setattr("migrator.ckpt.piece_digests.GROUP", 1)
        monkeypatch.setattr(Gate, "someone_waits", property(lambda _: waits))
        self.copied: list[set[str]] = []
        real_open, real_finish, real_copies = Gate.open, PosixUpload.finish, StagingBuffer.copies
        self.at_finish: Callable[[], None] = lambda: None

        def opened(gate: Gate) -> None:
            self.said.append("opens")
            real_open(gate)

        def finish(upload: PosixUpload) -> None:
            self.said.append("syncs")
            real_finish(upload)
            self.at_finish()

        def copies(staging: StagingBuffer, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
            self.copied.append(set(tensors))
            return real_copies(staging, tensors)

        monkeypatch.setattr(Gate, "open", opened)
        monkeypatch.setattr(PosixUpload, "finish", finish)
        monkeypatch.setattr(StagingBuffer, "copies", copies)


def test_the_loop_goes_on_behind_the_last_byte_and_nothing_is_copied_for_it(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not behind the sync and the commit, which need no tensor."""
    order = Opening(monkeypatch)
    attempts(storage, may_open=True)[0].run()
    assert order.said == ["opens", "syncs"]
    assert order.copied == []


def test_the_last_save_opens_nothing(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step follows it."""
    order = Opening(monkeypatch)
    attempts(storage, may_open=False)[0].run()
    assert order.said == ["syncs"]


def test_what_is_a_ranks_own_is_proven_before_the_loop_goes_on(
    storage: PosixStorage, shared_out: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its share comes first, and its own state is read behind it."""
    monkeypatch.setattr("migrator.save.frozen_state.OWN_INLINE_BYTES", 0)
    order = Opening(monkeypatch)
    one, _ = attempts(storage, size=2, may_open=True)

    def planned() -> Any:
        one._live = set(one._tensors)
        return Attempt._planned(one)

    monkeypatch.setattr(one, "_planned", planned)
    one.share()
    assert order.said == ["syncs", "opens", "syncs"]


def test_a_change_between_the_proof_and_the_opening_is_seen(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the marks, once more."""
    order, toy = Opening(monkeypatch), Toy()
    (attempt,) = attempts(storage, toys=[toy], may_open=True)
    attempt._proven = Meddling(lambda: toy.set(7.0))
    with pytest.raises(Unclean, match="model"):
        attempt.run()
    assert order.said == []


class Meddling(set[str]):
    """Something happens when all is proven."""

    def __init__(self, happens: Callable[[], None]) -> None:
        super().__init__()
        self._happens = happens

    def update(self, *more: Any) -> None:
        super().update(*more)
        self._happens()


def test_a_loop_that_stood_still_may_change_its_state_when_it_is_let_go(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights exchanged for an evaluation, while the sync of the save still runs: what was saved is right."""
    order, toy = Opening(monkeypatch, waits=True), Toy()
    order.at_finish = lambda: toy.set(7.0)
    (attempt,) = attempts(storage, toys=[toy], may_open=True)
    attempt._staging.is_off = True
    assert attempt.run().ckpt == FIRST
    assert order.said == ["opens", "syncs"]
    toy.set(0.0)


def test_what_is_proven_is_not_copied_any_more(storage: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop comes to the gate in the middle."""
    order = Opening(monkeypatch, waits=True)
    (attempt,) = attempts(storage, may_open=True)

    def planned() -> Any:
        attempt._proven.add(min(attempt._live))
        return Attempt._planned(attempt)

    monkeypatch.setattr(attempt, "_planned", planned)
    attempt.share()
    assert len(attempt._live) > 1
    assert order.copied == [attempt._live - {min(attempt._live)}]


def test_a_loop_that_comes_behind_the_last_byte_waits_for_no_copy(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof takes less time."""
    order = Opening(monkeypatch)
    made = attempts(storage, may_open=True)

    def on_block(done: int, total: int) -> None:
        monkeypatch.setattr(Gate, "someone_waits", property(lambda _: done == total))

    monkeypatch.setattr(made[0], "_on_block", on_block)
    made[0].share()
    assert order.copied == []
    assert order.said == ["opens", "syncs"]


def test_the_gate_opens_when_nothing_reads_live_memory_any_more(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies take the tensors' places only between two of the other thread's looks."""
    Opening(monkeypatch, waits=True)
    (attempt,) = attempts(storage, may_open=True)
    is_held: list[bool] = []

    class Tensors(dict[str, torch.Tensor]):
        def update(self, *more: Any) -> None:
            is_held.append(attempt._reading.locked())
            super().update(*more)

    def planned() -> Any:
        attempt._tensors = Tensors(attempt._tensors)
        return Attempt._planned(attempt)

    monkeypatch.setattr(attempt, "_planned", planned)
    attempt.share()
    assert is_held == [True]
