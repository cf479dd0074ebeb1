"""Which ckpts there are, in the order in which a life may load them, and whether one is whole.

Two lives may go on from the same ckpt: a life that was thought dead may still run, and
a pod that has to leave may start training while its replacement already runs. That is
a fork. Both branches are valid, and the higher generation is not always the better one:
a pod that has to leave and starts slowly gets the higher number. So the next life takes
the ckpt with the highest step, and logs the branch that it leaves behind.
"""

from __future__ import annotations

from migrator.ckpt.generations import Generation, ckpt_directories, numbers
from migrator.ckpt.manifest import MANIFEST_LIMIT, Manifest
from migrator.ckpt.names import COUNT_MAX, MANIFEST, ckpt_name, file_in, manifest_name, parse_ckpt_name
from migrator.errors import CkptCorrupt, CkptMismatch, StorageError, StorageForeignError, StorageNotFoundError
from migrator.storage.base import Storage

_FROM_THE_START = "from the start"


def ckpts(storage: Storage, lineage: tuple[int, ...] | frozenset[int]) -> list[str]:
    """The committed saves of a lineage by name, newest first."""
    of_lineage = frozenset(lineage)  # a lineage may be as long as the list of ckpts
    found = [place for place in ckpt_directories(storage) if place[0] in of_lineage]
    names = [ckpt_name(*place) for place in sorted(found, reverse=True)]
    # By listing: NFS may deny for a while that a single name exists.
    return [name for name in names if _is_committed(storage, name)]


def furthest_first(storage: Storage, generation: Generation) -> list[str]:
    """The ckpts that a life may load, in the order in which it tries them.

    What lies behind an unreadable record may belong to a lineage that was given up on purpose, so its steps
    say nothing. These ckpts come last, those of later lives first.
    """

    def worth(name: str) -> tuple[bool, int, int]:
        number, step = parse_ckpt_name(name) or (0, 0)
        return (True, step, number) if number in generation.proven else (False, number, step)

    return sorted(ckpts(storage, generation.lineage), key=worth, reverse=True)


def beside(storage: Storage, names: list[str]) -> list[str]:
    """Those of these ckpts that did not lead to the first one: another life went on from before them.

    Each manifest says which ckpt its life went on from. Generations decrease along that way, so a life whose number
    was skipped is not on it. Lives below the last one that is known may be on it, and are not returned.
    """
    origins: dict[int, str | None] = {}
    for name in names:
        number, _ = parse_ckpt_name(name) or (0, 0)
        if number not in origins:
            origins[number] = _origin(storage, name)
    left_at: dict[int, int] = {}
    """Of each life on the way: the step from which the next one went on."""
    lowest, earliest = names[0] if names else "", COUNT_MAX
    while (place := parse_ckpt_name(lowest)) is not None and place[0] < earliest:
        earliest, step = place
        left_at[earliest] = step
        lowest = origins.get(earliest) or ""
    from_the_start = lowest == _FROM_THE_START

    def is_beside(name: str) -> bool:
        number, step = parse_ckpt_name(name) or (0, 0)
        if number in left_at:
            return step > left_at[number]
        return from_the_start or number > earliest

    return [name for name in names if is_beside(name)]


def _origin(storage: Storage, name: str) -> str | None:
    """The ckpt that the life which saved this one went on from; None if it does not say."""
    try:
        written = whole(storage, name).written
    except (CkptCorrupt, CkptMismatch, StorageError):
        return None  # the reason is logged when it is loaded
    if "continues" not in written:
        return None
    return _FROM_THE_START if written["continues"] is None else str(written["continues"])


def uncommitted(storage: Storage, lineage: tuple[int, ...] | frozenset[int]) -> list[str]:
    """Directories of saves that are not committed: given up, or still being written."""
    of_lineage = frozenset(lineage)
    found = [place for place in ckpt_directories(storage) if place[0] in of_lineage]
    return [name for name in (ckpt_name(*place) for place in sorted(found)) if not _is_committed(storage, name)]


def _is_committed(storage: Storage, name: str) -> bool:
    try:
        return MANIFEST in storage.list(name)
    except StorageForeignError:
        return True  # a link is not followed; `whole` names it, and the ckpt before it is taken


def others(storage: Storage, lineage: tuple[int, ...]) -> list[str]:
    """The committed saves of all other lineages, newest first. They are logged and never deleted."""
    return ckpts(storage, frozenset(numbers(storage) - set(lineage)))


def whole(storage: Storage, name: str) -> Manifest:
    """The manifest of a ckpt; `CkptCorrupt` unless its parts are all there with the right sizes."""
    try:
        manifest = Manifest.from_bytes(storage.get(manifest_name(name), limit=MANIFEST_LIMIT))
        if manifest.ckpt != name:
            raise CkptCorrupt(f"its manifest is that of {manifest.ckpt}")
        check_parts(storage, manifest)
    except (CkptCorrupt, CkptMismatch) as error:
        raise type(error)(f"{name}: {error}") from error
    except StorageNotFoundError as error:
        raise CkptCorrupt(f"{name}: {error}") from error
    return manifest


def check_parts(storage: Storage, manifest: Manifest) -> None:
    """Raise `CkptCorrupt` unless the parts that a manifest names are all there with the right sizes."""
    for part in manifest.parts:
        size = storage.size(file_in(manifest.ckpt, part.name))
        if size != part.bytes:
            found = "is missing" if size is None else f"has {size} bytes"
            raise CkptCorrupt(f"{part.name} {found}; {part.bytes} bytes were committed")


def make_durable(storage: Storage, name: str) -> None:
    """Before a listed ckpt is relied on: its writer may have died before the ckpt was safe from a crash."""
    storage.make_durable(name)
    storage.make_durable()
