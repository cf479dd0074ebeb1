"""Which storage a root means: a directory, or a URL of an object store.

Clients of object stores are imported here, and only if the URL needs them: they take a second.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from migrator.storage.base import Storage
from migrator.storage.posix import PosixStorage


def storage_at(root: Path | str, job: str, *, grace_s: float) -> Storage:
    """The names of a job below this root. `obstore` is used for S3 if it is installed, else s3fs."""
    if isinstance(root, Path):
        return PosixStorage(root, job)
    protocol, _, place = root.partition("://")
    from migrator.storage.object_storage import ObjectStorage

    if protocol != "s3":
        from migrator.storage.fsspec_client import FsspecClient

        return ObjectStorage(FsspecClient(protocol, place, aside=f"{job}/", grace_s=grace_s), "", job)
    bucket, _, prefix = place.partition("/")
    if importlib.util.find_spec("obstore") is not None:
        from migrator.storage.obstore_client import ObstoreClient

        return ObjectStorage(ObstoreClient(bucket, grace_s=grace_s), prefix, job)
    from migrator.storage.s3_client import S3Client

    return ObjectStorage(S3Client(bucket, grace_s=grace_s), prefix, job)
