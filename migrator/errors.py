"""What can go wrong, by name.

Every error says what was found, what was expected and what to do, and one that
finds several things lists them all at once. Nothing else leaves this package:
a traceback from our depths is a bug.
"""

from __future__ import annotations

import errno as _errno

_PERMANENT = frozenset(
    {
        _errno.EACCES,
        _errno.EEXIST,
        _errno.EISDIR,
        _errno.ELOOP,
        _errno.ENAMETOOLONG,
        _errno.ENOENT,
        _errno.ENOTDIR,
        _errno.EPERM,
        _errno.EROFS,
    }
)


class MigratorError(Exception):
    """The parent of all errors of this package."""


class SettingsError(MigratorError):
    """A setting (argument or environment variable) has a value that is not allowed."""


class UsageError(MigratorError):
    """A call that comes too early, too late, or twice."""


class RegistrationError(MigratorError):
    """Something cannot be registered; the message names the path inside it and the way out."""


class RanksError(MigratorError):
    """The ranks of the job could not come together; the message says who was missing."""


class StorageError(MigratorError):
    """The place for the ckpts cannot be used, or an operation on it failed."""

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno

    @property
    def transient(self) -> bool:
        """Whether the same operation may succeed later without anybody changing the setup."""
        return self.errno is not None and self.errno not in _PERMANENT


class CkptCorrupt(MigratorError):  # noqa: N818 - the name says what was found
    """A ckpt whose bytes are not those that were committed."""


class CkptMismatch(MigratorError):  # noqa: N818
    """A whole ckpt that does not fit what is registered; lists every difference."""


class NoUsableCkpt(MigratorError):  # noqa: N818
    """There are ckpts, or one is required, and none can be loaded."""


class ResumeIgnored(MigratorError):  # noqa: N818
    """A ckpt is there, the script did not load it, and is about to train over it."""


class SaveFailed(MigratorError):  # noqa: N818
    """A save the script asked for and waits for could not be made durable."""


class Migrated(SystemExit):
    """Raised in the main thread once the pod's state is safe: the process leaves with `code`.

    A `SystemExit`, so that `finally` blocks run and `except Exception` does not hold it up.
    """

    def __init__(self, code: int = 143, *, ckpt: str | None = None, step: int | None = None) -> None:
        super().__init__(code)
        self.ckpt = ckpt
        self.step = step
