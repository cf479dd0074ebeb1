"""The ckpts that this life can go on from, and the loading of the newest one that is whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from migrator.ckpt import catalog, generations
from migrator.ckpt.names import parse_ckpt_name
from migrator.errors import CkptCorrupt, CkptMismatch, NoUsableCkpt, StorageError
from migrator.leaving.leaving import Outcome
from migrator.session import restore
from migrator.session.restore_plan import Loaded
from migrator.session.start import StartingPoint, legacy_file
from migrator.settings import Settings
from migrator.storage.base import Storage


class Candidates:
    """In: the names of ckpts, furthest first. Out: the one that was loaded."""

    def __init__(
        self, settings: Settings, storage: Storage, start: StartingPoint, load: Callable[[str], Loaded]
    ) -> None:
        """`load` restores the ckpt of this name, alone or with all ranks."""
        self._storage = storage
        self._generation = start.generation
        self._names = list(start.ckpts)
        self._load = load
        self._may_load = settings.resume != "never"
        self.legacy: Path | None = legacy_file(settings, self._names)
        """The predecessor's file, where there is no ckpt."""
        self.bad: frozenset[str] = frozenset()
        """Ckpts that turned out to be corrupt while they were loaded."""

    @property
    def can_load(self) -> bool:
        return self._may_load and (bool(self._names) or self.legacy is not None)

    @property
    def root(self) -> object:
        """Where the ckpts are."""
        return self._storage.root

    @property
    def newest(self) -> object:
        """What would be tried first. There is something to load."""
        return self.legacy or self._names[0]

    def load_newest(self) -> Loaded:
        """The newest ckpt that is whole, put into everything registered."""

        def note(name: str) -> None:
            self.bad |= {name}

        try:
            return restore.newest_usable(self._names, self._load, where=self._storage.root, on_bad=note)
        except NoUsableCkpt as error:
            later = max(generations.numbers(self._storage), default=0)
            if later <= self._generation.number:
                raise
            raise NoUsableCkpt(
                f"a later life of the job (generation {later}) has begun since this one (generation "
                f"{self._generation.number}) looked for ckpts, and has deleted them since. The later one goes on; "
                f"end this one. It found: {error}"
            ) from error

    def outcome(self) -> Outcome:
        """The answer to a notice that came before anything was loaded or trained: what is there is still there."""
        for name in self._names if self.can_load else ():
            if name not in self.bad and (outcome := self._outcome_of(name)) is not None:
                return outcome
        return Outcome(False, "nothing to save: nothing was trained yet")

    def _outcome_of(self, name: str) -> Outcome | None:
        """What this ckpt is worth as an answer; None: nothing, as far as can be seen without reading its parts."""
        step = (parse_ckpt_name(name) or (0, 0))[1]
        try:
            catalog.whole(self._storage, name)
            catalog.make_durable(self._storage, name)
        except CkptCorrupt:
            return None
        except CkptMismatch:
            pass  # made by a newer version of the package, which is to judge it
        except StorageError as error:
            return Outcome(False, f"nothing was trained yet, and {error}", name, step)
        return Outcome(True, "nothing was trained yet; this ckpt was about to be loaded", name, step)
