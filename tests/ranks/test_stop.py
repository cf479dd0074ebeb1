"""Jobs of several ranks, stopped wherever and by whomever: one step on all ranks, and it goes on bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from migrator.ckpt.names import parse_ckpt_name
from migrator.notice.signal_file import INIT, RESUME
from tests.support import chance
from tests.support.harness import ROOT, ForkServer, Job, until
from tests.support.rank_history import (
    RankStory,
    add_next_ranks,
    assert_each_sample_once_over_ranks,
    assert_ranks_as_if_nothing_had_happened,
    unstopped_ranks,
    whole_steps,
)
from tests.support.rank_processes import Gang

RANKED = ROOT / "tests" / "support" / "scripts" / "ranked.py"
EPOCHS, SAMPLES = 3, 48
LOSSES = ["rank_lost", "saving_alone", "store_lost", "ranks_differ", "save_failed", "waiting_for_leaving"]
"""Between stops at which nothing is lost no rank says any of these."""

Reference = Callable[..., RankStory]


@dataclass(frozen=True)
class Stop:
    """One end of a life."""

    place: str
    who: int | str = 0
    """The rank that has the notice, or `all`."""
    how: str = "sigterm"


@pytest.fixture(scope="module")
def reference(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """The job as nobody stops it, trained once for each number of ranks and epochs."""
    known: dict[tuple[Any, ...], RankStory] = {}
    jobs: list[Job] = []

    def unstopped(size: int, **env: str) -> RankStory:
        key = (size, *sorted(env.items()))
        if key not in known:
            jobs.append(Job(fork_server, tmp_path_factory.mktemp("reference")).use(RANKED))
            known[key] = unstopped_ranks(jobs[-1], size, **env)
        return known[key]

    yield unstopped
    for job in jobs:
        job.end()


def left(gang: Gang) -> int | None:
    """All ranks left, and all of them say the same ckpt and step; the step."""
    assert gang.wait() == [143] * gang.size, gang.text
    leaving = gang.events("leaving")
    assert [rank for rank, _ in leaving] == list(range(gang.size)), gang.text
    told = {(fields["ckpt"], fields["step"]) for _, fields in leaving}
    assert len(told) == 1, gang.text
    assert {name: gang.events(name) for name in LOSSES if gang.events(name)} == {}, gang.text
    ckpt, step = told.pop()
    if ckpt == "None":
        return None
    assert parse_ckpt_name(ckpt) == (int(ckpt.split("-")[0]), int(step))
    return int(step)


def stopped(job: Job, size: int, stops: Sequence[Stop], **env: str) -> RankStory:
    """One life for each stop and one more to the end, all on as many ranks, each in a pod of its own."""
    story = RankStory()
    step = None
    for stop in stops:
        gang = job.gang(size, pods=size, **env, AT=stop.place, AT_RANK=str(stop.who), HOW=stop.how)
        before, step = step, left(gang)
        add_next_ranks(story, gang)
        assert story.resumed[-1] == (before or 0)
        # Where all have notice, the first may keep the others from getting there.
        came = [rank for rank in range(size) if gang[rank].text.count(f"moment {stop.place}\n") == 1]
        assert came if stop.who == "all" else stop.who in came, gang.text
        if stop.how == "file":
            asked = [rank for rank, fields in gang.events("signal") if fields["source"] == '"signal file"']
            assert asked, gang.text
            assert_answered(gang, asked, step)
    add_last(story, job.gang(size, pods=size, **env))
    assert story.resumed[-1] == (step or 0)
    return story


def add_last(story: RankStory, gang: Gang) -> None:
    """The life that comes to the end."""
    assert gang.wait() == [0] * gang.size, gang.text
    add_next_ranks(story, gang)


def assert_answered(gang: Gang, pods: Sequence[int], step: int | None) -> None:
    """The hook of each pod that asked has its answer."""
    for pod in pods:
        said = gang.answer(pod)
        assert said is not None, gang.text
        assert said.word == (INIT if step is None else RESUME), said
        assert said.fields["request"] == "r-1", said
        assert said.fields.get("step") == (None if step is None else str(step)), said


def assert_nothing_shows(story: RankStory, reference: RankStory, *, epochs: int = EPOCHS) -> None:
    assert_ranks_as_if_nothing_had_happened(story, reference)
    assert_each_sample_once_over_ranks(story, epochs=epochs, samples=SAMPLES)


# At every kind of moment.


def test_two_ranks_stopped_at_every_kind_of_moment(job: Job, reference: Reference) -> None:
    """By one rank or the other or both, by SIGTERM or by the pod's hook: before the first step, in a batch, between
    batches, behind the last one, in the evaluation and before the next epoch."""
    stops = [
        Stop("0:start", 1),
        Stop("0:1:backward", 0, "file"),
        Stop("0:2:stepped", 1),
        Stop("0:4:drawn", "all"),
        Stop("0:5:done", 0),
        Stop("0:over", 1, "file"),
        Stop("1:start", "all", "file"),
        Stop("1:2:stepped", "all"),
        Stop("1:evaluation 1", 0),
    ]

    story = stopped(job.use(RANKED), 2, stops)

    assert_nothing_shows(story, reference(2))


def test_four_ranks_stopped_at_every_kind_of_moment(job: Job, reference: Reference) -> None:
    """By any one of them, or by all."""
    stops = [
        Stop("0:1:drawn", 3, "file"),
        Stop("0:2:backward", 1),
        Stop("0:evaluation 0", 2),
        Stop("1:1:stepped", "all"),
        Stop("1:2:done", 3),
        Stop("2:start", 0, "file"),
    ]

    story = stopped(job.use(RANKED), 4, stops)

    assert_nothing_shows(story, reference(4))


def any_stops(moments: Sequence[str], size: int, count: int, *, seed: str) -> list[Stop]:
    """At most one in each batch, and otherwise anywhere: a life that was stopped in a batch may be behind it or not."""
    dice = chance.dice(seed)
    by_batch: dict[str, list[str]] = {}
    for place in moments:
        epoch, moment, *_ = place.split(":")
        # What follows an epoch may be over, with the next one begun, before all ranks have the notice.
        moment = "end" if moment.startswith(("over", "evaluation")) else moment
        by_batch.setdefault(f"{epoch}:{moment}", []).append(place)
    chosen = sorted(dice.sample(range(len(by_batch)), min(count, len(by_batch))))
    places = [dice.choice(list(by_batch.values())[number]) for number in chosen]
    return [Stop(place, dice.choice([*range(size), "all"]), dice.choice(["sigterm", "file"])) for place in places]


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("size", [2, 4])
def test_two_hundred_stops_anywhere(job: Job, reference: Reference, size: int, number: int) -> None:
    """Twenty a job, with another chance each: any moment, any rank or all, any way."""
    env = {"EPOCHS": {2: "3", 4: "5"}[size], "WORKERS": str(number % 2)}
    whole = reference(size, **env)
    # Notice behind the last batch of all may find the script at its end: that is as good, but no stop.
    moments = whole.moments[: whole.moments.index(f"{int(env['EPOCHS']) - 1}:over")]
    stops = any_stops(moments, size, 20, seed=f"{size} {number}")
    assert len(stops) == 20

    story = stopped(job.use(RANKED), size, stops, **env)

    assert_nothing_shows(story, whole, epochs=int(env["EPOCHS"]))


# At any instant.


def stopped_from_outside(job: Job, size: int, count: int, *, seed: str, **env: str) -> RankStory:
    """Notice to some ranks or all, whatever they do at that instant."""
    dice, story = chance.dice(seed), RankStory()
    for turn in range(count):
        gang = job.gang(size, pods=size, **env)
        gang.wait_for(f"^trained {max(story.steps, default=0) + dice.randint(1, 3)} ", ranks=[dice.randrange(size)])
        time.sleep(dice.random() * 0.04)
        whom = sorted(dice.sample(range(size), dice.choice([1, 1, size])))
        if turn % 2:
            for pod in whom:
                gang.ask(pod)
        else:
            gang.kill(ranks=whom)
        step = left(gang)
        add_next_ranks(story, gang)
        assert step == max(story.steps), gang.text
        if turn % 2:
            assert_answered(gang, whom, step)
    add_last(story, job.gang(size, pods=size, **env))
    return story


@pytest.mark.parametrize("slow", [0, 1])
def test_stopped_at_any_instant_with_a_slow_rank(job: Job, reference: Reference, slow: int) -> None:
    """The others are ahead of it by all that they can be."""
    env = {"SLOW_RANK": str(slow), "SLOW_S": "0.03"}

    story = stopped_from_outside(job.use(RANKED), 2, 3, seed=f"slow {slow}", **env)

    assert_nothing_shows(story, reference(2))


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("workers", ["0", "2"])
def test_stopped_at_any_instant(job: Job, reference: Reference, size: int, workers: str) -> None:
    """Twelve times a job, with loader workers as well."""
    # Seven steps for each stop: some are trained before the notice is there, more of them on a slow machine.
    epochs = 7 * size
    env = {"EPOCHS": str(epochs), "WORKERS": workers, "SLOW_RANK": str(size - 1), "SLOW_S": "0.01"}

    story = stopped_from_outside(job.use(RANKED), size, 12, seed=f"{size} {workers}", **env)

    assert_nothing_shows(story, reference(size, EPOCHS=str(epochs)), epochs=epochs)


# Before there is anything to save.


def test_notice_while_ranks_still_start(job: Job, reference: Reference) -> None:
    """The hook asks before its rank listens, and another rank comes later still: all leave, and nothing is lost."""
    job.use(RANKED)
    story = RankStory()
    for pod, late in ((0, 1), (1, 0)):
        gang = job.gang(2, pods=2, each={late: {"START_DELAY_S": "0.6"}})
        gang.ask(pod)
        assert left(gang) is None
        assert_nobody_trained(gang)
        assert_answered(gang, [pod], None)
    assert job.ckpts() == []

    late = job.gang(2, pods=2, delay_s=[0.5, 0.0], AT="0:1:drawn", AT_RANK="1")
    step = left(late)
    add_next_ranks(story, late)
    assert step == max(story.steps, default=None)
    add_last(story, job.gang(2, pods=2, delay_s=[0.0, 0.5]))

    assert_nothing_shows(story, reference(2))


def assert_nobody_trained(gang: Gang) -> None:
    assert all("\ntrained " not in text for text in gang.texts), gang.text


SLOW_LOAD = """
import migrator.session.restore as loading
read_part = loading.read_part

def reads(*args, **named):
    print("loads")
    if is_me("LOADS_SLOWLY"):
        time.sleep(0.5)
    return read_part(*args, **named)

loading.read_part = reads
"""


@pytest.mark.parametrize("told", [0, 1])
def test_notice_while_a_rank_loads(job: Job, reference: Reference, told: int) -> None:
    """It has loaded, or waits for the other one to have done so: all leave with the ckpt that is there, untouched."""
    job.write(RANKED.read_text().replace("\nmigrator.listening(", f"{SLOW_LOAD}\nmigrator.listening("))
    story = RankStory()
    first = job.gang(2, pods=2, AT="0:3:done", AT_RANK="1")
    step = left(first)
    add_next_ranks(story, first)

    for slow in (0, 1):
        gang = job.gang(2, pods=2, LOADS_SLOWLY=str(slow))
        gang.wait_for("^loads")
        gang.kill(ranks=[told])
        assert left(gang) == step, gang.text
        assert_nobody_trained(gang)
    assert len(job.ckpts()) == 1
    add_last(story, job.gang(2, pods=2))

    assert_nothing_shows(story, reference(2))


# Saves that are not the last one.


def newest_step(job: Job) -> int:
    """Of the ckpts on the volume, each of which is whole to the last byte."""
    return max(whole_steps(job), default=0)


def wait_for_one_behind(step: int, job: Job, gang: Gang) -> None:
    until(lambda: newest_step(job) > step, f"a ckpt behind step {step}", 20.0, lambda: gang.text)


def killed_all(job: Job, size: int, count: int, *, seed: str, **env: str) -> RankStory:
    """Each life is killed without warning at some instant; the next one goes on from the newest ckpt."""
    dice, story, newest = chance.dice(seed), RankStory(), 0
    epochs = int(env.get("EPOCHS", "3")) // (count + 1)
    for turn in range(count):
        # However late it is killed, there is something left to train, and to save, for the lives behind it.
        gang = job.gang(size, **env, STAYS=f"{(turn + 1) * epochs}:over")
        wait_for_one_behind(newest, job, gang)
        time.sleep(dice.random() * 0.2)
        gang.kill(9)
        assert gang.wait() == [-9] * size, gang.text
        assert story.add(gang) == newest
        newest = newest_step(job)
    last = job.gang(size, **env)
    assert last.wait() == [0] * size, last.text
    assert story.add(last) == newest
    assert last.events("save_failed") == []
    return story


@pytest.mark.parametrize("size", [2, 4])
def test_killed_without_warning_it_goes_on_from_the_newest_save_of_every_third_step(
    job: Job, reference: Reference, size: int
) -> None:
    """Every third step is saved by all ranks or by none, and no ckpt is ever torn."""
    env = {"MIGRATOR_EVERY": "3", "MIGRATOR_KEEP": "1000", "SLOW_RANK": "1", "SLOW_S": "0.02"}

    story = killed_all(job.use(RANKED), size, 2, seed=f"third {size}", **env)

    assert_nothing_shows(story, reference(size))
    steps = {step for _, step in map(parse_ckpt_name, job.ckpts())}  # type: ignore[misc]
    assert steps == set(range(3, len(story.steps) + 1, 3))


def test_killed_without_warning_it_goes_on_from_the_newest_save_by_the_clock(job: Job, reference: Reference) -> None:
    """Rank 0's clock says when; the step is told to all before any of them is there."""
    env = {"MIGRATOR_EVERY": "0.5s", "MIGRATOR_KEEP": "1000", "EPOCHS": "9", "SLOW_RANK": "1", "SLOW_S": "0.08"}

    story = killed_all(job.use(RANKED), 2, 2, seed="second", **env)

    assert_nothing_shows(story, reference(2, EPOCHS="9"), epochs=9)


@pytest.mark.parametrize("who", ["all", "0", "1"])
def test_save_ckpt_on_all_ranks_or_on_one(job: Job, reference: Reference, who: str) -> None:
    """It returns when all ranks have saved that very step, and the next life has it."""
    env = {"SAVE_RANK": who, "SAVE_STEPS": "2 5"}
    story = RankStory()
    first = job.use(RANKED).gang(2, **env, SLOW_RANK="1", SLOW_S="0.02")
    asking = [0, 1] if who == "all" else [int(who)]
    first.wait_for("^saved 000001-000000000005$", asking)
    first.wait_for("^trained 6 ")
    first.kill(9)
    first.wait()
    story.add(first)
    assert job.ckpts() == ["000001-000000000002", "000001-000000000005"]
    assert first.events("save_failed") == []

    last = job.gang(2)
    assert last.wait() == [0, 0], last.text
    assert story.add(last) == 5

    assert_nothing_shows(story, reference(2))
