"""How a long save or load tells how far it is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from migrator.save import progress
from migrator.save.progress import ForHook


@pytest.mark.parametrize(
    ("done", "total", "text"),
    [
        (1_200_000_000, 4_000_000_000, "1200 4000"),
        (0, 300_000, "0 1"),
        (300_000, 300_000, "1 1"),
        (5_999_999, 6_000_001, "5 6"),
        (12 * 10**12, 24 * 10**12, "12000000 24000000"),
        (0, 0, "0 1"),
    ],
)
def test_the_hook_is_told_in_mb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int, total: int, text: str
) -> None:
    """Whole numbers that a shell can divide, all of it only when it is all; and nothing before or after the save."""
    for name in ("QUIET_S", "HOOK_EVERY_S", "_COST"):
        monkeypatch.setattr(progress, name, 0.0)
    for_hook = ForHook(tmp_path / "signal")
    for_hook(done, total)
    assert list(tmp_path.iterdir()) == []

    for_hook.begin()
    for_hook(done, total)
    assert [(tmp_path / "signal.progress").read_text()] == [text + "\n"]
    assert len(list(tmp_path.iterdir())) == 1

    for_hook.remove()
    for_hook(done, total)
    assert list(tmp_path.iterdir()) == []


def test_telling_the_hook_takes_a_hundredth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the signal file lies on a slow volume, the save does not wait for it once a second."""
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setattr(progress, "HOOK_EVERY_S", 0.0)
    times_s: list[float] = []
    now_s = 100.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now_s))

    class Slow(ForHook):
        def _write(self, done: int, total: int) -> None:
            nonlocal now_s
            times_s.append(now_s)
            now_s += 0.005

    for_hook = Slow(tmp_path / "signal")
    for_hook.begin()
    while now_s < 101.2:
        for_hook(1, 2)
        now_s += 0.001

    assert len(times_s) == 3
    assert times_s[1] - times_s[0] > 0.5
