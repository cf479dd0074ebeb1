"""What lies in a bucket, looked at by somebody who takes no part in the job."""

from __future__ import annotations

from dataclasses import dataclass

from migrator.ckpt import catalog
from migrator.ckpt.names import GENERATIONS, MANIFEST, file_in, parse_ckpt_name, parse_record_name
from migrator.ckpt.tensor_file import read_part
from migrator.errors import CkptCorrupt
from migrator.storage.object_storage import ObjectStorage


@dataclass(frozen=True)
class Bucket:
    """One job's names."""

    storage: ObjectStorage

    def whole(self) -> list[str]:
        """The ckpts of which every byte is right, the furthest first."""
        return sorted(filter(self._is_whole, self.committed()), key=reach, reverse=True)

    def committed(self) -> list[str]:
        """The ckpts that have a manifest, the furthest first."""
        names = [name for name in self._directories() if MANIFEST in self.storage.list(name)]
        return sorted(names, key=reach, reverse=True)

    def lives(self) -> list[int]:
        """The generations that have a record."""
        names = self.storage.list(GENERATIONS)
        return sorted(number for name in names if (number := parse_record_name(name)) is not None)

    def orphans(self) -> list[str]:
        """Objects of ckpts that no manifest names, hidden objects, and uploads that are pending."""
        found = [*self.storage.leftovers(), *self.storage.leftovers(GENERATIONS)]
        for name in self._directories():
            there = self.storage.list(name)
            named = {MANIFEST} if MANIFEST in there else set()
            named |= {part.name for part in catalog.whole(self.storage, name).parts} if named else set()
            found += [*self.storage.leftovers(name), *(file_in(name, one) for one in there if one not in named)]
        return found

    def _directories(self) -> list[str]:
        return [name for name in self.storage.list() if parse_ckpt_name(name) is not None]

    def _is_whole(self, name: str) -> bool:
        try:
            for part in catalog.whole(self.storage, name).parts:
                read_part(self.storage, name, part)
        except CkptCorrupt:
            return False
        return True


def reach(name: str) -> tuple[int, int]:
    """How far a ckpt is: its step, then its generation."""
    generation, step = parse_ckpt_name(name) or (0, 0)
    return step, generation
