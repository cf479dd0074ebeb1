"""One process that trains several times: `close()`, then other objects, and `listening()` again."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from migrator.api import Migrator
from migrator.errors import UsageError


def trained(migrator: Migrator, steps: int, **listening: Any) -> tuple[nn.Linear, int]:
    """A model that was trained for so many steps in a life of its own, and the step it began at."""
    model, state = nn.Linear(2, 2), {"step": 0}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name, value in {"model": model, "optimizer": optimizer, "state": state}.items():
        migrator.register(name, value)
    migrator.listening(**listening)
    if migrator.resume:
        migrator.load_ckpt()
    began_at = state["step"]
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state["step"] += 1
        migrator.safe_point()
    migrator.save_ckpt()
    return model, began_at


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_folds_follow_one_another(here: Path) -> None:
    """Each has a model, a job and ckpts of its own, and each goes on where it was."""
    for began_at in (0, 2):
        migrator = Migrator()
        for fold in range(3):
            assert trained(migrator, 2, job=f"fold-{fold}", resume="auto")[1] == began_at
            migrator.close()


def test_what_a_life_took_is_given_back(here: Path) -> None:
    """Threads, file descriptors, hooks, the SIGTERM handler, and the memory of what was registered."""
    migrator, before = Migrator(), signal.getsignal(signal.SIGTERM)
    trained(migrator, 1, job="first")
    migrator.close()
    threads, open_fds = threading.active_count(), descriptors()
    model, _ = trained(migrator, 1, job="second")
    assert signal.getsignal(signal.SIGTERM) != before
    kept, hooks = weakref.ref(model), model._forward_pre_hooks
    migrator.close()

    assert (threading.active_count(), descriptors()) == (threads, open_fds)
    assert signal.getsignal(signal.SIGTERM) == before
    assert not hooks
    assert not (here / "signal").exists()
    del model
    gc.collect()
    assert kept() is None


def test_no_hook_stays_where_safe_points_are_implied(here: Path) -> None:
    """One that all modules share waits for the forward pass behind a step."""
    migrator, model = Migrator(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    migrator.register("model", model)
    migrator.register("optimizer", optimizer)
    migrator.listening()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert nn.modules.module._global_forward_pre_hooks
    migrator.close()

    assert not nn.modules.module._global_forward_pre_hooks


def test_a_handler_that_was_put_over_ours_stays(here: Path) -> None:
    """And may go on calling ours, which does nothing any more but to call the one before it."""
    heard = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: heard.append("before"))
    try:
        migrator = Migrator()
        trained(migrator, 1)
        ours = signal.getsignal(signal.SIGTERM)
        assert callable(ours)

        def over(number: int, frame: Any) -> None:
            heard.append("over")
            ours(number, frame)

        signal.signal(signal.SIGTERM, over)
        migrator.close()
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, previous)

    assert heard == ["over", "before"]


def test_the_same_job_again_has_to_be_meant(here: Path) -> None:
    """The next fold would begin with the weights of the last one."""
    migrator = Migrator()
    trained(migrator, 2)
    migrator.close()
    with pytest.raises(UsageError, match=r"listening\(\) again for the job 'default'"):
        trained(migrator, 1)
    migrator.close()

    assert trained(migrator, 1, resume="auto")[1] == 2
    migrator.close()


def test_close_begins_anew_wherever_it_is_called(here: Path) -> None:
    """Before `listening()` it forgets what was registered; a second time it does nothing."""
    migrator = Migrator()
    migrator.register("state", {})
    migrator.close()
    migrator.close()
    trained(migrator, 1)
    migrator.close()
    assert not migrator.is_leaving
    with pytest.raises(UsageError, match=r"resume before listening\(\)"):
        _ = migrator.resume


def test_close_inside_a_loop_is_refused(here: Path) -> None:
    """The loop would go on without anybody saving it."""
    migrator = Migrator()
    trained(migrator, 1)
    for _ in migrator.batches([1, 2]):
        with pytest.raises(UsageError, match="leave the loop first"):
            migrator.close()
        break
    migrator.close()


def test_listening_in_a_side_thread_is_refused() -> None:
    """Python delivers signals to the main thread only."""
    migrator = Migrator()
    migrator.register("metrics", {})
    caught: list[BaseException] = []

    def listen() -> None:
        try:
            migrator.listening()
        except UsageError as error:
            caught.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()

    assert "in a side thread, where Python delivers no signals. Call it in the main thread." in str(caught[0])
