"""A training job with its ckpts in S3 that halts itself at one of its requests.

HALT names the request and its occurrence (`finish:2`), HOW what it does there: `stop` sends SIGSTOP to the whole
process, as a node does that freezes, and `hold` lets only the thread that saves wait until the file `go` is there.

    claim     before the first PUT for the record of this life: that of its claim in a store without conditions
    record    before the PUT of the record itself: behind the LIST of its claim, if there is one
    part      an upload is pending, and nothing of it is sent
    finish    all of it is handed over, and it is not finished
    commit    the part is finished; before the first look at it for the manifest
    put       before the PUT of the manifest, which was decided
    answered  behind that PUT
    retire    before a ckpt that is not kept any more is deleted

STEPS is the last step, MB the size of the state, S the time of a step. NO_OBSTORE=1: on a machine without obstore.
"""

import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

if os.environ.get("NO_OBSTORE"):
    sys.modules["obstore"] = None

import torch

from migrator import migrator
from migrator.ckpt.names import parse_record_name
from migrator.storage.object_storage import ObjectStorage

HALT, HOW = os.environ.get("HALT", ""), os.environ.get("HOW", "stop")
seen = Counter()


def halt(moment):
    seen[moment] += 1
    if f"{moment}:{seen[moment]}" != HALT:
        return
    print(f"halts {HALT}\n", end="", flush=True)
    if HOW == "stop":
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    while HOW == "hold" and not Path("go").exists():
        time.sleep(0.002)
    print("goes on\n", end="", flush=True)


made, upload, put_name = ObjectStorage.__init__, ObjectStorage.upload, ObjectStorage.put


def halting(self, client, *args):
    """The storage of this life, which halts around requests of its client."""
    put, delete = client.put, client.delete

    def halting_put(key, data, **how):
        directory, _, name = key.rpartition("/")
        is_record = parse_record_name(name) is not None
        if directory.endswith("/generations") and (is_record or name.endswith(".claim")):
            halt("claim")
        if directory.endswith("/generations") and is_record:
            halt("record")
        if name == "manifest.json":
            halt("put")
        put(key, data, **how)
        if name == "manifest.json":
            halt("answered")

    def halting_delete(key):
        if key.endswith("manifest.json"):
            halt("retire")
        delete(key)

    client.put, client.delete = halting_put, halting_delete
    made(self, client, *args)


def halting_upload(self, name, **how):
    begun = upload(self, name, **how)
    halt("part")
    finish = begun.finish

    def halting_finish():
        halt("finish")
        finish()

    begun.finish = halting_finish
    return begun


def halting_put_name(self, name, data, **how):
    if name.endswith("manifest.json"):
        halt("commit")
    put_name(self, name, data, **how)


ObjectStorage.__init__, ObjectStorage.upload, ObjectStorage.put = halting, halting_upload, halting_put_name

state, weights = {"step": 0, "sum": 0.0}, torch.zeros(max(1000, int(float(os.environ.get("MB", "0")) * (1 << 18))))
migrator.register("state", state)
migrator.register("weights", weights)
migrator.listening()
if migrator.resume:
    print("loaded", migrator.load_ckpt(), "at", state["step"])
assert float(weights[0]) == float(weights[-1]) == sum(range(state["step"] + 1)), "the state is of no single step"
while state["step"] < int(os.environ.get("STEPS", "1000000000")):
    state["step"] += 1
    state["sum"] += 0.1 * state["step"]
    weights += state["step"]
    migrator.safe_point()
    print(f"step {state['step']}\n", end="", flush=True)
    time.sleep(float(os.environ.get("S", "0.01")))
print("result", state["sum"].hex(), float(weights[0]))
