"""How the package is used, as a type checker sees it: checked, never run.

`mypy --strict` reads this file in the tests. What must be accepted is written plainly;
what must be refused carries an ignore, and an ignore that is not needed is an error.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils.data import DataLoader, Dataset
from typing_extensions import assert_type

import migrator as package
from migrator import (
    CkptCorrupt,
    CkptMismatch,
    ElasticSampler,
    Migrated,
    Migrator,
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
    migrator,
)


def train(data: Dataset[tuple[torch.Tensor, torch.Tensor]], model: torch.nn.Module) -> None:
    sampler = ElasticSampler(1000, shuffle=True, seed=0, drop_last=False)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters())
    metrics: dict[str, float] = {"loss": 0.0}

    assert_type(migrator, Migrator)
    assert_type(migrator.register("model", model), None)
    migrator.register("optimizer", optimizer)
    migrator.register("metrics", metrics)
    migrator.register("ahead", {"batch": torch.rand(4)}, own=True)
    migrator.register("sampler", sampler)
    migrator.listening(
        ckpt="/pvc", job="mnist", signal="/s", grace_s=30, every=500, keep=2, exit_code=143, resume="auto"
    )
    migrator.listening(every="10m", grace_s=30.5)
    migrator.listening(keep_exit_code=True, ranks=1)
    verdict = migrator.check_nodes(timeout_s=60, arrive_s=600.0, repeat=10, exclude_stragglers=True)
    assert_type([finding.why for finding in (*verdict.faults, *verdict.stragglers)], list[str])
    loss = migrator.meter("loss")
    loss.add(1.0)
    loss.add(torch.ones(()), 32)
    assert_type(loss.take(), float)
    assert_type(loss.mean + loss.sum + loss.count, float)
    assert_type(migrator.resume, bool)
    assert_type(migrator.is_leaving, bool)
    if migrator.resume:
        assert_type(migrator.load_ckpt(), "str | None")
        migrator.load_ckpt("cpu")
        migrator.load_ckpt(map_location=torch.device("cpu"))

    for number in migrator.epochs(10, name="warm-up", start=2):
        assert_type(number, int)
    for epoch in migrator.epochs(10):
        sampler.set_epoch(epoch)
        for _x, _y in migrator.batches(loader):
            pass
    samples: int = len(migrator.batches(loader).dataset)
    migrator.batches(loader).sampler.set_epoch(samples)

    migrator.progress(epoch=1, batch=20, batches=len(loader), latency_s=0.2, loss=torch.ones(()), accuracy=50)
    assert_type(
        migrator.progress(
            epoch=torch.tensor(1), batch=20, batches=30, latency_s=0.2, loss=1.0, accuracy=torch.tensor(50.0)
        ),
        None,
    )
    assert_type(migrator.safe_point(), None)
    assert_type(migrator.close(), None)
    assert_type(migrator.watch(), None)
    assert_type(migrator.restore_random(), bool)
    assert_type(migrator.save_ckpt(), "str | None")
    assert_type(migrator.save_ckpt(wait=False), "str | None")
    assert_type(sampler.state_dict(), dict[str, int])
    assert_type(sampler.cursor, int)


def batches_keep_their_type(loader: list[tuple[int, str]]) -> None:
    wrapped = migrator.batches(loader)
    assert_type(len(wrapped), int)
    for batch in wrapped:
        assert_type(batch, tuple[int, str])


def errors_carry_what_is_promised() -> None:
    every: Iterable[type[MigratorError]] = (
        CkptCorrupt,
        CkptMismatch,
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
    for kind in every:
        assert_type(kind("text"), MigratorError)
    try:
        migrator.save_ckpt()
    except StorageError as error:
        assert_type(error.errno, "int | None")
        assert_type(error.transient, bool)
    except Migrated as leaving:
        assert_type(leaving.ckpt, "str | None")
        assert_type(leaving.step, "int | None")
    except NodeFault as fault:
        assert_type(fault.nodes, tuple[str, ...])


def misuse_is_refused(loader: list[int]) -> None:
    migrator.register(model=1)  # type: ignore[call-arg]
    migrator.listening("/pvc")  # type: ignore[call-arg]
    migrator.listening(keep="two")  # type: ignore[arg-type]
    migrator.listening(grace=30)  # type: ignore[call-arg]
    migrator.save_ckpt(wait="no")  # type: ignore[arg-type]
    migrator.batches(iter(loader))  # type: ignore[arg-type]
    migrator.resume = True  # type: ignore[misc]
    migrator.progress(1, 2, 3, 0.2, 1.0, 50.0)  # type: ignore[call-arg]
    migrator.progress(epoch="1", batch=2, batches=3, latency_s=0.2, loss=1.0, accuracy=50)  # type: ignore[arg-type]
    migrator.no_such_thing()  # type: ignore[attr-defined]
    ElasticSampler(1000, True)  # type: ignore[call-arg]
    text: str = migrator.load_ckpt()  # type: ignore[assignment]
    print(text, package.__version__)
