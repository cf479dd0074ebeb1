"""The notice may come anywhere: it is saved, or truthfully answered, without waiting for the loop."""

from __future__ import annotations

import datetime
import re

import pytest

from migrator.notice.signal_file import SignalFile
from tests.support.harness import Job, Process

SOON_S = 3.0
"""Far more than a save takes here, far less than what the scripts would be waiting for."""

BEGIN = "from tests.support.scripts.ground import *\nbegin()\n"
FOUR_STEPS = BEGIN + "for x, ids in list(loader)[:4]: train(x, ids); migrator.safe_point()\n"


def assert_saved(job: Job, life: Process, *, step: int | None = None, code: int = 143) -> None:
    """It left with what it had trained, and soon."""
    assert life.wait() == code, life.text
    (leaving,) = life.events("leaving")
    assert leaving["why"] == "saved", life.text
    assert float(leaving["since_signal_s"]) < SOON_S
    assert leaving["ckpt"] in job.ckpts()
    assert step is None or int(leaving["step"]) == step, life.text


def seconds_between(life: Process, one: str, other: str) -> float:
    """By the time stamps of the log lines of two events."""
    stamps = [
        re.findall(rf"^(\S+ \S+),(\d+) migrator rank \d+: {event}\b", life.text, re.MULTILINE)[-1]
        for event in (one, other)
    ]
    begin, end = (
        datetime.datetime.fromisoformat(stamp) + datetime.timedelta(milliseconds=int(ms)) for stamp, ms in stamps
    )
    return (end - begin).total_seconds()


# Before there is anything to save.


def test_before_the_first_step_there_is_nothing_to_save(job: Job):
    """A job that never trained says so in the signal file and leaves no ckpt."""
    life = job.write(BEGIN + "ask()\ntime.sleep(LONG_S)").run()

    assert life.wait() == 143, life.text
    answer = SignalFile(job.signal).read()
    assert answer is not None
    assert answer.word == "init"
    assert answer.fields["request"] == "r-1"
    assert answer.fields["error"].startswith("nothing to save")
    assert job.ckpts() == []


def test_before_the_first_step_after_a_load_the_answer_is_the_ckpt_that_was_loaded(job: Job):
    """Nothing was trained since, so what was loaded is what is safe; it is not written again."""
    assert_saved(job, job.write(FOUR_STEPS + "stop()\ntime.sleep(LONG_S)").run(), step=4)
    life = job.write(BEGIN + "ask()\ntime.sleep(LONG_S)").run()

    assert life.wait() == 143, life.text
    answer = SignalFile(job.signal).read()
    assert answer is not None
    assert (answer.word, answer.fields["ckpt"]) == ("resume", job.ckpts()[0])
    assert len(job.ckpts()) == 1


def test_during_load_ckpt_the_ckpt_being_loaded_is_the_answer(job: Job):
    """Half loaded state is never saved; the next life loads the same ckpt."""
    keeper = """
        from tests.support.scripts.ground import *
        class Slow:
            def state_dict(self):
                return {"x": 1}
            def load_state_dict(self, state):
                print("loading")
                time.sleep(float(os.environ.get("LOAD_S", "0")))
        begin(slow=Slow())
        for x, ids in list(loader)[:2]:
            train(x, ids)
            migrator.safe_point()
        stop()
        time.sleep(LONG_S)
        """
    assert_saved(job, job.write(keeper).run(), step=2)
    life = job.run(LOAD_S="60")
    life.wait_for("^loading$")
    life.kill()

    assert life.wait() == 143, life.text
    (leaving,) = life.events("leaving")
    assert [leaving["ckpt"]] == job.ckpts()
    again = job.run()
    assert_saved(job, again, step=4)
    assert again.events("loaded")[0]["ckpt"] == leaving["ckpt"]


# While the main thread is somewhere else.


@pytest.mark.parametrize("workers", [0, 2])
def test_while_the_loop_waits_for_a_slow_loader(job: Job, workers: int):
    """The step before is saved from the side, and the loop is called back out of the loader."""
    life = job.write(f"""
        from tests.support.scripts.ground import *
        class Slow(torch.utils.data.Dataset):
            def __len__(self):
                return SAMPLES
            def __getitem__(self, i):
                if sampler.cursor == 8 or {workers} and list(sampler).index(i) >= 8:
                    time.sleep(LONG_S)
                return data[i]
        loader = DataLoader(Slow(), batch_size=4, sampler=sampler, num_workers={workers})
        begin()
        try:
            for x, ids in migrator.batches(loader):
                train(x, ids)
        finally:
            print("cleaned up")
        """).run()
    life.wait_for("^trained 2 ")
    life.kill()

    life.wait(timeout_s=8)  # workers that are busy are not waited for: torch would do so for ten seconds
    assert_saved(job, life, step=2)
    assert "cleaned up" in life.text
    assert "left_hard" not in life.text


def test_during_the_first_call_of_a_compiled_model(job: Job):
    """Compilation takes minutes in real jobs; the state is that of the last step all the while."""
    life = job.write("""
        from tests.support.scripts.ground import *
        def backend(graph, inputs):
            print("compiling")
            time.sleep(LONG_S)
            return graph.forward
        begin()
        compiled = torch.compile(model, backend=backend)
        for i, (x, ids) in enumerate(migrator.batches(loader)):
            if i == 3:
                compiled(x)
            train(x, ids)
        """).run()
    life.wait_for("^compiling$")
    life.kill()

    assert_saved(job, life, step=3)


def test_during_a_compilation_before_the_first_step(job: Job):
    """Nothing was trained yet, and that is what the answer says."""
    life = job.write("""
        from tests.support.scripts.ground import *
        def backend(graph, inputs):
            ask()
            time.sleep(LONG_S)
        begin()
        for x, ids in migrator.batches(loader):
            torch.compile(model, backend=backend)(x)
            train(x, ids)
        """).run()

    assert life.wait() == 143, life.text
    answer = SignalFile(job.signal).read()
    assert answer is not None
    assert "nothing was trained" in answer.fields["error"]


def test_a_long_evaluation_ends_at_once_after_the_commit(job: Job):
    """`except Exception` does not hold it up, and `finally` blocks run, the innermost first."""
    life = job.write("""
        from tests.support.scripts.ground import *
        begin()
        def evaluate():
            model.eval()
            end_s = time.monotonic() + LONG_S
            try:
                while time.monotonic() < end_s:
                    try:
                        with torch.no_grad():
                            for x, _ in data:
                                model(x[None])
                        print("evaluates")
                    except Exception:
                        print("not ours to catch")
                    finally:
                        pass
            finally:
                print("inner clean-up")
        try:
            for x, ids in migrator.batches(loader):
                train(x, ids)
            evaluate()
        finally:
            print("outer clean-up")
        print("never reached")
        """).run()
    life.wait_for("^evaluates$")
    life.kill()

    assert_saved(job, life, step=6)
    assert life.text.index("inner clean-up") < life.text.index("outer clean-up")
    assert "never reached" not in life.text
    assert "not ours" not in life.text


IN_THE_BODY = """
from tests.support.scripts.ground import *
begin()
for x, ids in migrator.batches(loader):
    train(x, ids)
    if state["step"] == 3:
        {}
        ask(float(os.environ["MIGRATOR_GRACE_S"]))
        time.sleep(LONG_S)  # an evaluation every so many steps
"""


def test_an_evaluation_in_the_body_behind_a_safe_point(job: Job):
    """Between a step and the next batch only the script knows whether all is whole; here it says so."""
    assert_saved(job, job.write(IN_THE_BODY.format("migrator.safe_point()")).run(), step=3)


def test_an_evaluation_in_the_body_without_one_is_truthfully_answered(job: Job):
    """Nothing half done is saved: at the deadline the answer is what is missing, and the process leaves."""
    life = job.write(IN_THE_BODY.format("pass")).run(MIGRATOR_GRACE_S="2")

    assert life.wait() == 143, life.text
    answer = SignalFile(job.signal).read()
    assert answer is not None
    assert (answer.word, answer.fields["request"]) == ("init", "r-1")
    assert "no safe point was reached within the grace" in answer.fields["error"]
    assert "the time between two safe points shorter" in answer.fields["error"]
    assert job.ckpts() == []


def test_in_a_sleep(job: Job):
    """A main thread that sleeps is woken."""
    life = job.write(FOUR_STEPS + "print('sleeps')\ntime.sleep(LONG_S)").run()
    life.wait_for("^sleeps$")
    life.kill()

    assert_saved(job, life, step=4)


def test_a_main_thread_hung_in_c_is_left_behind(job: Job):
    """Who cannot be called back is ended, with the right code, some two seconds after the commit."""
    hang = """
lock = __import__("threading").Lock()
libc = __import__("ctypes").CDLL(None)
mutex = (__import__("ctypes").c_char * 64)()
libc.pthread_mutex_lock(mutex)
print("hangs")
libc.pthread_mutex_lock(mutex)
"""
    life = job.write(FOUR_STEPS + hang).run()
    life.wait_for("^hangs$")
    life.kill()

    assert_saved(job, life, step=4)
    assert len(life.events("left_hard")) == 1
    assert 1.5 < seconds_between(life, "leaving", "left_hard") < 2 + SOON_S


# Loader workers.


WORKERS = """
from tests.support.scripts.ground import *
loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=2)
begin()
for epoch in epochs(10**6):
    for x, ids in migrator.batches(loader):
        train(x, ids)
"""


def test_loader_workers_that_die_with_the_process_group_do_not_matter(job: Job):
    """As under torchrun: SIGTERM reaches everybody at once; ten stops of ten are saved."""
    job.write(WORKERS)
    done = 0
    for stop in range(10):
        life = job.run()
        life.wait_for(f"^trained {done + 3 + stop} ")
        life.kill_group()
        assert_saved(job, life)
        assert "Traceback" not in life.text, life.text
        done = int(life.events("leaving")[0]["step"])


def test_loader_workers_that_die_in_an_evaluation_do_not_matter(job: Job):
    """The loader of an evaluation fails in the script's own hands; the code still says: start me again."""
    life = job.write("""
        from tests.support.scripts.ground import *
        class Slow(torch.utils.data.Dataset):
            def __len__(self):
                return SAMPLES
            def __getitem__(self, i):
                time.sleep(LONG_S if i > 8 else 0)
                return data[i]
        begin()
        for x, ids in migrator.batches(loader):
            train(x, ids)
        for x, ids in DataLoader(Slow(), batch_size=4, num_workers=2):
            print("evaluates")
        """).run()
    life.wait_for("^evaluates$")
    life.kill_group()

    assert_saved(job, life, step=6)


# Exceptions under way.


@pytest.mark.parametrize(
    "trouble", ["raise ValueError('trouble')", "raise KeyboardInterrupt", "os.kill(os.getpid(), 2)"]
)
def test_an_exception_right_behind_the_notice_does_not_lose_it(job: Job, trouble: str):
    """The script ends by an exception in the same instant: it is saved all the same, and started again."""
    job.write(f"""
        from tests.support.scripts.ground import *
        begin()
        for x, ids in migrator.batches(loader):
            if state["step"] == 3:
                os.kill(os.getpid(), signal.SIGTERM)
                {trouble}
            train(x, ids)
        """)
    for attempt in range(3):
        assert_saved(job, job.run(MIGRATOR_JOB=str(attempt)), step=3)


def test_an_end_right_behind_the_notice_does_not_lose_it(job: Job):
    """A script that ends of its own accord in the same instant is saved too, and keeps its exit code."""
    job.write("""
        from tests.support.scripts.ground import *
        import sys
        begin()
        for x, ids in migrator.batches(loader):
            if state["step"] == 3:
                os.kill(os.getpid(), signal.SIGTERM)
                sys.exit(3)
            train(x, ids)
        """)
    for attempt in range(8):
        assert_saved(job, job.run(MIGRATOR_JOB=str(attempt)), step=3, code=3)


def test_an_exception_while_the_last_save_is_written(job: Job):
    """Nothing ends the process before a save under way is done."""
    life = job.write("""
        from tests.support.scripts.ground import *
        model.register_parameter("big", nn.Parameter(torch.zeros(16 << 20)))
        begin()
        for x, ids in migrator.batches(loader):
            if state["step"] == 3:
                stop()
                raise ValueError("trouble")
            train(x, ids)
        """).run()

    assert_saved(job, life, step=3)
    assert "ValueError: trouble" in life.text


# Notice upon notice.


def test_twice_in_a_row_is_once(job: Job):
    """The second signal neither repeats the save nor breaks into the script's own clean-up."""
    life = job.write(
        BEGIN
        + """
try:
    for x, ids in migrator.batches(loader):
        if state["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(LONG_S)
        train(x, ids)
finally:
    os.kill(os.getpid(), signal.SIGTERM)
    for i in range(20):
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGTERM)
    print("cleaned up")
"""
    ).run()

    assert_saved(job, life, step=3)
    assert len(life.events("committed")) == 1
    assert "cleaned up" in life.text
    assert "Traceback" not in life.text


@pytest.mark.parametrize("first", ["file", "SIGTERM"])
def test_the_signal_file_and_sigterm_at_once_are_one_notice(job: Job, first: str):
    """One save, and the request gets its answer whichever came first."""
    both = ["ask()", "os.kill(os.getpid(), signal.SIGTERM)"]
    one, other = both if first == "file" else both[::-1]
    life = job.write(FOUR_STEPS + f"{one}\n{other}\ntime.sleep(LONG_S)").run()

    assert_saved(job, life, step=4)
    assert len(life.events("committed")) == 1
    answer = SignalFile(job.signal).read()
    assert answer is not None
    assert answer.word == "resume"
    assert answer.fields["request"] == "r-1"
    assert answer.fields["step"] == "4"
