"""Training scripts of several ranks as people write them: stopped, resumed, and compared with the run nobody stopped.

A script is what stands between `BEGIN` and `END`. It says `trained(step, ...)` behind each step, and may have
`moment(name)` wherever else it is to be stopped. `AT` names the step or the moment of a life at which the rank
`AT_RANK` gets SIGTERM, or finds the request of its pod's hook (`HOW=file`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.harness import Job
from tests.support.rank_history import RankStory, add_next_ranks, unstopped_ranks

BEGIN = '''
import hashlib, os, random, signal, time
from contextlib import nullcontext
from pathlib import Path
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, TensorDataset
from migrator import ElasticSampler, migrator

def digest(*values):
    """Of all state, to the last bit."""
    found = hashlib.sha256()
    def walk(value):
        if isinstance(value, torch.Tensor):
            found.update(value.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, item in value.items():
                found.update(repr(key).encode())
                walk(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item)
        else:
            found.update(repr(value).encode())
    for value in values:
        walk(value.state_dict() if hasattr(value, "state_dict") else value)
    return found.hexdigest()[:16]

def moment(name):
    """The pod may be told to go here."""
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
    if os.environ.get("AT") != str(name) or os.environ.get("AT_RANK", "0") not in (str(rank), "all"):
        return
    if os.environ.get("HOW") == "file":
        file = Path(os.environ["MIGRATOR_SIGNAL"])
        aside = file.with_name(f"aside-{rank}")
        aside.write_text(f"save\\nrequest=r-1\\ndeadline={time.time() + 20}\\n")
        aside.rename(file)
    else:
        os.kill(os.getpid(), signal.SIGTERM)
    end_s = time.monotonic() + 60
    while not migrator._session.is_leaving:
        assert time.monotonic() < end_s
        time.sleep(0.0005)

def trained(step, *words):
    print(" ".join(map(str, ["trained", step, *words])), flush=True)
    moment(step)

torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 8), torch.arange(48))
state = {"step": 0}
'''

GROUP = """
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
"""

LISTEN = """
for name, value in registered.items():
    migrator.register(name, value, own=name in globals().get("own", ()))
migrator.listening(every=os.environ.get("MIGRATOR_EVERY", "off"))
if migrator.resume:
    migrator.load_ckpt()
print("resumed", state["step"], flush=True)
"""

END = """
print("final", digest(*registered.values()), flush=True)
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
"""

Stop = tuple[int | str, int | str]
"""Where, and on which rank; `all`: on each."""


def resumed(job: Job, stops: Sequence[Stop], *, size: int = 2, **more: Any) -> RankStory:
    """The job as it is stopped at these places, one a life, by SIGTERM and by the hook in turn, and goes on to its end.

    No step is trained behind the one that was saved, on any rank.
    """
    story = RankStory()
    for turn, (place, rank) in enumerate(stops):
        how = ("sigterm", "file")[turn % 2]
        gang = job.gang(size, pods=size, **{**more, "AT": str(place), "AT_RANK": str(rank), "HOW": how})
        assert gang.wait() == [143] * size, gang.text
        # A thing that is lost in a stop where nobody was lost may still come out right by chance.
        lost = {name: gang.events(name) for name in ("rank_lost", "saving_alone", "ranks_differ") if gang.events(name)}
        assert lost == {}, gang.text
        add_next_ranks(story, gang)
    gang = job.gang(size, pods=size, **more)
    assert gang.wait() == [0] * size, gang.text
    add_next_ranks(story, gang)
    return story


def assert_resumes_as_if_nothing_had_happened(
    job: Job, stops: Sequence[Stop], *, size: int = 2, **more: Any
) -> RankStory:
    """Each rank's steps and its state at the end are those of the run that nobody stopped, bit for bit."""
    reference = unstopped_ranks(job, size, **more)
    story = resumed(job, stops, size=size, **more)
    assert story.steps == reference.steps, story.text
    assert set(story.final) == set(range(size)), story.text
    assert story.final == reference.final, story.text
    return story
