"""The commit: the manifest appears under its name, once only, and from then on the ckpt exists."""

from __future__ import annotations

from migrator.ckpt.catalog import check_parts, make_durable, whole
from migrator.ckpt.generations import numbers
from migrator.ckpt.manifest import MANIFEST_LIMIT, Manifest
from migrator.ckpt.names import MANIFEST, manifest_name
from migrator.errors import CkptCorrupt, StorageError, StorageExistsError, StorageNotFoundError
from migrator.events import log
from migrator.storage.base import Storage


def commit(storage: Storage, manifest: Manifest) -> Manifest | None:
    """Put the manifest. Returns the manifest that is there already, if another rank was faster."""
    data, place = manifest.to_bytes(), manifest_name(manifest.ckpt)

    def check() -> None:
        """A later life that thinks this one dead may have swept the parts, and another rank begun anew."""
        try:
            check_parts(storage, manifest)
        except CkptCorrupt as error:
            later = max(numbers(storage), default=0)
            why = "No later life of the job has begun; see who deletes on the volume."
            if later > manifest.generation:
                why = f"A later life of the job (generation {later}) has begun, and sweeps; end one of them."
            raise StorageNotFoundError(f"cannot commit {manifest.ckpt}: {error}. {why}") from error

    try:
        storage.put(place, data, exclusive=True, check=check)
    except StorageExistsError:
        found = found_committed(storage, manifest.ckpt)
        if found is None:
            # Where there are no links a rank that died may have claimed the name and not used it. If it is only
            # slow, its manifest and this one are as good: both name parts that are whole.
            storage.put(place, data, exclusive=False, check=check)
        elif storage.get(place, limit=MANIFEST_LIMIT) != data:
            return found
    except StorageError:
        # It may have appeared all the same: a lost reply, or a sync of its name that failed once.
        if not _is_there(storage, manifest.ckpt):
            raise
    return None


def _is_there(storage: Storage, name: str) -> bool:
    try:
        return found_committed(storage, name) is not None
    except CkptCorrupt:
        return False  # a later life sweeps; the error of the commit says more


def found_committed(storage: Storage, name: str) -> Manifest | None:
    """The ckpt of this name, if an attempt that failed at the last moment did make it, now durable."""
    if MANIFEST not in storage.list(name):
        return None
    found = whole(storage, name)
    make_durable(storage, name)
    log("joined", ckpt=name, step=found.step)
    return found
