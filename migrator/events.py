"""Log records with a name and fields: what happened, in one line that greps well.

Every name is listed here once with its meaning; a name that is not listed is a
bug and raises. A line reads `committed ckpt=000003-000000000412 step=412 ...`.

Lines never hold a TAB and never begin with a capital: log scrapers of training
operators read such lines as progress of their own.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("migrator")

EVENTS = {
    # a life begins
    "listening": "the watcher is on; says where ckpts go and how the signal comes",
    "storage_warning": "the place for ckpts works but has a weakness",
    "generation_claimed": "this life has its number",
    "generation_unreadable": "the record of an earlier life does not parse; its ckpts stay reachable",
    "fork": "two lives went on from the same ckpt; the one that trained further counts",
    "other_lineage": "ckpts of another lineage lie beside ours; they are neither loaded nor deleted",
    "other_script": "script or arguments differ from those of the life that is continued",
    "waiting_for_leaving": "an earlier life is still saving; waits for its ckpt or the end of its grace",
    "not_waiting": "an earlier life died while it was saving; nobody waits for it any more",
    "setting_unknown": "a variable with our prefix that is no setting: a typo?",
    "setting_alias": "a variable of the predecessor is in use",
    # loading
    "ckpt_bad": "a ckpt is not what was committed; it is left in place and the one before is taken",
    "loading": "progress of a long load",
    "loaded": "everything registered is back at the ckpt's step",
    "other_strides": "parameters lie in memory in another order than when they were saved",
    "other_requires_grad": "requires_grad of some parameters is not what it was when they were saved",
    "loaded_legacy": "a migration.pth of the predecessor was loaded",
    # several ranks
    "ranks": "the ranks of this job have met; says which ranks share this pod and who writes",
    "ranks_differ": "ranks hold different tensors where they should hold the same; those of the lowest rank are saved",
    "roots_apart": "not all ranks see the same root; rank 0 writes and reads for all",
    "launcher_warning": "the way this job was started can lose it when the pod goes",
    "store_found": "the job's store answers again, by a new connection",
    "store_lost": "the job's store is gone, or out of reach; until `store_found` ranks find each other on storage only",
    "agreed": "the ranks came to one answer: the step they save",
    "settled": "this rank cannot save with the others, `why` says for what reason; it saves the step it is at, alone",
    "agreed_anew": "the step agreed on could not be saved; another one is agreed on",
    "share_taken_over": "a share that its rank did not write in time is written by another one",
    "rank_lost": "a rank's own state is not in the ckpt; `why` says what is known of that rank",
    "random_derived": "there is no random state for this rank in the ckpt; one was derived from another rank's",
    "own_of_another_rank": "other ranks than before, or one was lost: what is own=True is that of the lowest rank",
    "epoch_repeated": "an interrupted epoch begins anew: other ranks without ElasticSampler, or MIGRATOR_LOOPS=anew",
    # training
    "no_safe_point": "optimizers step but no safe point was ever made",
    "implied_safe_points": "safe points are implied; an interrupted epoch will be repeated from its start",
    "unregistered_optimizer": "an optimizer that is not registered changes registered tensors",
    "comm_hook_not_saved": "a communication hook of DDP keeps a state that is not registered; a resume begins it anew",
    "comm_hook_waits": "gradients are averaged without compression until DDP has packed its buckets",
    "unstorable": "a registered object holds something that no ckpt can; the rest of it is saved",
    "changed_while_copied": "another thread changed an object each time a safe point was to copy it",
    "stale_state": "an optimizer holds state of parameters that it does not step any more; it is not saved",
    "capture_costly": "an object is captured only when a save is due, its capture would slow the steps",
    "changed_outside_step": "a registered tensor changed outside an optimizer step; the attempt was thrown away",
    "main_thread_only": "an object changes outside steps; from now on it is saved at safe points only",
    "batch_unused": "two batches were taken and nothing was computed between them",
    "loops_alike": "loaders that look alike are gone over at one place; a resume could not tell them apart",
    "loader_too_large": "a loader has more objects than are looked through for generators",
    "count_begins_anew": "what stands between batches() and the loop counts from 0 in the middle of an epoch",
    "loader_not_followed": "a loader is drawn from over several steps without batches(); a resume begins it anew",
    "workers_persist": "what lives on in persistent workers over epochs begins anew after a resume",
    "trained_by_hand": "no optimizer steps; each batch in which a registered tensor changes is a step",
    "epoch_advanced": "set_epoch was not called; the sampler went on to the next epoch by itself",
    "wakeup_fd_taken": "somebody replaced the signal wakeup fd; it was taken back",
    "gate_stall": "the training loop waited for a save",
    # news
    "signal": "the news that this pod must leave",
    "signal_early": "the news that this pod must leave came before listening() was through: no step is trained",
    "signal_ignored": "the signal file says something that is no request",
    "sigterm_silenced": "C code had taken SIGTERM away from Python; it was taken back",
    "handler_held_back": "another SIGTERM handler wanted to end the process; it has to wait for the save",
    "loader_error_swallowed": "the loader failed while a signal is pending; the step before is being saved",
    # saving
    "saving": "progress of a long save",
    "save_given_up": "a save under way was given up for the newest step",
    "part_written": "a rank's bytes are durable",
    "committed": "the ckpt exists",
    "joined": "the step is saved already; nothing was written twice",
    "later_life": "a later life of the job has begun without this ckpt and goes on without it",
    "save_failed": "a save could not be made durable; the ckpt before is untouched",
    "save_retry": "a save failed for a reason that may pass; it is tried again",
    "save_too_long": "a save takes as long as a pod has from SIGTERM to SIGKILL, or longer; says what to set",
    "save_late": "a requested save is made at the next safe point",
    "retired": "ckpts that are no longer kept were deleted",
    "retention_failed": "an old ckpt could not be deleted",
    # leaving
    "leaving": "state is safe, or cannot be made safe; the process leaves",
    "left_hard": "the main thread did not come back in time; the process ended at once",
    "agent_ended": "torchrun started ranks again in a pod that has saved and goes; they sent SIGTERM to its agent",
    "exit_code_changed": "the script heard of the notice and ended with 0; the process ends with MIGRATOR_EXIT_CODE",
    "watch_weak": "a way of noticing the signal does not work here; the others do",
    "answer_failed": "the answer to the hook could not be written",
}

rank = 0
"""Which rank speaks; set once in `listening()`."""


def log(event: str, /, *, level: int = logging.INFO, **fields: Any) -> None:
    """Write one named record. A field's text is kept on one line."""
    if event not in EVENTS:
        raise KeyError(f"{event!r} is not an event of this package: list it in events.py")
    # `logging.config` disables all loggers that it does not name, in its default. Our errors have to be heard;
    # who wants less of them sets the level.
    logger.disabled = False
    if logger.isEnabledFor(level):
        logger.log(level, "%s", line(event, fields), extra={"migrator_event": event, "migrator_fields": fields})


def line(event: str, fields: dict[str, Any]) -> str:
    """`event key=value ...`; a value with blanks is quoted."""
    return " ".join([event, *(f"{key}={_shown(value)}" for key, value in fields.items())])


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = " ".join(str(value).split())
    return f'"{text}"' if " " in text or text == "" else text


def ensure_visible() -> None:
    """Give our lines a way to stderr if the script set up no logging at all.

    A job that is stopped and says nothing leaves its owner guessing; a job that
    has configured logging gets our records through its own handlers only.
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
