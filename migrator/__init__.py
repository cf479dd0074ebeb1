"""Saves a PyTorch training job when its pod is taken away, and lets it go on as if nothing had happened.

`from migrator import migrator` gives the one instance; `import migrator;
migrator.register(...)` reaches the same one. Importing starts no thread, opens no
file and reads no environment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from migrator.api import Migrator
    from migrator.data.sampler import ElasticSampler
    from migrator.errors import (
        CkptCorrupt,
        CkptMismatch,
        Migrated,
        MigratorError,
        NodeFault,
        NoUsableCkpt,
        RanksError,
        RegistrationError,
        ResumeIgnored,
        SaveFailed,
        SettingsError,
        StorageAccessError,
        StorageCredentialsError,
        StorageError,
        StorageExistsError,
        StorageForeignError,
        StorageFullError,
        StorageNotFoundError,
        StorageReadOnlyError,
        StorageTransientError,
        UsageError,
    )

    migrator: Migrator

__version__ = "0.1.0"

__all__ = [
    "CkptCorrupt",
    "CkptMismatch",
    "ElasticSampler",
    "Migrated",
    "Migrator",
    "MigratorError",
    "NoUsableCkpt",
    "NodeFault",
    "RanksError",
    "RegistrationError",
    "ResumeIgnored",
    "SaveFailed",
    "SettingsError",
    "StorageAccessError",
    "StorageCredentialsError",
    "StorageError",
    "StorageExistsError",
    "StorageForeignError",
    "StorageFullError",
    "StorageNotFoundError",
    "StorageReadOnlyError",
    "StorageTransientError",
    "UsageError",
    "migrator",
]

_INSTANCE_NAMES = {
    "batches",
    "check_nodes",
    "close",
    "epochs",
    "is_leaving",
    "listening",
    "load_ckpt",
    "meter",
    "progress",
    "register",
    "restore_random",
    "resume",
    "safe_point",
    "save_ckpt",
    "watch",
}


def __getattr__(name: str) -> Any:
    # On first use, so that `python -m migrator.hooks` and a bare import need no torch.
    if name == "migrator":
        from migrator.api import Migrator

        globals()["migrator"] = instance = Migrator()
        return instance
    if name == "watch" and "migrator" not in globals():
        # For the top of a script: torch may take long to import.
        from migrator.notice.inbox import watch

        return watch
    if name in _INSTANCE_NAMES:
        return getattr(__getattr__("migrator") if "migrator" not in globals() else globals()["migrator"], name)
    if name in __all__:
        from migrator import errors

        if hasattr(errors, name):
            return getattr(errors, name)
        if name == "ElasticSampler":
            from migrator.data.sampler import ElasticSampler

            return ElasticSampler
        if name == "Migrator":
            from migrator.api import Migrator

            return Migrator
    raise AttributeError(f"module 'migrator' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_INSTANCE_NAMES])
