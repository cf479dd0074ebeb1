"""What the files of a job are called. Names are built and parsed here and nowhere else.

generations/000007.json                  the record of a life; .leaving, .from and .memory-00000 lie beside it
000007-000000000412/                     a ckpt: generation - step
    part-00000-of-00002.safetensors      a share of the large tensors
    own-of-rank-00001.safetensors        what one rank has for itself
    rank-00001.json                      the record of a rank
    manifest.json                        the commit
"""

from __future__ import annotations

import re

MANIFEST = "manifest.json"
"""The file of a ckpt whose appearance is the commit."""
GENERATIONS = "generations"
"""Where records, marks and notes of lives lie."""
COUNT_MAX = 1 << 62
"""Upper limit of generations, steps, ranks, bytes and sizes of tensors: a signed 64-bit integer holds all below it."""

_CKPT = re.compile(r"([0-9]{6,})-([0-9]{12,})", re.ASCII)
_BY = r"rank-[0-9]{5}(?:-[0-9]{1,9})?"
_PART = re.compile(rf"(?:part-([0-9]{{5}})-of-([0-9]{{5}})(?:-{_BY})?|own-of-{_BY})\.safetensors", re.ASCII)
_RECORD = re.compile(r"([0-9]{6,18})\.json", re.ASCII)
_NOTE = re.compile(r"([0-9]{6,18})\.from", re.ASCII)
_MEMORY_NOTE = re.compile(r"([0-9]{6,18})\.memory-([0-9]{5,9})", re.ASCII)
_RANK_RECORD = re.compile(r"rank-([0-9]{5})\.json", re.ASCII)


# Ckpts and the files in them.


def ckpt_name(generation: int, step: int) -> str:
    """The directory of a ckpt."""
    return f"{generation:06d}-{step:012d}"


def parse_ckpt_name(name: str) -> tuple[int, int] | None:
    """(generation, step); None if it is not the name of a ckpt."""
    match = _CKPT.fullmatch(name)
    if match is None:
        return None
    found = int(match[1]), int(match[2])
    return found if max(found) < COUNT_MAX and ckpt_name(*found) == name else None


def file_in(ckpt: str, file: str) -> str:
    """A file of a ckpt, as storage knows it."""
    return f"{ckpt}/{file}"


def manifest_name(ckpt: str) -> str:
    """The manifest of a ckpt, as storage knows it."""
    return file_in(ckpt, MANIFEST)


def part_name(index: int, count: int, *, rank: int | None = None, attempt: int = 1) -> str:
    """The file of a share. With several ranks it names its writer, so no rank overwrites another's file."""
    return f"part-{index:05d}-of-{count:05d}{'' if rank is None else '-' + _by(rank, attempt)}.safetensors"


def own_name(rank: int, attempt: int = 1) -> str:
    """The file of what one rank has for itself."""
    return f"own-of-{_by(rank, attempt)}.safetensors"


def _by(rank: int, attempt: int) -> str:
    return f"rank-{rank:05d}" + (f"-{attempt}" if attempt > 1 else "")


def is_part_name(name: str) -> bool:
    """Whether a file of this name can be a share or what one rank has for itself."""
    match = _PART.fullmatch(name)
    return match is not None and (match[1] is None or int(match[1]) < int(match[2]))


def rank_record_name(rank: int) -> str:
    """The file in which a rank says what it has written."""
    return f"rank-{rank:05d}.json"


def parse_rank_record_name(name: str) -> int | None:
    """The rank; None if it is not the name of a rank's record."""
    return _number(_RANK_RECORD, name)


# Lives, as storage knows their files.


def record_name(generation: int) -> str:
    """The file that claims the number of a life."""
    return f"{GENERATIONS}/{generation:06d}.json"


def parse_record_name(name: str) -> int | None:
    """The generation, by a name listed in `GENERATIONS`; None if it is not that of a record."""
    return _number(_RECORD, name)


def mark_name(generation: int) -> str:
    """The file that says that a life is still saving."""
    return f"{GENERATIONS}/{generation:06d}.leaving"


def note_name(generation: int) -> str:
    """The file that says which ckpt a life goes on from."""
    return f"{GENERATIONS}/{generation:06d}.from"


def parse_note_name(name: str) -> int | None:
    """The generation, by a name listed in `GENERATIONS`; None if it is not that of a note."""
    return _number(_NOTE, name)


def memory_note_name(generation: int, rank: int) -> str:
    """The file that says how much memory a pod of a life uses; the rank speaks for the pod."""
    return f"{GENERATIONS}/{generation:06d}.memory-{rank:05d}"


def parse_memory_note_name(name: str) -> tuple[int, int] | None:
    """(generation, rank), by a name listed in `GENERATIONS`; None if it is not that of such a note."""
    match = _MEMORY_NOTE.fullmatch(name)
    if match is None:
        return None
    found = int(match[1]), int(match[2])
    return found if memory_note_name(*found) == f"{GENERATIONS}/{name}" else None


def _number(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.fullmatch(name)
    return None if match is None else int(match[1])
