"""Tables in the shape of the papers' own, beside their figures, and a picture."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import data
import numpy as np
import published
import ways
from claims import Runs, spread
from training import Run

PICTURED = (ways.PADDING, ways.GROUPED, ways.FLATTENED, ways.CONTAMINATED, ways.WRAPPED, ways.FLAT, ways.DEFAULT)


def show_tables(runs: Runs) -> None:
    _show_table_2(runs)
    _show_table_4(runs)
    _show_table_3(runs)
    _show_losses(runs)


def mean(runs: Sequence[Run], measure: Callable[[Run], float]) -> float:
    return sum(map(measure, runs)) / len(runs)


def loss(runs: Sequence[Run], measure: Callable[[Run], float] = lambda run: run.end.loss) -> str:
    """Mean, and half of the way from the least to the most."""
    values = [measure(run) for run in runs]
    return f"{sum(values) / len(values):.3f} ± {(max(values) - min(values)) / 2:.3f}"


def _show_table_2(runs: Runs) -> None:
    """Paper 1, Table 2: rows, tokens/s, memory, loss after one epoch."""
    print("One epoch, as in paper 1, Table 2; on the right its own figures (FLAN_20k, Mistral-7B):\n")
    base, lines = runs.best(ways.PADDING).speed, []
    theirs_base = published.TABLE_2[ways.PADDING].tokens_per_second
    for way in ways.WAYS:
        these, theirs = runs.of(way), published.TABLE_2.get(way)
        speed = runs.best(way).speed
        lines.append(
            [
                way,
                round(mean(these, lambda run: run.end.rows)),
                round(mean(these, lambda run: run.end.steps)),
                f"{100 * mean(these, lambda run: run.padding):.1f}",
                f"{speed:,.0f}",
                f"{speed / base:.2f}",
                round(mean(these, lambda run: run.megabytes)),
                loss(these),
                *(
                    ["-"] * 5
                    if theirs is None
                    else [
                        f"{theirs.rows:,}",
                        f"{theirs.tokens_per_second:,}",
                        f"{theirs.tokens_per_second / theirs_base:.2f}",
                        f"{theirs.peak_mb:,}",
                        f"{theirs.loss:.3f}",
                    ]
                ),
            ]
        )
    data.show(
        ["batching", "rows/epoch", "steps", "padding %", "tokens/s", "x padding", "MB", "val loss",
         "paper: rows", "tokens/s", "x padding", "MB", "val loss"],
        lines,
    )  # fmt: skip


def _show_table_4(runs: Runs) -> None:
    """Paper 1, Table 4: boundaries at equal steps."""
    print("Boundaries at equal steps, as in paper 1, Table 4; on the right its own figures (FLAN_20k, Mistral-7B):\n")
    lines = []
    for way, theirs in published.TABLE_4.items():
        cells = []
        for size in runs.sizes:
            these = runs.found.get((way, size))
            cells.append(f"{mean(these, lambda run: run.end.steps):.0f} steps, {loss(these)}" if these else "-")
        cells += [f"{one[0]} steps, {one[1]:.3f}" if one else "-" for one in theirs]
        lines.append([way, *cells])
    own = [f"{size} rows a step" for size in runs.sizes]
    data.show(["batching", *own, "paper: (2, 4096, 32)", "(2, 4096, 4)"], lines)


def _show_table_3(runs: Runs) -> None:
    """Paper 2, Table 3: steps and speed-up."""
    print("Steps and speed-up of an epoch, as in paper 2, Table 3 (padding / random / greedy, without isolation):\n")
    three = [runs.of(way) for way in (ways.PADDING, ways.RANDOM, ways.GREEDY)]
    steps = [mean(these, lambda run: run.end.steps) for these in three]
    seconds = [runs.best(way).end.seconds for way in (ways.PADDING, ways.RANDOM, ways.GREEDY)]
    measured = {"here": (steps, seconds)}
    lines = []
    for name, (steps, seconds) in {**measured, **published.TABLE_3}.items():
        lines.append(
            [
                name if name == "here" else f"paper 2: {name}",
                " / ".join(f"{one:,.0f}" for one in steps),
                " / ".join(f"{steps[0] / one:.2f}" for one in steps),
                " / ".join(f"{seconds[0] / one:.2f}" for one in seconds),
            ]
        )
    data.show(["data, model", "steps", "fewer steps", "speed-up"], lines)


def _show_losses(runs: Runs) -> None:
    """Every way where all have had the same."""
    cells = min(run.end.tokens for one in runs.found.values() for run in one)
    second = min(runs.best(way).end.seconds for way in ways.WAYS)
    print(
        f"Validation loss at equal epochs (1: equal tokens without padding), equal steps ({runs.equal_steps}), equal "
        f"tokens with padding ({cells:,} cells), equal CPU time ({second:.1f} s):\n"
    )
    lines = []
    for way, described in ways.WAYS.items():
        these = runs.of(way)
        lines.append(
            [
                way,
                "yes" if described.isolated else "NO",
                loss(these),
                loss(these, lambda run: run.loss_from("steps", runs.equal_steps)),
                loss(these, lambda run: run.loss_from("cells", cells)),
                loss(these, partial(runs.loss_at_second, second=second)),
                spread([run.end.seconds for run in these], digits=1),
                described.public or "only here",
            ]
        )
    data.show(
        ["batching", "isolated", "equal epochs", "equal steps", "equal cells", "equal time", "CPU s", "in streampack"],
        lines,
    )


# ---- picture ------------------------------------------------------------------------------------------------------


def load_matplotlib() -> Any:
    """Only for the picture.

    Raises:
        SystemExit: if it is not there.
    """
    try:
        import matplotlib
    except ImportError as missing:
        raise SystemExit(f"--picture needs matplotlib ({missing}): pip install matplotlib, or leave it out") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(runs: Runs, path: str) -> None:
    """Loss against tokens and against CPU time: means of all seeds, the time of the run that took least."""
    pyplot = load_matplotlib()
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for way in PICTURED:
        tokens, seconds, losses = curve(runs, way)
        style = "-" if ways.WAYS[way].isolated else "--"
        for axis, values in zip(axes, (tokens, seconds), strict=True):
            axis.plot(values, losses, style, label=way, linewidth=1.4, marker=".", markersize=5)
    axes[0].set(xlabel="tokens (without padding)", ylabel="validation loss, each example alone")
    axes[1].set(xlabel="seconds of CPU time")
    axes[0].legend(fontsize=8)
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.suptitle(f"One epoch, the same learning rate; means of {len(runs.of(ways.PADDING))} seeds", fontsize=10)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def curve(runs: Runs, way: str) -> tuple[list[int], list[float], list[float]]:
    """(tokens, seconds, mean loss of all seeds) where the best run was evaluated."""
    points = runs.best(way).points
    tokens = [point.tokens for point in points]
    losses = [
        np.interp(tokens, [point.tokens for point in run.points], [point.loss for point in run.points])
        for run in runs.of(way)
    ]
    return tokens, [point.seconds for point in points], np.mean(losses, axis=0).tolist()
