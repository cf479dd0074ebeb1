"""Why something was not saved, or not committed, or not by all ranks: the texts, each from what is known."""

from __future__ import annotations

from migrator.ckpt.point import Point
from migrator.leaving.leaving import Leaving
from migrator.loop.gate import Gate
from migrator.ranks.peers import Peers
from migrator.ranks.protocol import Self
from migrator.ranks.shares import Gathering

GONE_ON = "it has gone on already"
NOT_COPIED = "what is costly to copy was not copied there (capture_costly)"
_ASK_ALL = (
    "A rank that does not know of a save does not wait for it, if the ranks exchange nothing, and does not copy what "
    "is costly to copy. Call save_ckpt() on all ranks behind the same step"
)


def why_no_more(leaving: Leaving) -> str:
    """Why no further save is made."""
    return "the process is leaving" if leaving.notice is not None else "its script has ended"


def why_not(target: Point, gate: Gate, leaving: Leaving) -> str:
    """What keeps this rank from saving that safe point."""
    reach = gate.reach
    if gate.is_at(target) and gate.is_lost(target):
        return NOT_COPIED
    has_gone_on = reach is not None and reach > target and not gate.can_save(target)
    return GONE_ON if has_gone_on else why_no_more(leaving)


def advice(missed: str) -> str:
    """What the script can do about a safe point that a rank missed."""
    return f". {_ASK_ALL}" if any(why in missed for why in (GONE_ON, NOT_COPIED)) else ""


def why_alone(ranks: Peers, me: Self) -> str:
    """What keeps this rank, as it was before, from saving with the others."""
    decision = ranks.known.decision(me.ballot)
    if me.is_unclean:
        return "what it holds changed outside a step"
    if decision is None or decision.target is None:
        lost = "the job's store is gone" if ranks.store_is_unreachable else "the others have nothing to save"
        return f"{lost}; no step was agreed on"
    if me.reach is None:
        return "its script ends"
    step, turn = decision.target
    if me.reach[0] > step:
        return f"it is past step {step}, which was agreed on"
    if me.reach > decision.target:
        return f"it is in the next epoch, and what it held of step {step} before that changed"
    where = f"the epoch behind step {step}" if turn else f"step {step}"
    return f"it did not come to {where}, which was agreed on, in time"


def why_uncommitted(ranks: Peers, gathering: Gathering | None, *, writes: bool) -> str:
    """This rank has written its share, the grace is over, and there is no ckpt."""
    if not writes:
        return "rank 0, which writes for all ranks, did not commit within the grace"
    if gathering is None:
        return "what the other ranks wrote could not be looked at within the grace"
    missing = gathering.missing()
    if missing:
        silent = sorted(set(range(ranks.size)) - gathering.alike().keys())
        of = f"; nothing that fits came from rank {', '.join(map(str, silent))}" if silent else ""
        return f"{len(missing)} of {gathering.shares} shares were not written within the grace{of}"
    lowest = min(gathering.records)
    if lowest not in gathering.alike():
        return f"rank {lowest} holds other tensors than this one, and did not commit its own within the grace"
    return "all shares were written, but the ckpt was not committed within the grace"


def why_missing(ranks: Peers, rank: int, gathering: Gathering) -> str:
    """What is known of a rank whose own state is not in the ckpt. That it was late is said only if it was."""
    said = {line.what: line for line in ranks.known.lines if line.rank == rank}
    if rank in gathering.records:
        names = gathering.unlike().get(rank, [])
        return f"it holds other tensors than rank {min(gathering.alike())}: {', '.join(names)}"
    if rank in gathering.newer:
        return gathering.newer[rank]
    if "bye" in said:
        return "its script had ended"
    if "failed" in said:
        return f"it could not write: {said['failed'].info}"
    if "alone" in said:
        return "it could not come to this step and saves the one it is at"
    if ranks.store_is_unreachable:
        return "the job's store is gone, and nothing of it was found on storage in time"
    if not ranks.is_alive_there(rank):
        return "it shows no sign of life: its process ended, froze or was cut off"
    return "it is alive and had not written what is its own in time"
