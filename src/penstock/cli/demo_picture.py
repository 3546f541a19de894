"""The demo's results as a picture: rate and memory of each contender, side by side."""

import importlib.util
from collections.abc import Sequence

from penstock.cli.demo_training import Result
from penstock.sizes import MiB, format_size

OURS, THEIRS = "#1f6f8b", "#b8b8b8"


def draw(results: Sequence[Result], limit_bytes: int, path: str) -> str:
    """Write a PNG; returns what to say about it."""
    if importlib.util.find_spec("matplotlib") is None:
        return 'no picture drawn: that needs matplotlib, pip install "penstock[plot]"'
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 0.5 * len(results) + 1.6), layout="constrained")
    FigureCanvasAgg(figure)
    rate, memory = figure.subplots(1, 2, sharey=True)
    labels = [f"{result.source}\n{result.loader}" for result in results]
    colours = [OURS if result.is_ours else THEIRS for result in results]
    rates = rate.barh(labels, [result.samples_per_s for result in results], color=colours)
    rate.bar_label(rates, [f" {result.samples_per_s:,.0f}" for result in results])
    rate.set(xscale="log", xlabel="samples a second (logarithmic)")
    rate.margins(x=0.2)
    held = memory.barh(labels, [result.peak_bytes / MiB for result in results], color=colours)
    memory.bar_label(held, [f" {format_size(result.peak_bytes)}" for result in results])
    memory.axvline(limit_bytes / MiB, color="#c0392b", linestyle="--")
    memory.set(xlabel=f"peak memory in MiB (dashed: the budget of {format_size(limit_bytes)})")
    memory.margins(x=0.2)
    rate.invert_yaxis()
    figure.savefig(path, dpi=120)
    return f"drawn: {path}"
