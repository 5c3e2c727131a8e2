"""The curves of a run, drawn from its metrics.jsonl alone."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from t1jax.metrics import read_metrics

PANELS = (
    ("reward/mean", "mean reward"),
    ("resolved/all", "share of trials resolved"),
    ("agent/turns", "turns a trial"),
    ("critic/explained_variance", "explained variance of the critic"),
    ("after/kl", "KL of the update, nats a token"),
    ("after/entropy", "entropy of the policy, nats a token"),
    ("gap/total", "gap: |trainer - sampler|, nats a token"),
    ("gap/engine", "engine gap: its part before the update"),
)
LOGARITHMIC = {"after/kl", "gap/total", "gap/engine"}
LOWEST = {"critic/explained_variance": -1.0}  # a cold critic would hide the rest
COLUMNS = 4
WINDOW = 5  # steps of the running mean
INK, FAINT, GRID = "#1b4f8a", "#9db8d6", "#e3e3e3"


def plot_run(workdir: Path) -> list[Path]:
    """Draws `workdir`/plots/curves.png: one small panel a metric, a dot a step and the running mean.

    Metrics that the run does not have are left out; a run without any step gives no picture.
    """
    metrics = read_metrics(workdir)
    panels = [panel for panel in PANELS if any(panel[0] in line for line in metrics)]
    if not panels:
        return []
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(3.2 * columns, 2.4 * rows),
        squeeze=False,
        sharex=True,
        layout="constrained",
    )
    for axis, (name, title) in zip(axes.flat, panels, strict=False):
        _draw(axis, name, title, [(line["step"], line[name]) for line in metrics if name in line])
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    path = Path(workdir) / "plots" / "curves.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return [path]


def _draw(axis, name: str, title: str, points: list[tuple[int, float]]) -> None:
    steps, values = np.array(points, float).T
    if name in LOGARITHMIC:  # warm-up steps move no policy: an exact 0 has no place on this axis
        steps, values = steps[values > 0], values[values > 0]
        axis.set_yscale("log")
    axis.plot(steps, values, ".", color=FAINT, markersize=4)
    axis.plot(steps, running_mean(values, WINDOW), color=INK, linewidth=1.6)
    if name in LOWEST:
        axis.set_ylim(bottom=max(LOWEST[name], axis.get_ylim()[0]))
    axis.set_title(title, fontsize=9, loc="left")
    axis.set_xlabel("step", fontsize=8)
    axis.tick_params(which="both", labelsize=8)
    axis.grid(color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of each value and up to `window` - 1 before it."""
    total = np.cumsum(np.concatenate([[0.0], values]))
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - window, 0)
    return (total[end] - total[start]) / (end - start)
