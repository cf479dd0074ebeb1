"""The errors that this package raises.

Each error says what was found, what was expected and what to do; if there are
several problems, one error lists all of them. The package raises no other errors:
any other traceback from inside it is a bug.
"""

from __future__ import annotations

from migrator.events import without_epoch


class MigratorError(Exception):
    """The parent of all errors of this package."""

    def __str__(self) -> str:
        # A traceback ends with this text, in the same log as our events.
        return without_epoch(super().__str__())


class SettingsError(MigratorError):
    """A setting (argument or environment variable) has a value that is not allowed."""


class UsageError(MigratorError):
    """A call that came too early, too late, or twice."""


class RegistrationError(MigratorError):
    """An object cannot be registered; the message contains the path inside it and what to do."""


class RanksError(MigratorError):
    """The ranks of the job could not work together; the message names the missing rank."""


class StorageError(MigratorError):
    """The place for the ckpts cannot be used, or an operation on it failed.

    The subclasses say what kind of failure it was. This class itself is raised for all others, like a name that is
    too long.
    """

    transient: bool = False
    """Whether the same operation may succeed later without anybody changing the setup."""

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno
        """The number that the operating system gave, if there was one. The class says what kind of failure it was."""


class StorageNotFoundError(StorageError):
    """There is no file of ours under this name."""


class StorageForeignError(StorageNotFoundError):
    """Something lies under this name that is none of our files: a link, a directory, a pipe, a file of another size."""


class StorageExistsError(StorageError):
    """The name was to be given only if it is free, and it is in use."""


class StorageFullError(StorageError):
    """There is no room: the volume is full, or a quota or a limit of file sizes is reached. Somebody may make room."""

    transient = True


class StorageAccessError(StorageError):
    """The job does not have the right to do this."""


class StorageCredentialsError(StorageAccessError):
    """The store does not take the job's credentials any more, or there are none. Somebody may renew them."""

    transient = True


class StorageReadOnlyError(StorageError):
    """The volume is mounted read-only."""


class StorageTransientError(StorageError):
    """The volume, its server or the network failed. The same operation may succeed later."""

    transient = True


class CkptCorrupt(MigratorError):  # noqa: N818 - the name says what was found
    """The bytes of a ckpt are not those that were committed."""


class CkptMismatch(MigratorError):  # noqa: N818
    """A complete ckpt does not fit the registered objects; the message lists all differences."""


class NoUsableCkpt(MigratorError):  # noqa: N818
    """No ckpt can be loaded, although there are some or one is required."""


class ResumeIgnored(MigratorError):  # noqa: N818
    """There is a ckpt, but the script has not loaded it and is about to train from the beginning."""


class SaveFailed(MigratorError):  # noqa: N818
    """A save that the script requested, and waits for, failed."""


class Migrated(SystemExit):
    """Raised in the main thread when the state is saved: the process ends with exit code `code`.

    A `SystemExit`, so that `finally` blocks run and `except Exception` does not catch it.
    """

    def __init__(self, code: int = 143, *, ckpt: str | None = None, step: int | None = None) -> None:
        super().__init__(code)
        self.ckpt = ckpt
        self.step = step


class NodeFault(SystemExit):
    """Raised by `check_nodes()` on all ranks if a node has to be replaced: the process ends with exit code `code`.

    138 on the ranks of that node, the exit code that requests a restart on the others. A `SystemExit`, so that
    `finally` blocks run and `except Exception` does not catch it.
    """

    def __init__(self, code: int, *, nodes: tuple[str, ...] = ()) -> None:
        super().__init__(code)
        self.nodes = nodes
        """The nodes to replace, by name."""
