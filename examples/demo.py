"""Shows the promise: train, be stopped in mid-epoch, resume, and compare bit by bit.

    make demo       # ckpts on volumes, which are directories
    make demo-s3    # ckpts in a bucket of an S3 server, which runs on this machine meanwhile

The pods are those of migrator.testing: real processes, ended as kubelet ends them. First one process
(examples/plain.py): once without a stop, and once stopped by the pod's preStop hook, then by SIGTERM alone.
Then several ranks (examples/ddp.py), each in its own pod, of which only one gets the notice: two ranks without a stop;
two ranks, stopped and resumed; and, from the same stop, resumed as three ranks, stopped again, and resumed as one.
Prints what was saved and lost, and draws both loss curves of the one process over each other.
"""

import argparse
import shutil
import sys
from pathlib import Path

from pods import Cluster, Life, begin, same_losses, same_weights, samples, steps

OUT = Path("demo-out").resolve()
SAMPLES = 1500


def train(cluster: Cluster, name: str, volume: Path, *, ranks: int, epochs: int) -> None:
    print(f"training {name} ...", flush=True)
    Life(cluster, name.replace(" ", "-"), volume, ranks=ranks, epochs=epochs).wait_for_end()


def stop(
    cluster: Cluster, name: str, volume: Path, *, at_step: int, ranks: int, epochs: int, pod: int = 0, hook: bool
) -> dict:
    print(f"training {name}, to be stopped in mid-epoch ...", flush=True)
    life = Life(cluster, name.replace(" ", "-"), volume, ranks=ranks, epochs=epochs)
    life.wait_for_step(at_step)
    row = life.delete(pod, hook=hook)
    if samples(volume)[-1].total() % SAMPLES == 0:
        sys.exit(f"the epoch was over before the pod was deleted: {row}")
    return row


def one_process(cluster: Cluster, rows: list[dict], checks: list[dict]) -> None:
    whole, stopped, how = OUT / "undisturbed", OUT / "stopped", {"ranks": 0, "epochs": 5}
    train(cluster, "one process without a stop", whole, **how)
    rows.append(stop(cluster, "one process", stopped, at_step=70, hook=True, **how))
    rows.append(stop(cluster, "one process again", stopped, at_step=170, hook=False, **how))
    train(cluster, "one process to the end", stopped, **how)
    checks.append(check("1, 1, 1", stopped, whole, epochs=5))


def several_ranks(cluster: Cluster, rows: list[dict], checks: list[dict]) -> None:
    whole, stopped, elsewhere = OUT / "undisturbed-ranks", OUT / "stopped-ranks", OUT / "stopped-ranks-2-3-1"
    train(cluster, "two ranks without a stop", whole, ranks=2, epochs=3)
    rows.append(stop(cluster, "two ranks", stopped, at_step=30, ranks=2, epochs=3, pod=1, hook=True))
    cluster.copy(stopped, elsewhere)
    train(cluster, "two ranks to the end", stopped, ranks=2, epochs=3)
    checks.append(check("2, 2", stopped, whole, epochs=3))
    rows.append(stop(cluster, "three ranks from there", elsewhere, at_step=50, ranks=3, epochs=3, hook=False))
    train(cluster, "one rank to the end", elsewhere, ranks=1, epochs=3)
    checks.append(check("2, 3, 1", elsewhere, None, epochs=3))


def check(ranks: str, stopped: Path, whole: Path | None, *, epochs: int) -> dict:
    """Compares with the run that was never stopped, if there is one on the same number of ranks."""
    found = samples(stopped)
    missed = SAMPLES * epochs - sum(len(epoch) for epoch in found)
    repeated = sum(epoch.total() - len(epoch) for epoch in found)
    return {
        "ranks, life by life": ranks,
        "samples missed or repeated": missed + repeated,
        "every loss as in the run that was never stopped": said(whole, whole and same_losses(whole, stopped)),
        "every weight": said(whole, whole and same_weights(whole, stopped)),
    }


def said(whole: Path | None, is_equal: object) -> str:
    return "-" if whole is None else "yes" if is_equal else "NO"


def show(rows: list[dict]) -> None:
    table = [list(rows[0]), *(list(map(str, row.values())) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print()
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def draw(stops: list[int]) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4))
    for name, style in (("undisturbed", {"lw": 4, "alpha": 0.35}), ("stopped", {"lw": 1, "color": "black"})):
        found = steps(OUT / name)[0]
        axes.plot([s["step"] for s in found], [s["loss"] for s in found], label=name, **style)
    for at in stops:
        axes.axvline(at, ls="--", lw=1, color="red", label="stopped and resumed" if at == stops[0] else None)
    axes.set(xlabel="step", ylabel="loss", yscale="log", title="One run was stopped twice in mid-epoch. Which one?")
    axes.legend()
    path = OUT / "loss.png"
    figure.savefig(path, dpi=120, bbox_inches="tight")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Train, be stopped in mid-epoch, resume, and compare bit by bit.")
    parser.add_argument("--s3", action="store_true", help="ckpts go to an S3 server (SeaweedFS), started for the demo")
    args = parser.parse_args()
    shutil.rmtree(OUT, ignore_errors=True)
    rows: list[dict] = []
    checks: list[dict] = []
    with begin(OUT, s3=args.s3) as cluster:  # at the end all pods that still run are stopped, also after an error
        one_process(cluster, rows, checks)
        several_ranks(cluster, rows, checks)
        ckpts = cluster.ckpts()
    show(rows)
    show(checks)
    print("\nckpts", *ckpts, sep="\n")
    print(f"\npicture of both loss curves  {draw([row['saved step'] for row in rows[:2]]).relative_to(Path.cwd())}")

    is_lost = any(row["steps lost"] or set(row["exit codes"].split()) != {"143"} for row in rows)
    if is_lost or any(row["samples missed or repeated"] or "NO" in row.values() for row in checks):
        sys.exit("the promise was not kept")


if __name__ == "__main__":
    main()
