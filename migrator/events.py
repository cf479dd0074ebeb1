"""Log records with a name and fields, one line each, easy to search with grep.

Each name is listed here once with its meaning; logging a name that is not listed
raises an error. Example: `committed ckpt=000003-000000000412 step=412 ...`.

A line never contains a TAB or the word `Epoch`: training operators search logs for
such lines and would read them as progress of the job (`platform/progress_line.py`).
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("migrator")

EVENTS = {
    # the node check
    "node_check": "the check of the nodes begins; shows how many ranks take part and what it may take",
    "node_round": "a round of the node check begins; shows which ranks this rank meets",
    "node_times": "a row of the node check's table: what one rank took in each round",
    "nodes_good": "the node check found no node at fault",
    "node_slow": "the better round of a node took more than twice the median: the training will run at its speed",
    "node_fault": "the pod of this node has to be replaced; `why` says what happened in each round",
    # a life begins
    "listening": "the watcher runs; shows where ckpts are written and which ways of notice are watched",
    "storage_warning": "the place for ckpts can be used but has a weakness",
    "storage": "where ckpts go, and how: past the page cache of a volume, or by which library to which kind of store",
    "generation_claimed": "this life has a generation number",
    "generation_unreadable": "the record of an earlier life cannot be read; its ckpts can still be loaded",
    "fork": "two lives continued the same ckpt; the one that trained further counts",
    "other_lineage": "there are ckpts of another lineage in the same place; they are neither loaded nor deleted",
    "other_script": "script or arguments differ from those of the life that is continued",
    "grace_too_short": "an earlier save took at least as long as the time from SIGTERM to SIGKILL; says what to set",
    "waiting_for_leaving": "an earlier life is still saving; this life waits for its ckpt or for the end of its grace",
    "not_waiting": "an earlier life died while it was saving; this life does not wait for it",
    "memory_before": "the life before ended without a last save; shows how much memory it used, and what a save needs",
    "setting_unknown": "a variable begins with MIGRATOR_ but is not a setting; it may be a typo",
    "setting_alias": "a variable of pytorchjob-migration is used",
    # loading
    "ckpt_bad": "a ckpt is not what was committed; it is left in place and the previous one is loaded",
    "loading": "progress of a long load",
    "loaded": "all registered objects have the state of the ckpt",
    "other_strides": "the memory layout (strides) of parameters differs from when they were saved",
    "other_requires_grad": "requires_grad of some parameters differs from when they were saved",
    "loaded_legacy": "a migration.pth of pytorchjob-migration was loaded",
    # several ranks
    "ranks": "all ranks have called listening(); shows which ranks share this pod and which rank writes",
    "ranks_differ": "ranks hold different tensors that should be equal; those of the lowest rank are saved",
    "roots_apart": "not all ranks see the same root directory; rank 0 writes and reads for all ranks",
    "launcher_warning": "the job was started in a way that can lose it when its pod ends",
    "store_found": "the job's store answers again, through a new connection",
    "store_lost": "the connection to the job's store broke; until `store_found` ranks only use storage",
    "agreed": "the ranks agreed on the step to save",
    "saving_alone": "this rank cannot save with the others, see `why`; it saves the step that it is at, alone",
    "agreed_anew": "the agreed step could not be saved; the ranks agree on another one",
    "share_taken_over": "another rank writes a share because its own rank did not write it in time",
    "rank_lost": "the ckpt does not contain the own state of a rank; `why` shows what is known about this rank",
    "rank_newer": "a rank runs a newer version, and this rank cannot read what it wrote; `why` says what to do",
    "random_derived": "the ckpt has no random state for this rank; it was derived from that of another rank",
    "own_of_another_rank": "other ranks than before, or one was lost: own=True objects get the lowest rank's state",
    "epoch_repeated": "an interrupted epoch begins anew: other ranks without ElasticSampler, or MIGRATOR_LOOPS=anew",
    # training
    "no_safe_point": "optimizers make steps, but the script has no safe point",
    "implied_safe_points": "safe points are implied; an interrupted epoch will be repeated from its start",
    "unregistered_optimizer": "an optimizer that is not registered changes registered tensors",
    "comm_hook_not_saved": "a DDP communication hook keeps state that is not registered; a resume starts it empty",
    "comm_hook_waits": "gradients are averaged without compression until DDP has rebuilt its buckets",
    "unstorable": "a registered object holds a value that cannot be stored; the rest of it is saved",
    "changed_while_copied": "another thread changed an object in each attempt to copy it at a safe point",
    "stale_state": "an optimizer holds state of parameters that are no longer in its groups; this state is not saved",
    "capture_costly": "an object is captured only when a save is due, because its capture would slow down the steps",
    "changed_outside_step": "a registered tensor changed outside an optimizer step; this attempt to save was discarded",
    "main_thread_only": "an object changes outside optimizer steps; from now on it is saved at safe points only",
    "batch_unused": "two batches were taken without a computation between them",
    "loops_alike": "equal loaders are iterated at the same place of the script; a resume could not tell them apart",
    "loader_too_large": "a loader contains too many objects to search all of them for random generators",
    "count_begins_anew": "an iterator between batches() and the loop counts from 0 in the middle of an epoch",
    "loader_not_followed": "a loader is used over several steps without batches(); a resume starts it anew",
    "workers_persist": "state that persistent workers keep over epochs starts anew after a resume",
    "trained_by_hand": "no optimizer makes steps; each batch in which a registered tensor changes counts as a step",
    "epoch_advanced": "set_epoch() was not called; the sampler went on to the next epoch by itself",
    "wakeup_fd_taken": "other code had replaced the signal wakeup fd; it was restored",
    "gate_stall": "the training loop waited for a save",
    # notice
    "signal": "the notice that this pod must leave",
    "signal_early": "the notice that this pod must leave came before the end of listening(): no step is trained",
    "signal_ignored": "the signal file contains something that is not a request to this pod",
    "sigterm_silenced": "C code had replaced the handler of SIGTERM; it was restored",
    "handler_held_back": "another SIGTERM handler tried to end the process; it has to wait for the save",
    "loader_error_swallowed": "the loader failed after a notice; the last finished step is being saved",
    # saving
    "saving": "progress of a long save",
    "save_given_up": "a periodic save was given up, so that the newest step can be saved",
    "part_written": "a rank's share of the ckpt is durable",
    "committed": "the ckpt exists",
    "joined": "another save has committed this step already; nothing was written twice",
    "later_life": "a later life of the job began before this ckpt was committed, and continues without it",
    "save_failed": "a save failed; the previous ckpt is unchanged",
    "save_retry": "a save failed for a reason that may be temporary; it is tried again",
    "save_too_long": "a save takes at least as long as the time from SIGTERM to SIGKILL; says what to set",
    "saves_slow_training": "saves hold the loop up for more than 1 % of its time; says which interval costs less",
    "save_late": "a requested save is made at the next safe point",
    "retired": "ckpts that are no longer kept were deleted",
    "retention_failed": "an old ckpt could not be deleted",
    # leaving
    "leaving": "the state is saved, or cannot be saved; the process leaves",
    "left_hard": "the main thread could not be ended in time; the process ended at once",
    "agent_ended": "torchrun started ranks again in a pod that is about to end; they sent SIGTERM to its agent",
    "exit_code_changed": "the script received the notice and ended with 0; the process ends with MIGRATOR_EXIT_CODE",
    "watch_weak": "one way to receive a notice does not work here; the others do",
    "answer_failed": "the answer to the hook could not be written",
}

rank = 0
"""The rank of this process; set in `listening()`."""


def log(event: str, /, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log one event. Line ends in a field become blanks."""
    if event not in EVENTS:
        raise KeyError(f"{event!r} is not an event of this package: list it in events.py")
    # By default `logging.config` disables all loggers that it does not name. Our errors must be logged all the same;
    # to log less, set the level of the logger.
    logger.disabled = False
    if logger.isEnabledFor(level):
        logger.log(level, "%s", line(event, fields), extra={"migrator_event": event, "migrator_fields": fields})


def line(event: str, fields: dict[str, Any]) -> str:
    """The text of the record: `event key=value ...`. A value with blanks is quoted."""
    return " ".join([event, *(f"{key}={_shown(value)}" for key, value in fields.items())])


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = without_epoch(" ".join(str(value).split()))
    return f'"{text}"' if " " in text or text == "" else text


def without_epoch(text: str) -> str:
    """`Epoch` as `E\\poch`: KubeDL's controller crashes at a line that has this word and is no progress of the job.

    It may be part of a path, of the name of a class, or of somebody else's error. A shell reads both alike.
    """
    return text.replace("Epoch", r"E\poch")


def ensure_visible() -> None:
    """Log to stderr if the script has not configured logging at all.

    Otherwise the owner of a stopped job would see no reason. A job that has configured
    logging gets our records through its own handlers only.
    """
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(_Line("%(asctime)s migrator rank %(rank)s: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        record.rank = rank
        return super().format(record)
