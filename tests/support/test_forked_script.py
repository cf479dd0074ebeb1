"""A script in the fork server runs and ends as `python SCRIPT` does: output, exit code, order of the last acts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from migrator.testing import Kubelet, container
from tests.support import chance
from tests.support.harness import ROOT, ForkServer, Job
from tests.support.warm_pods import WarmShim

pytestmark = pytest.mark.processes
cold_shim = container.start_shim

ENDS = {
    "by itself": "print('done')",
    "by sys.exit": "import sys\nsys.exit(7)",
    "by a large code": "raise SystemExit(256 + 3)",
    "by a negative code": "raise SystemExit(-1)",
    "by a text": "import sys\nsys.exit('no such file')",
    "by nothing": "raise SystemExit",
    "by an exception": "def f():\n    1 / 0\nf()",
    "by Ctrl-C": "raise KeyboardInterrupt",
    "by a signal": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "by os._exit": "import os\nprint('said')\nos._exit(3)",
    "atexit, last in first out": """
import atexit
atexit.register(print, "registered first")
atexit.register(print, "registered last")
""",
    "an exception in atexit": """
import atexit
def trouble():
    raise ValueError("at the end")
atexit.register(print, "still called")
atexit.register(trouble)
""",
    "threads before atexit": """
import atexit, threading, time
atexit.register(print, "atexit")
def work():
    time.sleep(0.05)
    print("the thread is done")
threading.Thread(target=work).start()
print("the script is done")
""",
    "a generator that nobody ended": """
import atexit
def numbers():
    try:
        yield 1
    finally:
        print("closed")
atexit.register(print, "atexit")
running = numbers()
next(running)
""",
    "objects, those with an underscore first": """
class Told:
    def __init__(self, name):
        self.name = name
    def __del__(self):
        print("gone:", self.name)
b, _a = Told("b"), Told("_a")
""",
    "a loop of objects": """
class Told:
    def __del__(self):
        print("gone")
one = Told()
one.self = one
""",
    "an exception that keeps its frames": """
import atexit
class Told:
    def __del__(self):
        print("gone")
def work():
    kept = Told()
    raise ValueError("with a local variable")
atexit.register(print, "atexit")
work()
""",
    "SystemExit keeps no frames": """
import atexit, sys
class Told:
    def __del__(self):
        print("gone")
def work():
    kept = Told()
    sys.exit(2)
atexit.register(print, "atexit")
work()
""",
    "finalizers of multiprocessing": """
import multiprocessing.util
multiprocessing.util.Finalize(None, print, ("finalized",), exitpriority=10)
""",
    "weakref.finalize": """
import weakref
class Thing:
    pass
thing = Thing()
weakref.finalize(thing, print, "finalized")
""",
    "a process of its own": """
import multiprocessing
def work():
    print("child", flush=True)
if __name__ == "__main__":
    for method in ("fork", "spawn"):
        process = multiprocessing.get_context(method).Process(target=work)
        process.start()
        process.join()
        print(process.exitcode)
""",
    "a daemon thread is left": """
import atexit, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
atexit.register(print, "atexit")
""",
    "what it is": "print(__name__, __file__.rpartition('/')[2], __spec__, __package__, __builtins__)",
    "its arguments": "import sys\nprint(sys.argv[1:], sys.path[0].rpartition('/')[2] != '')",
}


@pytest.mark.parametrize("whole_end", [False, True])
@pytest.mark.parametrize("how", chance.some("ends", ENDS, 0.4))
def test_a_script_ends_as_it_does_by_itself(job: Job, how: str, whole_end: bool) -> None:
    """The same lines and the same exit code; of a traceback the script's own part."""
    job.write(ENDS[how]).whole_end = whole_end
    alone = subprocess.run(
        [sys.executable, "-u", str(job.script), "a", "b"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
        timeout=60,
    )

    life = job.run("a", "b")

    assert life.wait() == alone.returncode, life.text
    assert lines(life.text) == lines(alone.stdout)


def lines(text: str) -> list[str]:
    """What was printed, but for the frames that stand above the script, and marks below the code of one."""
    frames = r"tests/support/(forked_script|forkserver|warm_pods|scripts/shim)\.py"
    above = rf'  File "{re.escape(str(ROOT))}/{frames}".*\n    .*\n(    [~^ ]+\n)?'
    above_in_pod = rf'  File "{re.escape(str(ROOT))}/migrator/testing/_shim\.py".*\n    .*\n(    [~^ ]+\n)?'
    for pattern in (above, above_in_pod, r'  File "<frozen runpy>".*\n', r"(?<=0x)[0-9a-f]+"):
        text = re.sub(pattern, "", text)
    return [line for line in text.splitlines() if line.strip(" ~^")]


KEPT = """
import sys, threading, time, types
class Told:
    def __del__(self):
        print("gone")
other = sys.modules["other"] = types.ModuleType("other")
other.kept = Told()
"""
DAEMON = "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"


@pytest.mark.parametrize(
    ("more", "whole_end", "is_whole"), [("", False, False), ("", True, True), (DAEMON, False, True)]
)
def test_an_end_is_whole_if_it_is_asked_for_or_a_thread_is_left(
    job: Job, more: str, whole_end: bool, is_whole: bool
) -> None:
    """Only the interpreter's own end takes apart what its modules hold: what may go wrong there is not left out."""
    job.write(KEPT + more).whole_end = whole_end

    life = job.run()

    assert life.wait() == 0, life.text
    assert life.text == ("gone\n" if is_whole else "")


TRAPS = {
    **ENDS,
    "a missing script": None,
    "a broken pipe": """
import os
read, write = os.pipe()
os.close(read)
try:
    os.write(write, b"x")
except BrokenPipeError:
    print("told")
""",
    "a handler that raises while threads are joined": """
import os, signal, threading, time
def handle(number, frame):
    raise SystemExit(9)
signal.signal(signal.SIGTERM, handle)
def work():
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
threading.Thread(target=work).start()
""",
}


@pytest.mark.parametrize("how", TRAPS)
def test_a_script_ends_in_a_warm_pod_as_in_a_cold_one(
    kubelet: Kubelet, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    """The same exit code and the same lines, also of process 1."""
    script = tmp_path / "train.py"
    text = TRAPS[how]
    if text is not None:
        script.write_text(text)
    stops = []
    for shim in (lambda: WarmShim(fork_server), cold_shim):
        monkeypatch.setattr(container, "start_shim", shim)
        pod = kubelet.run([sys.executable, "-u", str(script), "a", "b"], name=f"pod-{len(stops)}")
        stops.append((pod.wait().exit_code, lines(pod.log)))

    assert stops[0] == stops[1]
