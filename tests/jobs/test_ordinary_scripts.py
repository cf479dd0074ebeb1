"""Training scripts as people write them, without a thought for us: resumed exactly, or refused by name at once."""

from __future__ import annotations

import re

import pytest

from tests.jobs.test_loops import GROUND, assert_refused, check
from tests.support.harness import Job
from tests.support.job_history import stopped, unstopped

# Counting batches.


@pytest.mark.parametrize("kind", ["sampler=sampler", "shuffle=True"])
def test_enumerate_goes_on_counting(job: Job, kind: str):
    """Accumulation by the index, a schedule by the fraction of the epoch, and a limit of batches."""
    job.write(f"""
        from tests.support.scripts.ground import *
        loader = DataLoader(data, batch_size=2, {kind})
        schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
        begin(schedule=schedule)
        state["ids"] = []
        for epoch in epochs(3):
            for i, (x, ids) in enumerate(migrator.batches(loader)):
                if i >= 10:
                    break
                model(x).square().mean().backward()
                state["ids"] += ids.tolist()
                if (i + 1) % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step(epoch + i / len(loader))
                    trained(state["ids"], optimizer.param_groups[0]["lr"])
                    state["ids"] = []
        finish()
        """)
    story, _ = check(job, ["step 2", "step 4", "step 5", "step 8", "step 14"], samples=None)

    assert len(story.trained) == 15
    assert len(set(story.ids)) == len(story.ids) == 60


@pytest.mark.parametrize(
    "head",
    [
        "for i, (x, ids) in enumerate(migrator.batches(loader), start=100):\n                i -= 100",
        "for i, (x, ids) in tqdm(enumerate(migrator.batches(loader)), disable=True):",
        "for i, (x, ids) in enumerate(tqdm(migrator.batches(loader), disable=True)):",
        "for i, (x, ids) in enumerate(tqdm(migrator.batches(loader), file=nowhere)):",
        "for i, (x, ids) in enumerate(map(tuple, migrator.batches(loader))):",
        "for (x, ids), i in zip(migrator.batches(loader), range(100)):",
        "for (x, ids), i in zip(migrator.batches(loader), itertools.count()):",
        "for (i, (x, ids)), j in zip(enumerate(migrator.batches(loader)), range(100)):\n                assert i == j",
        "for x, ids in (batches := migrator.batches(loader)):\n                i = batches.done",
    ],
)
def test_whatever_counts_around_batches_goes_on_counting(job: Job, head: str):
    job.write(f"""
        from tests.support.scripts.ground import *
        import io, itertools
        from tqdm import tqdm
        nowhere = io.StringIO()
        begin()
        for epoch in epochs(2):
            {head}
                print("count", i)
                train(x, ids)
        finish()
        """)
    story, _ = check(job, ["step 2", "step 9"])

    counts = [[int(i) for i in re.findall(r"^count (\d+)$", life.text, re.MULTILINE)] for life in story.lives]
    assert counts == [[0, 1], [2, 3, 4, 5, 0, 1, 2], [3, 4, 5]]


def test_the_index_on_another_number_of_ranks_is_that_of_the_epoch(job: Job):
    """Batches of another size, or shared by others: as many as would have been handed out here."""
    job.write("""
        from tests.support.scripts.ground import *
        loader = DataLoader(data, batch_size=int(os.environ["BATCH"]), sampler=sampler)
        begin()
        for i, (x, ids) in enumerate(batches := migrator.batches(loader)):
            print("count", i, batches.done)
            train(x, ids)
        print("done", batches.done)
        """)
    assert job.run(BATCH="4", AT="step 3").wait() == 143
    life = job.run(BATCH="3")

    assert life.wait() == 0, life.text
    assert re.findall(r"^count (.*)$", life.text, re.MULTILINE) == ["4 4", "5 5", "6 6", "7 7"]
    assert "\ndone 8\n" in life.text


def test_a_progress_bar_shows_where_the_epoch_is(job: Job):
    job.write(
        """
        from tests.support.scripts.ground import *
        from tqdm import tqdm
        begin()
        for x, ids in (bar := tqdm(migrator.batches(loader), mininterval=0, file=sys.stdout, ascii=True)):
            train(x, ids)
        print("shown", bar.n, bar.total, bar.initial)
        """.replace("import *", "import *; import sys", 1)
    )
    assert job.run(AT="step 4").wait() == 143
    life = job.run()

    assert life.wait() == 0, life.text
    assert "| 4/6 [" in life.text
    assert "| 5/6 [" in life.text
    assert "\nshown 6 6 4\n" in life.text
    assert "| 1/6 [" not in life.text


def test_a_generator_of_the_script_that_may_count_is_named(job: Job):
    """It cannot be seen whether it does, so it is said at the first resume in mid-epoch."""
    job.write("""
        from tests.support.scripts.ground import *
        def counted(batches):
            count = 0
            for batch in batches:
                yield count, batch
                count += 1
        begin()
        for i, (x, ids) in counted(migrator.batches(loader)):
            train(x, ids)
        """)
    first = job.run(AT="step 4")
    assert first.wait() == 143
    assert first.events("count_begins_anew") == []
    life = job.run()

    assert life.wait() == 0, life.text
    (event,) = life.events("count_begins_anew")
    assert event["what"] == "counted()"
    assert ".done" in event["means"]


@pytest.mark.parametrize(
    ("head", "text"),
    [
        ("for (x, ids), _ in zip(migrator.batches(loader), DataLoader(data, batch_size=2)): pass", "StackDataset"),
        ("for (x, ids), _ in zip(migrator.batches(loader), (i for i in range(9))): pass", "StackDataset"),
        ("for i, (x, ids) in zip(range(9), migrator.batches(loader)): pass", "Put batches() first"),
        ("for x, ids in itertools.islice(migrator.batches(loader), 3): pass", "if i >= n: break"),
        ("for x, ids in itertools.cycle(migrator.batches(loader)): pass", "itertools.cycle"),
        ("for (x, ids), _ in zip(migrator.batches(loader), migrator.batches(loader)): pass", "two loops go on"),
    ],
)
def test_what_would_begin_anew_beside_batches_is_refused_in_the_first_life(job: Job, head: str, text: str):
    """Before anything is trained, not at the resume."""
    assert_refused(job.write(GROUND + "import itertools\nbegin()\n" + head).run(), text)


def test_batches_in_a_side_thread_are_refused(job: Job):
    """What another thread fetched ahead is not trained yet."""
    life = job.write("""
        from tests.support.scripts.ground import *
        from concurrent.futures import ThreadPoolExecutor
        begin()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(next, iter(migrator.batches(loader))).result()
        """).run()

    assert_refused(life, "in the thread 'ThreadPoolExecutor", "main thread")


# Generators of the script's own.


def test_a_generator_of_both_the_order_and_the_loop(job: Job):
    """`DataLoader(generator=g)` and noise from the same g, registered or found along the loader."""
    for name in ("g", None):
        job.write(f"""
            from tests.support.scripts.ground import *
            g = torch.Generator().manual_seed(5)
            loader = DataLoader(data, batch_size=4, shuffle=True, generator=g)
            begin(**({{"g": g}} if {name!r} else {{}}))
            for epoch in epochs(2):
                for x, ids in migrator.batches(loader):
                    train(x + torch.randn(x.shape, generator=g), ids)
            finish()
            """).env["MIGRATOR_JOB"] = str(name)
        check(job, ["step 2", "step 3", "step 8"])


def test_a_framework_that_skips_by_itself(job: Job):
    """It draws while it skips, so the random states are put back when it is through."""
    job.write("""
        from tests.support.scripts.ground import *
        noise = torch.Generator().manual_seed(5)
        state["at"] = 0
        begin(noise=noise)
        for epoch in range(state["epoch"], 2):
            order = torch.Generator().manual_seed(epoch)
            for at, (x, ids) in enumerate(DataLoader(data, batch_size=4, shuffle=True, generator=order)):
                torch.rand(1), torch.rand(1, generator=noise)
                if at < state["at"]:
                    if at == state["at"] - 1:
                        assert migrator.restore_random()
                    continue
                state["at"] += 1
                train(x + torch.randn(x.shape, generator=noise), ids)
                migrator.safe_point()
            state["epoch"], state["at"] = epoch + 1, 0
            migrator.safe_point()
        assert migrator.restore_random() == migrator.resume
        print("final", state)
        """)
    check(job, ["step 2", "step 3", "step 8"])


def test_an_order_drawn_bit_by_bit_from_a_generator_that_the_loop_draws_from_is_refused(job: Job):
    """It cannot be drawn again without the loop."""
    job.write("""
        from tests.support.scripts.ground import *
        from torch.utils.data import RandomSampler
        g = torch.Generator().manual_seed(5)
        more = TensorDataset(torch.randn(80, 4), torch.arange(80))
        drawn = RandomSampler(more, replacement=True, generator=g)
        loader = DataLoader(more, batch_size=4, sampler=drawn)
        begin(g=g)
        for x, ids in migrator.batches(loader):
            train(x + torch.randn(x.shape, generator=g), ids)
        """)
    assert job.run(AT="step 3").wait() == 143

    assert_refused(job.run(), "batch_sampler.sampler.generator", "a generator of its own")


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("kind", ["sampler=sampler", "shuffle=True", "shuffle=True, num_workers=1"])
def test_a_dataset_that_augments_from_a_generator_of_its_own(job: Job, kind: str, registered: bool):
    if registered and "workers" in kind:
        pytest.skip("workers draw from copies; what is registered stays where it is")
    job.write(f"""
        from tests.support.scripts.ground import *
        import numpy as np
        class Noisy(torch.utils.data.Dataset):
            def __init__(self):
                self.rng = np.random.default_rng(3)
            def __len__(self):
                return SAMPLES
            def __getitem__(self, i):
                return data[i][0] + torch.from_numpy(self.rng.normal(size=4)).float(), data[i][1]
        noisy = Noisy()
        loader = DataLoader(noisy, batch_size=4, {kind})
        begin(**({{"rng": noisy.rng}} if {registered} else {{}}))
        for epoch in epochs(2):
            for x, ids in migrator.batches(loader):
                train(x, ids)
        finish()
        """)
    check(job, ["step 2", "step 3", "step 8"])


SHARD = """
from tests.support.scripts.ground import *
from torch.utils.data import BatchSampler, RandomSampler
class Shard:
    '''As libraries put one around a sampler that holds a generator two levels down.'''
    def __init__(self, inner):
        self.batch_sampler = inner
    def __len__(self):
        return len(self.batch_sampler)
    def __iter__(self):
        yield from self.batch_sampler
class Seeded:
    '''A sampler that counts its epochs itself.'''
    def __init__(self):
        self.epoch = 0
    def __len__(self):
        return SAMPLES
    def __iter__(self):
        g = torch.Generator().manual_seed(self.epoch)
        yield from torch.randperm(SAMPLES, generator=g).tolist()
        self.epoch += 1
class Shuffled(Seeded):
    '''Shuffles the order of the epoch before.'''
    def __init__(self):
        self.order, self.rng = list(range(SAMPLES)), __import__("random").Random(2)
    def __iter__(self):
        self.rng.shuffle(self.order)
        yield from list(self.order)
"""


@pytest.mark.parametrize(
    "inner",
    [
        "RandomSampler(data, generator=torch.Generator().manual_seed(4))",
        "Seeded()",
        "torch.utils.data.WeightedRandomSampler([1.0] * 24, 24, False, generator=torch.Generator().manual_seed(4))",
    ],
)
def test_generators_and_counters_deep_in_the_chain_of_samplers(job: Job, inner: str):
    job.write(f"""{SHARD}
loader = DataLoader(data, batch_sampler=Shard(BatchSampler({inner}, 4, False)))
begin()
for epoch in epochs(3):
    for x, ids in migrator.batches(loader):
        train(x, ids)
finish()
""")
    story, _ = check(job, ["step 2", "step 9", "step 15"], epochs=3)

    orders = {tuple(i % 1000 for i in story.ids[24 * epoch :][:24]) for epoch in range(3)}
    assert len(orders) == 3


@pytest.mark.parametrize(
    ("sampler", "text", "place"),
    [
        ("Shuffled()", "batch_sampler.sampler.order is not what it was", "step 8"),
        ("type('Stream', (Seeded,), {'__init__': lambda s: setattr(s, 'it', iter([1, 2]))})()", ".it is a list_it", ""),
    ],
)
def test_an_order_that_cannot_be_made_again_is_refused(job: Job, sampler: str, text: str, place: str):
    """By the name of what stands in the way."""
    job.write(f"""{SHARD}
loader = DataLoader(data, batch_size=4, sampler={sampler})
begin()
for epoch in epochs(3):
    for x, ids in migrator.batches(loader):
        train(x, ids)
""")
    if place:
        assert job.run(AT=place).wait() == 143

    assert_refused(job.run(), text, "load_state_dict()")


# Workers that persist.


@pytest.mark.parametrize("kind", ["sampler=sampler", "shuffle=True"])
def test_workers_that_persist_and_augment(job: Job, kind: str):
    """In each epoch they draw what workers of another life would, and so does an evaluation of their like."""
    job.write(f"""
        from tests.support.scripts.ground import *
        import random
        class Noisy(torch.utils.data.Dataset):
            def __len__(self):
                return SAMPLES
            def __getitem__(self, i):
                return data[i][0] + torch.randn(4) + random.random(), data[i][1]
        loader = DataLoader(Noisy(), batch_size=4, {kind}, num_workers=2, persistent_workers=True)
        held_out = DataLoader(data, batch_size=8, shuffle=True, num_workers=1, persistent_workers=True)
        begin()
        for epoch in epochs(3):
            for x, ids in migrator.batches(loader):
                train(x, ids)
            for x, _ in held_out:
                pass
            moment(f"evaluated {{epoch}}")
        finish()
        """)
    places = ["step 3", "evaluated 0", "step 8", "evaluated 1", "step 16"] if "shuffle" in kind else ["evaluated 1"]
    check(job, places, epochs=3)


def test_what_lives_on_in_workers_is_named(job: Job):
    """A generator of the dataset's own goes on in its copy in the worker, where nobody can read it."""
    life = job.write("""
        from tests.support.scripts.ground import *
        data.rng = torch.Generator()
        loader = DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)
        begin()
        for epoch in epochs(2):
            for x, ids in migrator.batches(loader):
                train(x, ids)
        """).run()

    assert life.wait() == 0, life.text
    (event,) = life.events("workers_persist")
    assert event["what"] == "dataset.rng"


# Which loop is which.


@pytest.mark.parametrize(
    "loop",
    [
        "range(0, SAMPLES, 4)",
        "[slice(i, i + 4) for i in range(0, SAMPLES, 4)]",
        "DataLoader(range(0, SAMPLES, 4), batch_size=None, shuffle=True)",
        "circle(DataLoader(range(0, SAMPLES, 4), batch_size=None, shuffle=True))",
    ],
)
def test_what_is_made_anew_for_each_epoch_is_the_same_loop(job: Job, loop: str):
    """Also when the one before is still there, in a circle that nobody has collected yet."""
    job.write(f"""
        from tests.support.scripts.ground import *
        import gc
        gc.disable()
        def circle(loader):
            loader.myself = loader
            return loader
        begin()
        for epoch in epochs(4):
            for i in migrator.batches({loop}):
                part = i if isinstance(i, slice) else slice(int(i), int(i) + 4)
                train(*data[part])
        finish()
        """)
    story, _ = check(job, ["step 2", "step 9", "step 16", "step 22"], epochs=4)

    assert all(life.events("loops_alike") == [] for life in story.lives)


STAGES = """
from tests.support.scripts.ground import *
stages = [TensorDataset(torch.randn(16, 4), torch.arange(100 * n, 100 * n + 16)) for n in range(3)]
loaders = [DataLoader(stage, batch_size=4, shuffle=True) for stage in stages]
state["stage"] = 0
begin()
while state["stage"] < 3:
    stage = state["stage"]
    for x, ids in migrator.batches(loaders[stage]{name}):
        train(x, ids)
    state["stage"] += 1
finish()
"""


def test_stages_that_look_alike_are_told_apart_by_name(job: Job):
    story, _ = check(
        job.write(STAGES.replace("{name}", ', name=f"stage {stage}"')), ["step 2", "step 6", "step 10"], samples=None
    )

    assert sorted(story.ids) == [100 * n + i for n in range(3) for i in range(16)]


def test_stages_that_look_alike_are_never_taken_for_one_another(job: Job):
    """Said in the first life, refused at the resume, and gone on with knowingly."""
    job.write(STAGES.replace("{name}", ""))
    life = job.run(AT="step 6")
    assert life.wait() == 143
    assert "name=" in life.events("loops_alike")[0]["means"]

    assert_refused(job.run(), "which one cannot be told", "name=", "MIGRATOR_LOOPS=anew")
    last = job.run(MIGRATOR_LOOPS="anew")
    assert last.wait() == 0, last.text
    assert "trained 14 " in last.text


def test_loaders_made_one_after_another_of_other_data_are_never_taken_for_one_another(job: Job):
    """The one before is gone by then; its data were others, so it was another loop."""
    job.write("""
        from tests.support.scripts.ground import *
        begin()
        for task in range(3):
            torch.manual_seed(task)
            some = TensorDataset(torch.randn(16, 4), torch.arange(100 * task, 100 * task + 16))
            for x, ids in migrator.batches(DataLoader(some, batch_size=4, shuffle=True)):
                train(x, ids)
        """)
    life = job.run(AT="step 6")
    assert life.wait() == 143
    assert len(life.events("loops_alike")) == 1

    assert_refused(job.run(), "which one cannot be told")


def test_a_function_in_a_wrapper_that_goes_over_one_loader_twice(job: Job):
    """Decorators give it another name; which call it was is known all the same."""
    job.write("""
        from tests.support.scripts.ground import *
        import functools
        def timed(function):
            @functools.wraps(function)
            def wrapper(*args):
                return function(*args)
            return wrapper
        @timed
        def fit(name):
            for x, ids in migrator.batches(loader):
                train(x, ids)
        loader = DataLoader(data, batch_size=4, shuffle=True)
        state["phase"] = 1
        begin()
        if state["phase"] == 1:
            fit("one")
            state["phase"] = 2
        fit("two")
        finish()
        """)
    check(job, ["step 3", "step 8"], samples=None)


def test_an_error_in_a_function_that_stands_around_the_loop(job: Job):
    """`map` calls it while the loop asks for its next batch: that is no end of the loop."""
    life = job.write("""
        from tests.support.scripts.ground import *
        def one(batch):
            train(*batch)
            if state["step"] == 3:
                raise ValueError
        begin()
        try:
            for _ in map(one, migrator.batches(loader)):
                pass
        except ValueError:
            pass
        migrator.save_ckpt()
        """).run()

    assert life.wait() == 1, life.text
    assert "ended the last iteration in its middle" in life.text
    assert job.ckpts() == []


def test_a_function_that_takes_batches_by_hand_and_ends(job: Job):
    """Nothing failed: the script may say that all is whole."""
    life = job.write("""
        from tests.support.scripts.ground import *
        def some():
            batches = iter(migrator.batches(loader))
            for _ in range(3):
                train(*next(batches))
        begin()
        some()
        print("saved", migrator.save_ckpt())
        """).run()

    assert life.wait() == 0, life.text
    assert "saved 000001-000000000003" in life.text


def test_an_error_of_the_scripts_own_state_at_a_break_is_raised(job: Job):
    """There an exception would be printed and forgotten; it comes with the next call."""
    life = job.write("""
        from tests.support.scripts.ground import *
        class Own:
            def state_dict(self):
                if state["step"] == 3:
                    raise ValueError("my own")
                return {}
            def load_state_dict(self, state):
                pass
        begin(own=Own())
        for x, ids in migrator.batches(loader):
            train(x, ids)
            if state["step"] == 3:
                break
        for x, ids in migrator.batches(loader):
            train(x, ids)
        """).run()

    assert life.wait() == 1, life.text
    assert "ValueError: my own" in life.text
    assert "Exception ignored" not in life.text
    assert "trained 4" not in life.text


def test_a_count_of_all_epochs_beside_the_loop_is_named(job: Job):
    """It is not that of this epoch, and where it stood nobody knows."""
    job.write("""
        from tests.support.scripts.ground import *
        import itertools
        steps = itertools.count()
        begin()
        for epoch in epochs(2):
            for (x, ids), step in zip(migrator.batches(loader), steps):
                train(x, ids)
        """)
    assert job.run(AT="step 8").wait() == 143
    life = job.run()

    assert life.wait() == 0, life.text
    assert life.events("count_begins_anew")[0]["what"] == '"zip(..., count)"'


def test_many_datasets_with_generators_of_their_own(job: Job):
    """A long list of samples is not looked through, one of datasets is."""
    job.write("""
        from tests.support.scripts.ground import *
        class Noisy(torch.utils.data.Dataset):
            def __init__(self, n):
                self.n, self.rng = n, torch.Generator().manual_seed(n)
            def __len__(self):
                return 1
            def __getitem__(self, i):
                return data[self.n % 24][0] + torch.randn(4, generator=self.rng), self.n
        many = torch.utils.data.ConcatDataset([Noisy(n) for n in range(80)])
        loader = DataLoader(many, batch_size=20, shuffle=True)
        begin()
        for epoch in epochs(2):
            for x, ids in migrator.batches(loader):
                train(x, ids)
        finish()
        """)
    check(job, ["step 2", "step 6"], samples=None)


@pytest.mark.parametrize(
    "loop",
    [
        """it = iter(migrator.batches(loader))
            for i, (x, ids) in enumerate(it):
                train(x, ids)
                if i == 3: break""",
        """try:
                for i, (x, ids) in enumerate(migrator.batches(loader)):
                    train(x, ids)
                    if i == 3: raise ValueError
            except ValueError: pass""",
    ],
)
def test_a_resumed_loop_that_is_left_in_its_first_batch_is_not_gone_on_with_again(job: Job, loop: str):
    """Something was trained in it, though nobody saw how it ended."""
    job.write(f"""
        from tests.support.scripts.ground import *
        loader = DataLoader(data, batch_size=4, shuffle=True)
        begin()
        for epoch in epochs(3):
            {loop}
        finish()
        """)
    story, _ = check(job, ["step 7"], samples=None)

    assert len(story.trained) == 12


def test_an_iterator_begun_anew_wherever_it_ends(job: Job):
    """Steps instead of epochs, and `next()` by hand: stopped at an epoch's end as well."""
    for kind in ("sampler=sampler", "shuffle=True"):
        job.write(f"""
            from tests.support.scripts.ground import *
            loader = DataLoader(data, batch_size=4, {kind})
            begin()
            it = iter(migrator.batches(loader))
            while state["step"] < 15:
                try:
                    x, ids = next(it)
                except StopIteration:
                    state["epoch"] += 1
                    it = iter(migrator.batches(loader))
                    x, ids = next(it)
                train(x, ids)
                if "step 12" in (os.environ.get("AT"), f"step {{state['step']}}"):
                    migrator.safe_point()
            finish()
            """).env["MIGRATOR_JOB"] = kind[:4]
        check(job, ["step 3", "step 6", "step 12"], samples=None)


ORDERS = """
import random
from tests.support.scripts.ground import *
random.seed(0)
class Bucketed:
    def __init__(self):
        self.batches = [[i, i + 1] for i in range(0, SAMPLES, 2)]
    def __len__(self):
        return len(self.batches)
    def __iter__(self):
        random.shuffle(self.batches)
        return iter(list(self.batches))
class ByClass(Bucketed):
    def __init__(self):
        self.by_class = {c: list(range(c, SAMPLES, 3)) for c in range(3)}
    def __len__(self):
        return 8
    def __iter__(self):
        for members in self.by_class.values():
            random.shuffle(members)
        return iter([list(batch) for batch in zip(*self.by_class.values())])
listed = [[i, i + 1] for i in range(0, SAMPLES, 2)]
subset = torch.utils.data.SubsetRandomSampler(list(range(SAMPLES)))
"""


@pytest.mark.parametrize(
    ("loader", "before", "name", "place"),
    [
        ("DataLoader(data, batch_sampler=Bucketed())", "pass", "batch_sampler.batches", "step 20"),
        ("DataLoader(data, batch_sampler=ByClass())", "pass", "batch_sampler.by_class", "step 20"),
        ("[data[part] for part in listed]", "random.shuffle(loader)", "loader is not", "step 20"),
        ("DataLoader(data, batch_sampler=listed)", "random.shuffle(listed)", "batch_sampler is not", "step 20"),
        ("DataLoader(data, batch_size=4, sampler=subset)", "subset.indices.reverse()", "sampler.indices", "step 8"),
    ],
)
def test_an_order_kept_in_lists_is_not_lost_without_a_word(job: Job, loader: str, before: str, name: str, place: str):
    """Each epoch shuffles what the one before has left, and a new process begins with the first."""
    job.write(f"""{ORDERS}
loader = {loader}
begin()
for epoch in range(3):
    {before}
    for x, ids in migrator.batches(loader):
        train(x, ids)
    moment(f"behind {{epoch}}")
""")
    assert job.run(AT=place).wait() == 143

    assert_refused(job.run(), name, "is not what it was")


@pytest.mark.parametrize(
    ("head", "counts"),
    [
        ("for n, (x, ids) in enumerate(migrator.batches(loader), start=1 + state['step']):", [9, 10, 11, 12]),
        ("for n, (x, ids) in enumerate(migrator.batches(loader), start=1 + 6 * epoch):", [9, 10, 11, 12]),
        ("for n, (x, ids) in enumerate(migrator.batches(loader), start=6 * epoch):", "enumerate"),
        ("for n, (x, ids) in enumerate(migrator.batches(loader), 1):", [3, 4, 5, 6]),
        ("for n, (x, ids) in enumerate(migrator.batches(loader), start=100 * len(lives)):", "enumerate"),
        ("for n, (x, ids) in enumerate(chain.from_iterable([migrator.batches(loader)])):", "enumerate"),
        ("for n, (x, ids) in Counting(iter(migrator.batches(loader))):", "Counting"),
    ],
)
def test_whatever_counts_from_another_number_is_right_or_named(job: Job, head: str, counts: list[int] | str):
    job.write(f"""
        from tests.support.scripts.ground import *
        from itertools import chain
        class Counting:
            def __init__(self, inner):
                self.inner, self.n = inner, -1
            def __iter__(self):
                return self
            def __next__(self):
                self.n += 1
                return self.n, next(self.inner)
        begin()
        lives = [1] * (1 + (state["step"] > 0))
        for epoch in epochs(2):
            {head}
                print("count", n)
                train(x, ids)
        """)
    assert job.run(AT="step 8").wait() == 143
    life = job.run()

    assert life.wait() == 0, life.text
    if isinstance(counts, str):
        assert [event["what"] for event in life.events("count_begins_anew")] == [counts]
    else:
        assert life.events("count_begins_anew") == []
        assert [int(i) for i in re.findall(r"^count (\d+)$", life.text, re.MULTILINE)] == counts


def test_objects_that_do_things_when_they_are_looked_at(job: Job):
    """What stands around a loop is found among all objects, and none of them is asked anything."""
    life = job.write("""
        from tests.support.scripts.ground import *
        import weakref
        class Node: pass
        node = Node()
        proxy = weakref.proxy(node)
        del node
        class Lazy:
            @property
            def __class__(self):
                raise RuntimeError("not ready")
        lazy = Lazy()
        begin()
        for x, ids in enumerate(migrator.batches(loader)):
            pass
        """).run()

    assert life.wait() == 0, life.text


@pytest.mark.parametrize(
    ("loader", "epochs"),
    [
        ("DataLoader(data, batch_size=4, shuffle=True)", "migrator.epochs(2)"),
        ("loader", "range(sampler.epoch, 2)"),
    ],
)
@pytest.mark.parametrize("name", ["", ", name=phase"])
def test_a_loader_that_is_gone_over_twice_in_an_epoch_by_one_line(job: Job, loader: str, epochs: str, name: str):
    """Which of the two was interrupted only a name can tell."""
    job.write(f"""
        from tests.support.scripts.ground import *
        loader = {loader}
        begin()
        for epoch in {epochs}:
            for phase in ("warm", "main"):
                state["epoch"] = epoch
                sampler.set_epoch(epoch)
                for x, ids in migrator.batches(loader{name}):
                    train(x, ids)
        finish()
        """)
    if name and "shuffle" in loader:
        check(job, ["step 8", "step 20"], samples=None)
    elif not name:
        life = job.run(AT="step 8")
        assert life.wait() == 143
        assert len(life.events("loops_alike")) == 1
        assert_refused(job.run(), "which one cannot be told", "name=")


def test_an_order_drawn_bit_by_bit_from_the_random_state_of_all(job: Job):
    """Where the loop draws from the same one, the order is another without the loop; else it is drawn again."""
    job.write("""
        import random
        from tests.support.scripts.ground import *
        random.seed(7)
        class Popping(torch.utils.data.Sampler):
            def __len__(self):
                return SAMPLES
            def __iter__(self):
                left = list(range(SAMPLES))
                while left:
                    yield left.pop(random.randrange(len(left)))
        begin()
        for x, ids in migrator.batches(DataLoader(data, batch_size=4, sampler=Popping())):
            if os.environ.get("DRAWS"):
                random.random()
            train(x, ids)
        finish()
        """)
    check(job, ["step 3"], epochs=1)

    job.env["MIGRATOR_JOB"] = "draws"
    assert job.run(AT="step 3", DRAWS="1").wait() == 143
    assert_refused(job.run(DRAWS="1"), "draws the order of the samples bit by bit from the global random state")


def test_the_first_of_stages_that_look_alike_needs_no_name(job: Job):
    """So far there is only one."""
    life = job.write(STAGES.replace("{name}", "")).run(AT="step 2")
    assert life.wait() == 143
    assert life.events("loops_alike") == []
    last = job.run()

    assert last.wait() == 0, last.text
    assert "\nresumed 2\n" in last.text


def test_one_function_for_several_loops(job: Job):
    """Which of them it is follows from where it is called."""
    job.write("""
        from tests.support.scripts.ground import *
        def train_all(loader):
            for x, ids in migrator.batches(loader):
                train(x, ids)
        state["stage"] = 0
        begin()
        if state["stage"] == 0:
            train_all(DataLoader(data, batch_size=4, shuffle=True))
            state["stage"] = 1
        if state["stage"] == 1:
            train_all(DataLoader(data, batch_size=4, shuffle=True))
        finish()
        """)
    check(job, ["step 2", "step 6", "step 8"], samples=None)


# Looking at the data.


def test_the_training_loader_outside_batches_has_the_whole_epoch(job: Job):
    """Statistics of BatchNorm behind an epoch, and a look at the first batch in the middle of one."""
    job.write("""
        from tests.support.scripts.ground import *
        from torch.optim.swa_utils import update_bn
        begin()
        for epoch in epochs(2):
            for x, ids in migrator.batches(loader):
                train(x, ids)
                assert len(next(iter(loader))[0]) == 4
            assert sum(len(x) for x, _ in loader) == SAMPLES
            update_bn(loader, model)
            moment(f"behind {epoch}")
        finish()
        """)
    check(job, ["step 4", "behind 0", "step 8"])


# Updates by hand.


BY_HAND = """
from tests.support.scripts.ground import *
optimizer = None
model = nn.Sequential(nn.Linear(4, {width}), nn.Tanh(), nn.Linear({width}, 1))
begin(optimizer=None, model=model)
for epoch in epochs(2):
    for i, (x, ids) in enumerate(migrator.batches(loader)):
        loss = model(x).square().mean() / 2
        loss.backward()
        if i % 2 == 0:
            continue
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)
        model.zero_grad()
        trained(ids, loss.detach())
print("final", state, [float(p.double().sum()).hex() for p in model.parameters()])
"""


@pytest.mark.parametrize("width", [8, 8192])
def test_weights_that_the_script_changes_by_hand(job: Job, width: int):
    """As the word language model does it: each batch in which they change is a step."""
    job.write(BY_HAND.format(width=width))
    story, reference = check(job, ["step 1", "step 3", "step 5"], samples=None)

    assert len(reference.trained) == 6
    assert len(story.lives[0].events("trained_by_hand")) == 1


ACCUMULATES = """
from tests.support.scripts.ground import *
last = {{"seen": torch.zeros(3)}}
begin(last=last{registered})
for epoch in epochs(2):
    for i, (x, ids) in enumerate(migrator.batches(loader)):
        loss = model(x).square().mean() / 2
        loss.backward()
        last["seen"] = torch.full((3,), float(i))
        if i % 2 == 0:
            moment("accumulates")
            continue
        optimizer.step()
        optimizer.zero_grad()
        trained(ids, loss.detach())
print("final", state, [float(p.double().sum()).hex() for p in model.parameters()])
"""


@pytest.mark.parametrize(
    "registered", ["", ", optimizer=None"], ids=["optimizer registered", "optimizer not registered"]
)
def test_a_buffer_that_changes_while_gradients_are_accumulated_is_no_step(job: Job, registered: str):
    """Before the first step of the optimizer: a safe point between its batches would lose the gradients."""
    job.write(ACCUMULATES.format(registered=registered))
    first = job.run(AT="accumulates")

    assert first.wait() == 143, first.text
    assert not first.events("trained_by_hand"), first.text
    assert not job.ckpts(), "there is no safe point before the first step"


def test_a_table_of_which_one_cell_changes(job: Job):
    """Tabular learning: an array, and no model at all."""
    job.write("""
        from tests.support.scripts.ground import *
        import numpy as np
        table = np.zeros((24, 3))
        begin(model=None, optimizer=None, table=table)
        for epoch in epochs(2):
            for x, ids in migrator.batches(loader):
                table[int(ids[0]), 1] += float(x[0, 0])
                trained(ids, table.sum())
        print("final", table.sum(0).tolist())
        """)
    check(job, ["step 2", "step 8"])


# Exceptions.


def test_an_error_between_step_and_schedule_that_the_notice_itself_caused(job: Job):
    """SIGTERM goes to the process group, a subprocess dies of it, and the script with it, half way through a step."""
    job.write("""
        from tests.support.scripts.ground import *
        import subprocess
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        begin(schedule=schedule)
        for x, ids in migrator.batches(loader):
            train(x, ids)
            if os.environ.get("HIT") and state["step"] == 5:
                subprocess.run(["sh", "-c", f"kill -TERM {os.getpid()} $$"], check=True)
            schedule.step()
            if state["step"] == 2:
                migrator.save_ckpt()
        finish()
        """)
    life = job.run(HIT="1")

    assert life.wait() == 143, life.text
    assert "CalledProcessError" in life.text
    assert [name[-12:] for name in job.ckpts()] == ["000000000002"]
    last = job.run()
    assert last.wait() == 0, last.text
    assert "\nresumed 2\n" in last.text


CTRL_C = """
import sys
from tests.support.scripts.ground import *
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
begin(schedule=schedule)
{hook}
try:
    for x, ids in migrator.batches(loader):
        train(x, ids)
        if state["step"] == 3:
            raise KeyboardInterrupt
        schedule.step()
except KeyboardInterrupt:
    {inside}
{behind}
"""
IN_STEP = """
def interrupted(group, *args, **kwargs):
    if state["step"] == 2:
        raise KeyboardInterrupt
    return real(group, *args, **kwargs)
real = sys.modules["torch.optim.sgd"].sgd
sys.modules["torch.optim.sgd"].sgd = interrupted
"""


@pytest.mark.parametrize(
    ("hook", "inside", "behind", "why"),
    [
        ("", "migrator.save_ckpt()", "", "deals with an exception"),
        ("", "pass", "migrator.save_ckpt()", "ended the last iteration in its middle"),
        ("", "migrator.safe_point()", "", "deals with an exception"),
        (IN_STEP, "migrator.save_ckpt()", "", "step was broken off"),
        (IN_STEP, "pass", "migrator.save_ckpt()", "step was broken off"),
    ],
)
def test_what_ctrl_c_left_half_done_is_not_saved(job: Job, hook: str, inside: str, behind: str, why: str):
    """The script that asks for it is told so."""
    life = job.write(CTRL_C.format(hook=hook, inside=inside, behind=behind)).run()

    assert life.wait() == 1, life.text
    assert why in life.text
    assert job.ckpts() == []


def test_ctrl_c_where_all_is_whole_is_saved(job: Job):
    """Before the step of an iteration the last safe point is whole."""
    life = job.write("""
        from tests.support.scripts.ground import *
        begin()
        try:
            for x, ids in migrator.batches(loader):
                if state["step"] == 3:
                    raise KeyboardInterrupt
                train(x, ids)
        except KeyboardInterrupt:
            print("saved", migrator.save_ckpt())
        """).run()

    assert life.wait() == 0, life.text
    assert "saved 000001-000000000003" in life.text


def test_training_inside_an_except_block_is_training(job: Job):
    """A fallback: all of it happens while an exception is being dealt with, and none of it is half done."""
    job.write("""
        from tests.support.scripts.ground import *
        begin()
        try:
            import no_such_accelerator
        except ImportError:
            for x, ids in migrator.batches(loader):
                train(x, ids)
                if state["step"] == 2:
                    migrator.save_ckpt()
            migrator.save_ckpt()
        """)
    life = job.run()

    assert life.wait() == 0, life.text
    assert [name[-12:] for name in job.ckpts()] == ["000000000002", "000000000006"]


def test_after_an_exception_that_the_script_outlives_training_is_saved_again(job: Job):
    """What it makes of its own mess is its own affair, from the next whole iteration on."""
    life = job.write("""
        from tests.support.scripts.ground import *
        begin()
        for epoch in epochs(2):
            try:
                for x, ids in migrator.batches(loader):
                    train(x, ids)
                    if state["step"] == 3:
                        raise ValueError
            except ValueError:
                pass
        """).run(AT="step 5")

    assert life.wait() == 143, life.text
    last = job.run()
    assert last.wait() == 0, last.text
    assert "\nresumed 5\n" in last.text


# All of it at once.


WITH_CARE = """
import random
import sys
import numpy as np
from tests.support.scripts.ground import *
from tqdm import tqdm
torch.manual_seed(1)
random.seed(1)
images = torch.randn(40, 3, 8, 8)
class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, i):
        return images[i] + 0.1 * torch.randn(3, 8, 8) + random.random(), i
model = nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1),
    nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 1),
).to(memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
noise = torch.Generator().manual_seed(2)
crops = np.random.default_rng(3)
loader = DataLoader(Images(), batch_size=4, shuffle=True, generator=noise, num_workers=2, persistent_workers=True)
held_out = DataLoader(Images(), batch_size=8, num_workers=1, persistent_workers=True)
begin(model=model, optimizer=optimizer, schedule=schedule, noise=noise, crops=crops)
for epoch in range(state["epoch"], 3):
    model.train()
    for i, (x, ids) in enumerate(migrator.batches(loader)):
        x = x.to(memory_format=torch.channels_last) + 0.1 * torch.randn(x.shape, generator=noise) + crops.normal()
        loss = model(x).square().mean()
        (loss / 2).backward()
        if (i + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(epoch + i / len(loader))
            trained(ids, loss.detach())
        if i == 7:
            break
    model.eval()
    with torch.no_grad():
        loss = sum(model(x).sum() for x, _ in held_out)
    moment(f"evaluated {epoch}")
    state["epoch"] = epoch + 1
sums = [float(p.double().sum()).hex() for p in model.state_dict().values()]
print("final", sums, torch.rand(1), torch.rand(2, generator=noise), crops.normal())
"""


def test_enumerate_break_persistent_workers_generators_channels_last_and_a_fused_optimizer(job: Job):
    """Five stops, and every bit as if there had been none."""
    job.write(WITH_CARE)
    reference = unstopped(job)
    places = [place for place in reference.moments if place != "step 12"]
    story = stopped(job, [places[1], places[3], places[5], places[8], places[-2]])

    assert story.trained == reference.trained
    assert len(story.trained) == 12
    assert story.final == reference.final
