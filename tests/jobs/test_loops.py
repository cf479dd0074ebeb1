"""The training loop as people write it: right as it stands, or refused with advice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from migrator.notice.signal_file import SignalFile
from tests.support.harness import Job, Process
from tests.support.job_history import (
    Story,
    assert_as_if_nothing_had_happened,
    assert_each_sample_once,
    stopped,
    unstopped,
)

SAMPLES = 24
GROUND = "from tests.support.scripts.ground import *\n"


def check(
    job: Job, places: Sequence[str], *, epochs: int = 2, samples: int | None = SAMPLES, **env: str
) -> tuple[Story, Story]:
    """Stopped at these moments the job trains each sample once an epoch, and ends as if nothing had happened."""
    reference = unstopped(job, **env)
    story = stopped(job, places, **env)
    assert_as_if_nothing_had_happened(story, reference)
    if samples is not None:
        assert_each_sample_once(story, epochs=epochs, samples=samples)
    return story, reference


def assert_refused(life: Process, *texts: str) -> None:
    """It ends by a `UsageError` that says all this."""
    assert life.wait() == 1, life.text
    message = life.text[life.text.rindex("migrator.errors.") :]
    assert message.startswith(("migrator.errors.UsageError", "migrator.errors.ResumeIgnored")), life.text
    for text in texts:
        assert text in message


def leaving(life: Process) -> dict[str, str]:
    (event,) = life.events("leaving")
    return event


# How a loop is left.


BREAK = """
from tests.support.scripts.ground import *
begin()
for epoch in epochs(2):
    for x, ids in migrator.batches(loader):
        train(x, ids)
        if state["step"] == 3:
            break
    moment(f"behind {epoch}")
    if os.environ.get("AT") == f"behind {epoch}":
        time.sleep(LONG_S)  # the next loop's beginning would be another safe point
finish()
"""


@pytest.mark.parametrize("kind", ["sampler=sampler", "shuffle=True"])
@pytest.mark.parametrize("place", ["step 2", "step 3", "behind 0", "step 4"])
def test_a_loop_that_was_left_by_break_is_over(job: Job, kind: str, place: str):
    """What was trained before it counts, and the next life trains nothing more of that epoch."""
    job.write(BREAK.replace("begin()", f"loader = DataLoader(data, batch_size=4, {kind})\nbegin()"))
    story, _ = check(job, [place], samples=None)

    assert len(story.trained) == 9
    assert len([i for i in story.ids if i < 1000]) == 12


def test_a_loop_that_is_left_before_the_batch_at_hand_is_trained_is_over(job: Job):
    """Whatever made it end need not be true again in the next life."""
    job.write("""
        from tests.support.scripts.ground import *
        is_enough = False
        begin()
        for epoch in epochs(2):
            for x, ids in migrator.batches(loader):
                if is_enough:
                    break
                train(x, ids)
                is_enough = state["step"] == 3
            is_enough = False
            moment(f"behind {epoch}")
            if os.environ.get("AT") == f"behind {epoch}":
                time.sleep(LONG_S)
        finish()
        """)
    story, _ = check(job, ["behind 0"], samples=None)

    assert len(story.trained) == 9


def test_a_look_at_the_first_batch_trains_nothing_and_costs_nothing(job: Job):
    """Shapes are looked up, in the first life and in each later one: the epoch goes on where it was."""
    for kind in ("sampler=sampler", "shuffle=True"):
        job.write(f"""
            from tests.support.scripts.ground import *
            loader = DataLoader(data, batch_size=4, {kind})
            begin()
            batches = migrator.batches(loader)
            before = torch.get_rng_state()
            for x, ids in batches:
                break
            print("shape", *x.shape)
            torch.set_rng_state(before)
            for epoch in epochs(2):
                for x, ids in batches:
                    train(x, ids)
            finish()
            """).env["MIGRATOR_JOB"] = kind[:4]
        check(job, ["step 2", "step 8"])


TWO = """
from tests.support.scripts.ground import *
other = nn.Linear(4, 1)
second = torch.optim.SGD(other.parameters(), lr=0.01)
begin(other=other, second=second)
def trouble(place):
    if state["step"] == 3 and place == os.environ["WHERE"]:
        stop()
        raise ValueError("trouble")
for x, ids in migrator.batches(loader):
    loss = model(x).square().mean() + other(x).square().mean()
    loss.backward()
    trouble("before")
    optimizer.step()
    trouble("between")
    second.step()
    trained(ids, loss.detach())
    trouble("behind")
"""


def test_an_exception_where_the_state_is_whole_is_saved(job: Job):
    """Before the first step of its iteration that is the safe point before."""
    life = job.write(TWO).run(WHERE="before")

    assert life.wait() == 143, life.text
    assert "ValueError: trouble" in life.text
    assert leaving(life)["why"] == "saved"
    assert leaving(life)["step"] == "3"


@pytest.mark.parametrize("where", ["between", "behind"])
def test_an_iteration_that_an_exception_left_is_not_saved_but_answered(job: Job, where: str):
    """One optimizer stepped and the other did not, or what comes behind both was not done: nobody can tell."""
    life = job.write(TWO).run(WHERE=where)

    assert life.wait() == 143, life.text
    assert job.ckpts() == []
    answer = SignalFile(job.signal).read()
    assert answer is not None
    assert answer.word == "init"
    assert "before it reached a safe point" in answer.fields["error"]


@pytest.mark.parametrize(("trouble", "code"), [("1 / 0", 1), ("os.kill(os.getpid(), signal.SIGINT)", -2)])
def test_an_exception_without_notice_is_the_scripts_own(job: Job, trouble: str, code: int):
    """An error or Ctrl-C ends the run as it would without us: its code, no ckpt, no signal file left."""
    life = job.write(f"""
        from tests.support.scripts.ground import *
        begin()
        for x, ids in migrator.batches(loader):
            train(x, ids)
            if state["step"] == 3:
                {trouble}
        """).run()

    assert life.wait() == code, life.text
    assert job.ckpts() == []
    assert not job.signal.exists()
    assert life.text.count("Traceback") == 1, life.text


def test_an_error_of_the_loader_is_raised_where_nobody_leaves(job: Job):
    """Only while a signal is pending are the loader's errors swallowed."""
    life = job.write("""
        from tests.support.scripts.ground import *
        class Broken(torch.utils.data.Dataset):
            def __len__(self):
                return 24
            def __getitem__(self, i):
                raise OSError("no such sample")
        begin()
        for x in migrator.batches(DataLoader(Broken(), sampler=sampler)):
            pass
        """).run()

    assert life.wait() == 1
    assert "no such sample" in life.text


def test_a_generator_that_is_never_exhausted(job: Job):
    """Counting steps instead of epochs over an endless generator works, and ends without a murmur."""
    job.write("""
        from tests.support.scripts.ground import *
        begin()
        def cycle():
            while True:
                sampler.set_epoch(state["epoch"])
                yield from migrator.batches(loader)
                state["epoch"] += 1
        batches = cycle()
        while state["step"] < 15:
            train(*next(batches))
        finish()
        """)
    story, _ = check(job, ["step 4", "step 6", "step 7", "step 14"], samples=None)

    assert len(set(story.ids)) == len(story.ids) == 60
    assert "Exception ignored" not in story.lives[-1].text
    assert "Traceback" not in story.lives[-1].text


def test_steps_that_never_come_by_a_safe_point_are_named(job: Job):
    """A loop that was left half way and is held on to keeps all that follow from being followed: said in time."""
    life = job.write("""
        from tests.support.scripts.ground import *
        begin()
        held = iter(migrator.batches(loader))
        x, ids = next(held)
        for _ in range(300):
            train(x, ids)
        """).run()

    assert life.wait() == 0, life.text
    assert len(life.events("no_safe_point")) == 1


# Loops in loops, loops beside loops.


@pytest.mark.parametrize("kind", ["sampler=sampler", "shuffle=True"])
def test_an_evaluation_inside_the_loop(job: Job, kind: str):
    """It may go through batches() as well: only the outer loop makes safe points."""
    job.write(f"""
        from tests.support.scripts.ground import *
        loader = DataLoader(data, batch_size=4, {kind})
        held_out = DataLoader(data, batch_size=8, shuffle=True)
        begin()
        for epoch in epochs(2):
            for x, ids in migrator.batches(loader):
                train(x, ids)
                if state["step"] % 2 == 0:
                    model.eval()
                    for i, (y, _) in enumerate(migrator.batches(held_out)):
                        moment(f"evaluation {{state['step']}} {{i}}")
                        model(y)
                    model.train()
        finish()
        """)
    check(job, ["evaluation 2 1", "step 4", "evaluation 8 0"])


@pytest.mark.parametrize("kind", ["sampler=sampler", "shuffle=True"])
def test_evaluations_before_and_behind_the_loop(job: Job, kind: str):
    """Through batches() or not, they leave no trace: what lies between two loops is done once as far as it counts."""
    job.write(f"""
        from tests.support.scripts.ground import *
        loader = DataLoader(data, batch_size=4, {kind})
        held_out = DataLoader(data, batch_size=8, shuffle=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
        begin(schedule=schedule)
        def evaluate(name):
            model.eval()
            seen = 0
            for x, _ in migrator.batches(held_out):
                moment(f"{{name}} {{seen}}")
                seen += len(x)
                model(x)
            model.train()
            print(name, "saw", seen)
        torch.get_rng_state()
        first = torch.get_rng_state()
        evaluate("first look")
        torch.set_rng_state(first)
        for epoch in epochs(3):
            for x, ids in migrator.batches(loader):
                train(x, ids)
            schedule.step()
            evaluate(f"epoch {{epoch}}")
        print("evaluated", 9, optimizer.param_groups[0]["lr"])
        finish()
        """)
    story, _ = check(job, ["step 3", "epoch 0 8", "epoch 1 0", "step 13"], epochs=3)

    for life in story.lives:
        assert "first look saw 24" in life.text


@pytest.mark.parametrize("kind", ["sampler=sampler", "shuffle=True"])
def test_two_loaders_in_turn_in_one_epoch(job: Job, kind: str):
    """First the one, then the other, as a GAN may be trained: each loop goes on in its own middle."""
    job.write(f"""
        from tests.support.scripts.ground import *
        others = torch.utils.data.TensorDataset(torch.randn(12, 4), torch.arange(100, 112))
        loader = DataLoader(data, batch_size=4, {kind})
        other = DataLoader(others, batch_size=4, shuffle=True)
        begin()
        for epoch in epochs(2):
            for x, ids in migrator.batches(loader):
                train(x, ids)
            moment(f"between {{epoch}}")
            for x, ids in migrator.batches(other):
                train(x, ids)
        finish()
        """)
    story, _ = check(job, ["step 4", "between 0", "step 7", "step 11", "step 16"], samples=None)

    both = [*range(24), *range(100, 112)]
    assert sorted(story.ids) == [1000 * epoch + i for epoch in range(2) for i in both]


def test_a_loop_that_the_next_life_does_not_need_is_not_mixed_up(job: Job):
    """A warm-up over another loader is not repeated by the script; the epoch goes on all the same."""
    job.write("""
        from tests.support.scripts.ground import *
        state["is_warm"] = False
        begin()
        if not state["is_warm"]:
            warm = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.arange(100, 108))
            for x, ids in migrator.batches(DataLoader(warm, batch_size=4, shuffle=True)):
                train(x, ids)
            state["is_warm"] = True
        for epoch in epochs(2):
            for x, ids in migrator.batches(DataLoader(data, batch_size=4, shuffle=True)):
                train(x, ids)
        finish()
        """)
    story, _ = check(job, ["step 5", "step 7", "step 10"], samples=None)

    assert sorted(story.ids) == [*range(24), *range(100, 108), *range(1000, 1024)]


def test_a_loader_made_anew_for_each_epoch(job: Job):
    """It takes the place of the one before it, and an evaluation's likewise."""
    job.write("""
        from tests.support.scripts.ground import *
        begin()
        def train_all():
            loader = DataLoader(data, batch_size=4, shuffle=True)
            for x, ids in migrator.batches(loader):
                train(x, ids)
        def evaluate():
            loader = DataLoader(data, batch_size=8)
            for i, (x, _) in enumerate(migrator.batches(loader)):
                moment(f"evaluation {state['epoch']} {i}")
        for epoch in epochs(4):
            train_all()
            evaluate()
        finish()
        """)
    check(job, ["step 2", "evaluation 1 1", "step 15", "step 21"], epochs=4)


SIDE_BY_SIDE = "one loader of the two"


@pytest.mark.parametrize(
    "loop",
    [
        "for (x, ids), _ in zip(migrator.batches(loader), migrator.batches(other)): train(x, ids)",
        "it = iter(migrator.batches(other))\nfor x, ids in migrator.batches(loader): next(it); train(x, ids)",
        "one, two = map(iter, map(migrator.batches, (loader, other)))\nfor _ in range(4): train(*next(one)); next(two)",
    ],
)
def test_two_loops_side_by_side_are_refused(job: Job, loop: str):
    """The place of the second one would be lost; it is said at the second batch, before any harm is done."""
    life = job.write(GROUND + "other = DataLoader(data, batch_size=2)\nbegin()\n" + loop).run()

    assert_refused(life, "two loops go on side by side", SIDE_BY_SIDE)
    assert "trained 3" not in life.text


@pytest.mark.parametrize(
    "loader", ["zip(loader, loader)", "enumerate(loader)", "iter(loader)", "(b for b in loader)", "map(id, loader)"]
)
def test_what_can_be_iterated_only_once_is_refused(job: Job, loader: str):
    """batches() goes around the loader, other things around batches()."""
    life = job.write(GROUND + f"begin()\nfor batch in migrator.batches({loader}): pass").run()

    assert_refused(life, "only once", "enumerate(migrator.batches(loader))")


@pytest.mark.parametrize(
    ("head", "batch"),
    [
        ("for i, (x, ids) in enumerate(migrator.batches(loader)):", "i"),
        ("for (x, ids), i in zip(migrator.batches(loader), range(100)):", "i"),
        ("for x, ids in tqdm(migrator.batches(loader), disable=True):", "0"),
    ],
)
def test_around_batches_anything_goes(job: Job, head: str, batch: str):
    """enumerate, zip with something else, a progress bar."""
    job.write(f"""
        from tests.support.scripts.ground import *
        from tqdm import tqdm
        begin()
        for epoch in epochs(2):
            {head}
                assert {batch} < 6
                train(x, ids)
        finish()
        """)
    check(job, ["step 2", "step 9"])


# How batches are taken.


def test_taking_two_batches_before_training_one_is_named(job: Job):
    """A loop that looks ahead would lose the batch that it holds back."""
    life = job.write("""
        from tests.support.scripts.ground import *
        begin()
        def ahead(batches):
            batches = iter(batches)
            held = next(batches)
            for following in batches:
                yield held
                held = following
            yield held
        for x, ids in ahead(migrator.batches(loader)):
            train(x, ids)
        """).run()

    assert life.wait() == 0, life.text
    assert "train each batch before taking the next" in life.events("batch_unused")[0]["means"]


def test_a_list_of_all_batches_is_named_and_goes_on_by_epochs(job: Job):
    """There is no safe point in such an epoch, only before it: the save waits for that."""
    job.write("""
        from tests.support.scripts.ground import *
        begin()
        for epoch in epochs(3):
            for x, ids in list(migrator.batches(loader)):
                train(x, ids)
        finish()
        """)
    reference = unstopped(job)
    life = job.run(AT="step 8")
    assert life.wait() == 143, life.text
    story = Story()
    story.add(life)
    last = job.run()
    assert last.wait() == 0, last.text
    story.add(last)

    assert len(life.events("batch_unused")) == 1
    assert last.text.startswith("resumed 12") or "\nresumed 12\n" in last.text
    assert_as_if_nothing_had_happened(story, reference)
    assert_each_sample_once(story, epochs=3, samples=SAMPLES)


def test_an_evaluation_is_not_named_for_computing_nothing_back(job: Job):
    """Batches that are only looked at, by a model that is not training, are nobody's mistake."""
    life = job.write("""
        from tests.support.scripts.ground import *
        begin()
        model.eval()
        for x, ids in migrator.batches(loader):
            model(x)
        """).run()

    assert life.wait() == 0, life.text
    assert life.events("batch_unused") == []


def test_forgotten_set_epoch_is_named_and_the_epochs_still_differ(job: Job):
    """The sampler goes on to the next epoch by itself, stopped or not."""
    job.write("""
        from tests.support.scripts.ground import *
        begin()
        while state["epoch"] < 3:
            for x, ids in migrator.batches(loader):
                train(x, ids)
            moment(f"end {state['epoch']}")
            state["epoch"] += 1
        finish()
        """)
    story, reference = check(job, ["step 4", "end 0", "step 7", "step 15"], epochs=3)

    assert "set_epoch" in reference.lives[0].events("epoch_advanced")[0]["means"]
    orders = [[i % 1000 for i in story.ids[24 * epoch :][:24]] for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2]


def test_a_script_that_counts_its_epochs_by_steps_goes_on_behind_an_epoch_s_end(job: Job):
    """Stopped there, its next life is in the next epoch at once: a round of its own, with the draws of one."""
    job.write("""
        from tests.support.scripts.ground import *
        begin()
        while state["step"] < 18:
            state["epoch"] = state["step"] // 6
            sampler.set_epoch(state["epoch"])
            for x, ids in migrator.batches(loader):
                train(x, ids)
        finish()
        """)
    check(job, ["step 5", "step 6", "step 12", "step 13"], epochs=3)


def test_len_is_the_whole_epoch_in_its_middle_too(job: Job):
    """Schedules and progress bars count on it."""
    job.write("""
        from tests.support.scripts.ground import *
        begin()
        print("before", len(migrator.batches(loader)))
        for x, ids in (batches := migrator.batches(loader)):
            assert len(batches) == len(loader) == 6
            train(x, ids)
        print("behind", len(batches))
        finish()
        """)
    story, _ = check(job, ["step 4"], epochs=1)

    for life in story.lives:
        assert "before 6" in life.text
    assert "behind 6" in story.lives[-1].text


def test_gradients_that_are_carried_over_into_the_next_epoch_are_not_lost(job: Job):
    """An epoch of six batches, a step every four: what was accumulated is part of no ckpt, so none is made there."""
    job.write("""
        from tests.support.scripts.ground import *
        state["batch"], state["ids"] = 0, []
        begin()
        for epoch in epochs(4):
            moment(f"start {epoch}")
            for x, ids in migrator.batches(loader):
                state["batch"] += 1
                moment(f"batch {state['batch']}")
                state["ids"] += [1000 * epoch + i for i in ids.tolist()]
                model(x).square().mean().backward()
                if state["batch"] % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    state["step"] += 1
                    print("trained", state["step"], "-", "ids", *state["ids"])
                    state["ids"] = []
        finish()
        """)
    check(job, ["start 1", "batch 8", "batch 14", "start 3", "batch 20"], epochs=4)


# Loaders of all kinds.


@pytest.mark.parametrize(
    ("loader", "samples", "places"),
    [
        ("DataLoader(more, batch_size=4, sampler=ElasticSampler(more, seed=1), drop_last=True)", 24, None),
        ("DataLoader(more, batch_size=4, sampler=ElasticSampler(more, seed=1))", 26, None),
        ("DataLoader(more, batch_size=4, sampler=ElasticSampler(more, drop_last=True, rank=0, size=4))", 6, ["step 1"]),
        ("DataLoader(more, batch_size=4, shuffle=True, drop_last=True)", 24, None),
        ("DataLoader(data, batch_size=None, sampler=ElasticSampler(data, seed=1))", 24, ["step 7", "behind 0"]),
        ("DataLoader(data, batch_size=None, shuffle=True)", 24, ["step 7", "behind 0", "step 30"]),
        ("DataLoader(data, sampler=WeightedRandomSampler([1.0] * 24, 24, replacement=False), batch_size=4)", 24, None),
        ("DataLoader(data, batch_sampler=Pairs())", 24, ["step 5", "behind 0", "step 20"]),
        ("DataLoader(Stream(), batch_size=4)", 24, None),
        ("DataLoader(Stream(), batch_size=4, num_workers=2)", 24, None),
        ("[data[4 * i : 4 * i + 4] for i in range(6)]", 24, None),
        ("Fresh()", 24, None),
    ],
)
def test_loaders_of_all_kinds(job: Job, loader: str, samples: int, places: list[str] | None):
    """With ElasticSampler or without, dropping the last batch, unbatched, streamed, of the script's own."""
    job.write(f"""
        from tests.support.scripts.ground import *
        import random
        from torch.utils.data import IterableDataset, WeightedRandomSampler, get_worker_info
        more = TensorDataset(torch.randn(26, 4), torch.arange(26))
        class Stream(IterableDataset):
            def __iter__(self):
                info = get_worker_info()
                part, parts = (info.id, info.num_workers) if info else (0, 1)
                yield from (data[i] for i in range(part, SAMPLES, parts))
        class Pairs:
            def __len__(self):
                return 12
            def __iter__(self):
                order = random.sample(range(SAMPLES), SAMPLES)
                return (order[i : i + 2] for i in range(0, SAMPLES, 2))
        class Fresh:
            def __iter__(self):
                order = torch.randperm(SAMPLES).split(4)
                self.batches = iter([data[i] for i in order])
                return self
            def __next__(self):
                return next(self.batches)
        random.seed(3)
        nn.BatchNorm1d.forward = lambda self, x: x
        loader = {loader}
        own = getattr(loader, "sampler", None)
        begin(own=own if isinstance(own, ElasticSampler) else None)
        for epoch in epochs(2):
            if isinstance(own, ElasticSampler):
                own.set_epoch(epoch)
            for x, ids in migrator.batches(loader):
                train(x, ids)
            moment(f"behind {{epoch}}")
        finish()
        """)
    story, _ = check(job, places or ["behind 0", "step 8"], samples=None)

    for epoch in range(2):
        ids = [i for i in story.ids if i // 1000 == epoch]
        assert len(ids) == len(set(ids)) == samples


def test_another_batch_size_needs_an_elastic_sampler(job: Job):
    """With one the epoch goes on exactly; without, in mid-epoch, it is refused instead of guessed."""
    script = """
        from tests.support.scripts.ground import *
        loader = DataLoader(data, batch_size=int(os.environ["BATCH"]), {})
        begin()
        for epoch in epochs(2):
            for x, ids in migrator.batches(loader):
                train(x, ids)
        finish()
        """
    story = Story()
    job.write(script.format("sampler=sampler"))
    for batch, at in [("4", "step 3"), ("3", "step 5"), ("6", "")]:
        life = job.run(BATCH=batch, AT=at)
        assert life.wait() == (143 if at else 0), life.text
        story.add(life)
    assert_each_sample_once(story, epochs=2, samples=SAMPLES)

    job.write(script.format("shuffle=True")).env["MIGRATOR_JOB"] = "other"
    assert job.run(BATCH="4", AT="step 3").wait() == 143
    assert_refused(job.run(BATCH="3"), "the batch size is 3 here, 4 in the ckpt", "ElasticSampler")


def test_a_ckpt_from_the_middle_of_a_loop_that_is_gone_is_refused(job: Job):
    """Another loader than the one that was interrupted: begun knowingly at its start, or not at all."""
    job.write("""
        from tests.support.scripts.ground import *
        loader = DataLoader(data, batch_size=4, **eval(os.environ["KIND"]))
        begin()
        for x, ids in migrator.batches(loader):
            train(x, ids)
        """)
    assert job.run(KIND="{'shuffle': True}", AT="step 2").wait() == 143

    assert_refused(job.run(KIND="{}"), "RandomSampler", "SequentialSampler", "train.py, line 5", "MIGRATOR_LOOPS=anew")
    life = job.run(KIND="{}", MIGRATOR_LOOPS="anew")
    assert life.wait() == 0, life.text
    assert "trained 8 " in life.text
    assert "RandomSampler" in life.events("epoch_repeated")[0]["loader"]


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        ("DataLoader(data, batch_sampler=Own(sampler))", "Own"),
        ("DataLoader(data, batch_sampler=BatchSampler(sampler, 4, False))", "BatchSampler"),
        ("DataLoader(data, sampler=BatchSampler(sampler, 4, False), batch_size=None)", "BatchSampler"),
    ],
)
def test_batch_samplers_over_an_elastic_sampler_are_refused(job: Job, loader: str, text: str):
    """Of those the batch sizes are not known; there is no need for one where DataLoader makes its own."""
    job.write(f"""
        from tests.support.scripts.ground import *
        from torch.utils.data import BatchSampler
        class Own:
            def __init__(self, sampler):
                self.sampler = sampler
            def __len__(self):
                return 12
            def __iter__(self):
                order = list(self.sampler)
                return (order[i : i + 2] for i in range(0, len(order), 2))
        loader = {loader}
        begin()
        for epoch in epochs(2):
            for x, ids in migrator.batches(loader):
                train(x, ids)
        finish()
        """)
    assert_refused(job.run(), text, "sampler=..., batch_size=...")


@pytest.mark.parametrize(
    "loader", ["loader", "DataLoader(data, sampler=BatchSampler(sampler, 4, False), batch_size=None)"]
)
def test_an_elastic_sampler_that_is_not_registered_is_refused(job: Job, loader: str):
    """Its place would not be saved."""
    life = job.write(f"""
        from tests.support.scripts.ground import *
        from torch.utils.data import BatchSampler
        begin(sampler=None)
        for x, ids in migrator.batches({loader}):
            train(x, ids)
        """).run()

    assert_refused(life, "is not registered", 'migrator.register("sampler", sampler)')
    assert "trained" not in life.text


# By hand.


def test_safe_points_by_hand(job: Job):
    """A loop of one's own, whose place is registered state."""
    job.write("""
        from tests.support.scripts.ground import *
        begin()
        while state["step"] < 12:
            x, ids = data[2 * state["step"] : 2 * state["step"] + 2]
            train(x, ids)
            moment(f"before {state['step']}")
            migrator.safe_point()
            moment(f"behind {state['step']}")
        finish()
        """)
    check(job, ["step 2", "before 4", "behind 6", "step 9"], epochs=1)


@pytest.mark.parametrize("kind", ["sampler=sampler", "shuffle=True"])
def test_a_safe_point_by_hand_inside_and_between_epochs(job: Job, kind: str):
    """Inside it counts the batch at hand; between epochs the registered counters say what comes next."""
    job.write(f"""
        from tests.support.scripts.ground import *
        loader = DataLoader(data, batch_size=4, {kind})
        begin()
        for epoch in epochs(3):
            for x, ids in migrator.batches(loader):
                train(x, ids)
                migrator.safe_point()
                moment(f"inside {{state['step']}}")
            state["epoch"] = epoch + 1
            migrator.safe_point()
            moment(f"between {{epoch}}")
            if os.environ.get("AT") == f"between {{epoch}}":
                time.sleep(LONG_S)  # the next loop's beginning would be another safe point
            state["epoch"] = epoch
        finish()
        """)
    check(job, ["inside 3", "step 5", "between 0", "step 8", "between 1"], epochs=3)


def test_save_ckpt_in_all_places(job: Job):
    """In the body, between epochs, before the first step, waiting or not: the newest safe point, each once."""
    job.write("""
        from tests.support.scripts.ground import *
        begin()
        print("fresh", migrator.save_ckpt())
        for epoch in epochs(2):
            for x, ids in migrator.batches(loader):
                if state["step"] == 3:
                    print("before the step", migrator.save_ckpt())
                train(x, ids)
                if state["step"] == 3:
                    print("behind the step", migrator.save_ckpt(), migrator.save_ckpt())
                if state["step"] == 5:
                    print("not waiting", migrator.save_ckpt(wait=False))
            print("between", epoch, migrator.save_ckpt())
        finish()
        """)
    life = job.run()

    assert life.wait() == 0, life.text
    assert "fresh None" in life.text
    assert "behind the step 000001-000000000003 000001-000000000003" in life.text
    assert "before the step 000001-000000000003" in life.text
    assert "not waiting None" in life.text
    assert "between 0 000001-000000000006" in life.text
    assert "between 1 000001-000000000012" in life.text
    assert [event["step"] for event in life.events("committed")] in (["3", "5", "6", "12"], ["3", "6", "12"])
    assert job.ckpts() == ["000001-000000000006", "000001-000000000012"]
    again = job.run()
    assert again.wait() == 0, again.text
    assert "fresh 000001-000000000012" in again.text


def test_after_a_crash_it_goes_on_from_save_ckpt(job: Job):
    """Saved in the body, right behind the step: that batch is trained, the next one is not."""
    job.write("""
        from tests.support.scripts.ground import *
        begin()
        for epoch in epochs(2):
            for x, ids in migrator.batches(loader):
                train(x, ids)
                if state["step"] in (4, 6, 9):
                    migrator.save_ckpt()
                    if os.environ.get("CRASH") == str(state["step"]):
                        os.kill(os.getpid(), signal.SIGKILL)
        finish()
        """)
    reference = unstopped(job)
    story = Story()
    for crash in ["4", "6", "9", ""]:
        life = job.run(CRASH=crash)
        assert life.wait() == (-9 if crash else 0), life.text
        story.add(life)

    assert_as_if_nothing_had_happened(story, reference)
    assert_each_sample_once(story, epochs=2, samples=SAMPLES)


def test_load_ckpt_twice_is_as_once(job: Job):
    """The second one finds the same ckpt and changes nothing."""
    job.write("""
        from tests.support.scripts.ground import *
        begin()
        if migrator.resume:
            print("again", migrator.load_ckpt())
        for x, ids in migrator.batches(loader):
            train(x, ids)
        finish()
        """)
    story, _ = check(job, ["step 3"], epochs=1)

    assert "again 000001-000000000003" in story.lives[-1].text


def test_a_ckpt_that_was_not_loaded_is_not_overtaken_by_fresh_weights(job: Job):
    """Neither by a step nor by a safe point of a script that forgot load_ckpt()."""
    job.write("""
        from tests.support.scripts.ground import *
        if os.environ.get("FORGETS"):
            type(migrator).resume = False
        begin()
        if os.environ.get("FORGETS") == "safe point":
            migrator.safe_point()
        for x, ids in migrator.batches(loader):
            train(x, ids)
        """)
    assert job.run(AT="step 3").wait() == 143
    for what in ("step", "safe point"):
        assert_refused(job.run(FORGETS=what), "did not load it", "MIGRATOR_RESUME=never")

    assert job.ckpts() == ["000001-000000000003"]


# The predecessor's four lines.


FOUR_LINES = """
from tests.support.scripts.ground import *
SHUFFLED = DataLoader(data, batch_size=4, shuffle=True)
net = {net}
migrator.register("model", net)
migrator.register("optimizer", optimizer)
migrator.register("state", state)
migrator.listening()
if migrator.resume:
    migrator.load_ckpt()
print("resumed", state["step"])
for epoch in epochs(2):
    for x, ids in SHUFFLED:
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trained(ids, loss.detach())
finish()
"""


@pytest.mark.parametrize("net", ["model", "torch.compile(model, backend='eager')"])
def test_the_four_lines_alone(job: Job, net: str):
    """Safe points are implied; the interrupted epoch is repeated from its start, and the log says so."""
    job.write(FOUR_LINES.format(net=net))
    first = job.run(AT="step 8")
    assert first.wait() == 143, first.text
    assert (leaving(first)["why"], leaving(first)["step"]) == ("saved", "8")
    assert "trained 9" not in first.text
    assert "migrator.batches(loader)" in first.events("implied_safe_points")[0]["means"]
    second = job.run()
    assert second.wait() == 0, second.text

    ids = [line.split(" ids ")[1] for line in second.text.splitlines() if line.startswith("trained")]
    assert sorted(int(i) for line in ids for i in line.split()) == list(range(1000, 1024))
    assert "trained 9 " in second.text


def test_the_four_lines_with_two_optimizers_are_told_what_is_missing(job: Job):
    """Where a step is whole cannot be told then; it is said early, not when the pod is taken."""
    life = job.write("""
        from tests.support.scripts.ground import *
        other = nn.Linear(4, 1)
        second = torch.optim.SGD(other.parameters(), lr=0.01)
        begin(other=other, second=second)
        for x, ids in loader:
            (model(x) + other(x)).sum().backward()
            optimizer.step()
            second.step()
            trained(ids)
        """).run()

    assert life.wait() == 0, life.text
    assert "migrator.batches()" in life.events("no_safe_point")[0]["means"]
