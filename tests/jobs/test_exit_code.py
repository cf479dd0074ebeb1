"""The exit code of a script that ends by itself while the pod is leaving."""

from __future__ import annotations

import pytest

from tests.support.harness import Job, Process

BEGIN = """
from tests.support.scripts.ground import *
import sys
from migrator.save.attempt import Attempt

run = Attempt.run

def run_at_the_end(self):
    # The script is to end by itself: once the ckpt is there it would be interrupted.
    while not migrator._session.gate.is_closed:
        time.sleep(0.001)
    return run(self)

Attempt.run = run_at_the_end
flag = []
"""
OWN = BEGIN + "signal.signal(signal.SIGTERM, lambda number, frame: flag.append(number))\nbegin()\n"
OWN_AFTER = BEGIN + "begin()\nsignal.signal(signal.SIGTERM, lambda number, frame: flag.append(number))\n"
NONE = BEGIN + "begin()\n"

LOOP = """
def loop():
    for epoch in epochs(2):
        for x, ids in migrator.batches(loader):
            train(x, ids)
            if state["step"] == 3:
                stop()
            if flag:
                {leave}
        if flag:
            break
def main():
    loop()
    return {value}
"""


def ended(job: Job, text: str, *, is_saved: bool = True, **env: str) -> Process:
    """A life that ended by itself, through the interpreter's own end: that is where its code comes from."""
    job.whole_end = True
    life = job.write(text).run(**env)
    life.wait()
    (leaving,) = life.events("leaving")
    assert (
        leaving["why"].strip('"').startswith("saved" if is_saved else "the script ended before it reached a safe point")
    ), life.text
    return life


def assert_goes_on(job: Job, *, to: int) -> None:
    """The next life does what is left."""
    text = (
        "from tests.support.scripts.ground import *\nbegin()\nflag = []\n"
        + LOOP.format(leave="pass", value=0)
        + "loop()"
    )
    life = job.write(text).run()
    assert life.wait() == 0, life.text
    assert f"trained {to} " in life.text


# The script heard of the notice itself.


@pytest.mark.parametrize("begin", [OWN, OWN_AFTER], ids=["handler before listening", "handler after listening"])
@pytest.mark.parametrize("leave", ["break", "return", "sys.exit()", "raise SystemExit"])
def test_a_script_that_stops_early_is_started_again(job: Job, begin: str, leave: str) -> None:
    """It left its loop because of its own handler and ended with 0: that is not finished."""
    # What an exception leaves is half done for all that can be known.
    text = begin + LOOP.format(leave=leave, value=None) + "sys.exit(main())"
    life = ended(job, text, is_saved=leave in ("break", "return"))

    assert life.returncode == 143, life.text
    (changed,) = life.events("exit_code_changed")
    assert changed["exit_code"] == "143"
    if leave == "break":
        assert_goes_on(job, to=12)


def test_between_epochs_no_loop_is_under_way(job: Job) -> None:
    """The flag is looked at behind the evaluation; which epochs were still to come nobody can see from outside."""
    life = ended(
        job,
        OWN
        + """
for epoch in epochs(2):
    for x, ids in migrator.batches(loader):
        train(x, ids)
    stop()
    if flag:
        break
""",
    )

    assert life.returncode == 143, life.text


def test_who_asks_is_leaving_knows(job: Job) -> None:
    """`migrator.is_leaving` is told to the script, so an end behind it may be an early one."""
    life = ended(
        job,
        NONE
        + """
print("before", migrator.is_leaving)
for x, ids in migrator.batches(loader):
    train(x, ids)
    if state["step"] == 3:
        stop_by_file()
    if migrator.is_leaving:
        break
""",
    )

    assert "before False" in life.text
    assert life.returncode == 143, life.text


def test_a_framework_that_ends_its_loop_by_a_system_exit(job: Job) -> None:
    """As Lightning does: a handler that calls those before it, and an exception that is a SystemExit without a code."""
    life = ended(
        job,
        NONE
        + """
class SIGTERMException(SystemExit):
    pass
class HandlersCompose:
    def __init__(self, handlers):
        self.handlers = handlers
    def __call__(self, number, frame):
        for handler in self.handlers:
            handler(number, frame)
before = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, HandlersCompose([lambda number, frame: flag.append(number), before]))
def fit():
    for x, ids in migrator.batches(loader):
        train(x, ids)
        if state["step"] == 3:
            stop()
        if flag:
            raise SIGTERMException
try:
    fit()
finally:
    signal.signal(signal.SIGTERM, before)
""",
        is_saved=False,
    )

    assert life.returncode == 143, life.text


def test_a_script_that_swallows_our_exception(job: Job) -> None:
    """It was interrupted, whatever it makes of that."""
    job.whole_end = True
    life = job.write("""
        from tests.support.scripts.ground import *
        begin()
        try:
            for x, ids in migrator.batches(loader):
                train(x, ids)
                if state["step"] == 3:
                    stop()
        except BaseException as error:
            print("swallowed", type(error).__name__)
        """).run()

    assert life.wait() == 143, life.text
    assert "swallowed Migrated" in life.text


def test_exit_handlers_and_output_of_the_script_are_not_cut_off(job: Job) -> None:
    """Only the code is another: handlers that were registered before ours run as well."""
    life = ended(
        job,
        "import atexit\natexit.register(lambda: print('registered first, called last'))\n"
        + OWN
        + LOOP.format(leave="break", value=None)
        + "main()",
    )

    assert life.returncode == 143, life.text
    assert "registered first, called last" in life.text


# A code of the script's own.


@pytest.mark.parametrize("end", ["sys.exit(main())", "main()\nsys.exit(3)", "raise SystemExit(main())", "exit(main())"])
def test_a_code_of_the_scripts_own_is_kept(job: Job, end: str) -> None:
    """What it says about its end counts, if it says something."""
    life = ended(job, OWN + LOOP.format(leave="break", value=3) + end)

    assert life.returncode == 3, life.text


def test_a_code_that_was_caught_is_none(job: Job) -> None:
    """The script went on, and ended with 0."""
    life = ended(
        job, OWN + LOOP.format(leave="break", value=3) + "try:\n    sys.exit(main())\nexcept SystemExit:\n    pass"
    )

    assert life.returncode == 143, life.text


def test_an_exception_of_the_script_ends_with_our_code(job: Job) -> None:
    """Often it comes of the same SIGTERM: a child process that was ended, a peer that has left."""
    life = ended(job, OWN + LOOP.format(leave="raise ValueError('mine')", value=None) + "main()", is_saved=False)

    assert life.returncode == 143, life.text
    assert "ValueError: mine" in life.text


def test_the_setting_keeps_the_zero(job: Job) -> None:
    """For those who want a script that stops early to count as finished."""
    life = ended(job, OWN + LOOP.format(leave="break", value=None) + "main()", MIGRATOR_KEEP_EXIT_CODE="on")

    assert life.returncode == 0, life.text
    assert not life.events("exit_code_changed")


# The script knows nothing of the notice: it did all that it would have done.


@pytest.mark.parametrize("how", ["stop", "stop_by_file"])
@pytest.mark.parametrize(
    "text",
    [
        'for x, ids in migrator.batches(loader):\n  train(x, ids)\n  if state["step"] == 3:\n    HOW()\n    break',
        "for x, ids in migrator.batches(loader):\n  train(x, ids)\nHOW()",
    ],
    ids=["by its own break", "behind its loop"],
)
def test_a_script_that_finished_just_when_a_notice_came_is_finished(job: Job, how: str, text: str) -> None:
    """Without a handler of its own it cannot have stopped early because of the notice."""
    life = ended(job, NONE + text.replace("HOW", how))

    assert life.returncode == 0, life.text


def test_a_handler_that_was_never_called_told_the_script_nothing(job: Job) -> None:
    """The hook asked, and no SIGTERM came before the end."""
    life = ended(job, OWN + "for x, ids in migrator.batches(loader):\n    train(x, ids)\nstop_by_file()")

    assert life.returncode == 0, life.text


# Several ranks.


@pytest.mark.parametrize("late", ["0", "0.1"], ids=["", "said late"])
def test_ranks_that_stop_together_end_with_one_code(job: Job, late: str) -> None:
    """Rank 0 alone has a handler and tells the others by a collective: no rank counts as finished."""
    job.whole_end = True
    gang = job.write("""
        from datetime import timedelta
        from torch import distributed
        from tests.support.scripts.ground import *
        distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
        rank = distributed.get_rank()
        flag = torch.zeros(1)
        if rank == 0:
            signal.signal(signal.SIGTERM, lambda number, frame: flag.fill_(1))
        begin()
        from migrator.save.attempt import Attempt
        share = Attempt.share
        def share_at_the_end(self):
            while not migrator._session.gate.is_closed:
                time.sleep(0.001)
            share(self)
        Attempt.share = share_at_the_end
        if rank == 0:
            from migrator.ranks.peers import Peers
            send = Peers._send
            def sends_late(self, out):
                time.sleep(float(os.environ["LATE_S"]) if out else 0)
                return send(self, out)
            Peers._send = sends_late
        for x, ids in migrator.batches(loader):
            train(x, ids)
            if rank == 0 and state["step"] == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            distributed.all_reduce(flag)
            if flag:
                break
        """).gang(2, LATE_S=late)

    assert gang.wait() == [143, 143], gang.text
    assert [rank for rank, _ in gang.events("exit_code_changed")] == [0, 1], gang.text
