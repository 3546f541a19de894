"""What ``penstock demo`` reports: a table, a chart, facts for scripts, and what to do next."""

import importlib.util
from collections.abc import Sequence
from typing import Any

from penstock.base.dataclass import dataclass
from penstock.base.machine import held_bytes
from penstock.base.sizes import MiB, format_size

RELEASE, SHARDS = "HDF5, by voxel", "tar shards"

OURS, THEIRS, LIMIT = "#0072b2", "#b5651d", "#b3261e"  # distinguishable for people who do not see red or green

NEXT = """What to do next, with files of your own:
  penstock plan "data/*.h5" --batch-size 32 --memory 2GiB     estimate what training needs
  penstock bench "data/*.h5" --html report.html               measure this machine, and find the bottleneck
  python -c "import penstock; help(penstock.Loader)"          all options of the loader"""


@dataclass(frozen=True)
class Result:
    """One loader's result."""

    source: str
    loader: str
    samples_per_s: float
    peak_bytes: int
    pictures: list[int]
    """The picture of each sample of the first epoch, in order."""

    @property
    def is_ours(self) -> bool:
        return self.loader.startswith("penstock")


@dataclass(frozen=True)
class Promise:
    """Something that penstock promises, and whether it was kept."""

    kept: bool
    text: str


def table(results: list[Result], limit_bytes: int) -> str:
    """The results as text; memory beside the budget."""
    rows = [("", "", "samples/s", "peak memory", f"within {format_size(limit_bytes)}?")]
    for result in results:
        within = "yes" if result.peak_bytes <= limit_bytes else "no"
        memory = (format_size(result.peak_bytes), within) if held_bytes() else ("unknown", "unknown here")
        rows.append((result.source, result.loader, _rate(result), *memory))
    wide = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{s:<{wide[0]}}  {n:<{wide[1]}}  {rate:>9}  {peak:>11}  {within}" for s, n, rate, peak, within in rows]
    for source in (RELEASE, SHARDS):
        here = [result for result in results if result.source == source]
        others = [result.samples_per_s for result in here if not result.is_ours]
        if others:
            lines.append(f"{source}: penstock is {here[0].samples_per_s / max(others):,.1f} times as fast")
    return "\n".join(lines)


def _rate(result: Result) -> str:
    return f"{result.samples_per_s:,.0f}" if result.samples_per_s >= 20 else f"{result.samples_per_s:.1f}"


def draw(results: Sequence[Result], limit_bytes: int, path: str) -> str:
    """Draw rate and memory of each loader as a PNG; returns what to print about it."""
    if importlib.util.find_spec("matplotlib") is None:
        return 'no chart drawn: that needs matplotlib, pip install "penstock[plot]"'
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 0.55 * len(results) + 1.9), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("penstock demo: training from the same files, on this machine", fontweight="bold")
    rate, memory = figure.subplots(1, 2, sharey=True)
    labels = [f"{result.source}\n{result.loader}" for result in results]
    colours = [OURS if result.is_ours else THEIRS for result in results]
    rates = rate.barh(labels, [result.samples_per_s for result in results], color=colours)
    rate.bar_label(rates, [f" {_rate(result)}" for result in results])
    rate.set(xlabel="samples per second (longer is better)")
    held = memory.barh(labels, [result.peak_bytes / MiB for result in results], color=colours)
    memory.bar_label(held, [f" {format_size(result.peak_bytes)}" for result in results])
    memory.axvline(limit_bytes / MiB, color=LIMIT, linestyle="--")
    memory.set(xlabel=f"peak memory in MiB (dashed: the budget of {format_size(limit_bytes)})")
    for axes in (rate, memory):
        axes.margins(x=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    rate.invert_yaxis()
    figure.savefig(path, dpi=120)
    return f"drawn: {path}"


def as_json(
    results: Sequence[Result], promises: Sequence[Promise], limit_bytes: int, bottleneck: str
) -> dict[str, Any]:
    """The results for scripts."""
    facts = ("source", "loader", "samples_per_s", "peak_bytes")
    return {
        "budget_bytes": limit_bytes,
        "bottleneck": bottleneck,
        "runs": [{name: getattr(result, name) for name in facts} for result in results],
        "promises": [{"kept": promise.kept, "text": promise.text} for promise in promises],
    }
