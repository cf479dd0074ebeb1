"""A rank of torchrun's, with its output in a file of its own: `worker.py SCRIPT ...` is `SCRIPT ...`.

torchrun's own log files will not do: a group that is formed anew because a node came or went
overwrites those of the group before. TESTS_OUT is what the files' names begin with.
"""

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1

# As in a pod, whose container ends with the agent: nothing outlives a test.
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if str(os.getppid()) != os.environ["TESTS_AGENT"]:
    os._exit(1)

stem = Path(os.environ["TESTS_OUT"])
local, rank, size = (os.environ[name] for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"))
life = len(list(stem.parent.glob(f"{stem.name}-*-local-{local}-*")))
name = f"{stem.name}-life-{life}-local-{local}-rank-{rank}-of-{size}-pid-{os.getpid()}.txt"
out = os.open(stem.with_name(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
os.dup2(out, 1)
os.dup2(out, 2)
# torchrun starts ranks with `-u`, where a line is written in pieces.
sys.stdout.reconfigure(line_buffering=True, write_through=False)
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
