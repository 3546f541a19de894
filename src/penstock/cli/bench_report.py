"""``report.html``: one page that works offline, with SVG charts and a style for light and dark screens.

The charts of reads and of the shuffle show a sample of them, collected here as well.
"""

import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from penstock.base.sizes import KiB, MiB, format_count, format_size
from penstock.loader.order import Order

# Points that a chart has room for.
MOST_READS = 2000
MOST_SAMPLES = 1500

WIDE, HIGH = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 96, 10, 14, 34
COLOURS = 4  # c0 to c3 in the style
UNITS = ((1024 * MiB, "GiB"), (MiB, "MiB"), (KiB, "KiB"), (1, "B"))

STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --paper: #ffffff; --faint: #8894a0; --line: #d8dee4;
        --c0: #0b6bcb; --c1: #c8501e; --c2: #2d8a4e; --c3: #8a4fbf; --limit: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6ebf0; --paper: #14191f; --faint: #8b98a5; --line: #313a44;
          --c0: #6cb2ff; --c1: #ff9a66; --c2: #6fd08c; --c3: #c79bf2; --limit: #ff8a80; } }
body { margin: 0 auto; max-width: 44rem; padding: 1rem; background: var(--paper); color: var(--ink);
       font: 16px/1.5 system-ui, sans-serif; }
svg { width: 100%; height: auto; } svg text { fill: var(--faint); font: 13px system-ui, sans-serif; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: right; padding: .3rem .5rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
@media (max-width: 34rem) { body { font-size: 15px; padding: .6rem; } th, td { padding: .25rem .3rem; }
  svg text { font-size: 20px; } .reads, .mixing { stroke-width: 4; } }
"""


class ReadMap:
    """Which bytes of which file were read when. Of too many reads it keeps every second, fourth and so on."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._reads: list[tuple[float, str, int, int]] = []
        self._every, self._passed = 1, 0
        self._noting = threading.Lock()

    def note(self, path: str, begins: Any, count: int) -> None:
        """Note reads of ``count`` bytes each; called by the reading threads."""
        now = time.perf_counter() - self._began
        with self._noting:
            first = -self._passed % self._every
            self._passed += len(begins)
            self._reads += [(now, path, int(begin), count) for begin in begins[first :: self._every]]
            while len(self._reads) > MOST_READS:
                del self._reads[1::2]
                self._every *= 2

    def as_json(self) -> dict[str, Any]:
        """The files, and for each read: seconds, file number, begin and end as fractions of the file's size."""
        ends: dict[str, int] = {}
        for _, path, begin, length in self._reads:
            ends[path] = max(ends.get(path, 0), begin + length)
        files = sorted(ends)
        sizes = {path: max(1, ends[path], os.path.getsize(path) if os.path.isfile(path) else 0) for path in files}
        numbers = {path: number for number, path in enumerate(files)}
        reads = [
            (seconds, numbers[path], begin / sizes[path], (begin + length) / sizes[path])
            for seconds, path, begin, length in self._reads
        ]
        return {"files": files, "reads": reads, "one_of": self._every}


def mixing(order: Order) -> dict[str, Any]:
    """Which row comes at which position of an epoch, for some positions; both as fractions of the epoch."""
    rows = len(order)
    positions = np.unique(np.linspace(0, rows - 1, min(rows, MOST_SAMPLES)).astype(np.int64))
    found = order.at(0, positions)
    return {"samples": list(zip((positions / rows).tolist(), (found / rows).tolist(), strict=True))}


def page(numbers: Mapping[str, Any]) -> str:
    """The numbers of a bench as an HTML page."""
    runs = numbers["runs"]
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/><meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>penstock bench</title><style>{STYLE}</style></head><body>
<h1>penstock bench</h1>
<p><strong>Bottleneck:</strong> {escape(numbers["bottleneck"])}.</p>
<div class="scroll">{_draw_table(runs)}</div>
<h2>Rate</h2>
{_draw_rates(runs)}
<h2>Memory over time</h2>
{_draw_memory(runs, numbers["budget_bytes"])}
<h2>Reads over time</h2>
{_draw_reads(numbers["reads"], runs[0]["seconds"])}
<h2>Shuffle</h2>
{_draw_mixing(numbers["mixing"])}
<h2>Time of the reading threads</h2>
{_draw_stages(numbers["stages"])}
<p>{format_size(numbers["planned_bytes"])} planned of a budget of {format_size(numbers["budget_bytes"])};
{format_size(numbers["bytes_read"])} read by {format_count(numbers["threads"], "thread")}. At most
{numbers["samples_per_s_if_never_waiting"]:,.0f} samples/s if training never waited for data, and
{numbers["samples_per_s_of_reading_alone"]:,.0f} if reading never waited for training.</p>
</body></html>
"""


def _draw_table(runs: Sequence[Mapping[str, Any]]) -> str:
    rows = "".join(
        f"<tr><td>{escape(run['name'])}</td><td>{run['samples_per_s']:,.0f}</td><td>{format_size(run['peak_bytes'])}</td>"
        f"<td>{run['waited'] / max(1e-9, run['seconds']):.0%}</td></tr>"
        for run in runs
    )
    return f"<table><tr><th>loader</th><th>samples/s</th><th>peak memory</th><th>waited</th></tr>{rows}</table>"


def _draw_rates(runs: Sequence[Mapping[str, Any]]) -> str:
    return _draw_bars([(run["name"], run["samples_per_s"], f"{run['samples_per_s']:,.0f} samples/s") for run in runs])


def _draw_stages(stages: Mapping[str, float]) -> str:
    return _draw_bars([(what, seconds, f"{seconds:.2f} s") for what, seconds in stages.items()])


def _draw_bars(rows: Sequence[tuple[str, float, str]]) -> str:
    """One bar per row, with its name and value above it."""
    most, step = max(value for _, value, _ in rows) or 1, 52
    drawn = "".join(
        f'<text x="0" y="{number * step + 18}">{escape(name)}: {escape(text)}</text>'
        f'<rect x="0" y="{number * step + 25}" width="{max(1, WIDE * value / most):.1f}" height="16" '
        f'fill="var(--c{number % COLOURS})"/>'
        for number, (name, value, text) in enumerate(rows)
    )
    return f'<svg viewBox="0 0 {WIDE} {len(rows) * step}" role="img">{drawn}</svg>'


def _draw_memory(runs: Sequence[Mapping[str, Any]], budget_bytes: int) -> str:
    peak = max(run["peak_bytes"] for run in runs)
    # A budget far above all curves would flatten them: then it is written below the chart instead.
    shown = budget_bytes <= 4 * peak
    top = 1.08 * max(peak, budget_bytes if shown else 0) or 1
    end = max(max(run["seconds"], run["memory"][-1][0]) for run in runs) or 1

    def place(seconds: float, bytes_: float) -> tuple[float, float]:
        return (
            LEFT + (WIDE - LEFT - RIGHT) * seconds / end,
            HIGH - BOTTOM - (HIGH - TOP - BOTTOM) * bytes_ / top,
        )

    parts = [_draw_axis(place, end, top)]
    if shown:
        _, y = place(0, budget_bytes)
        parts.append(
            f'<line class="budget" x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--limit)" '
            f'stroke-dasharray="6 4"/><text x="{LEFT + 6}" y="{y - 4:.1f}">budget {format_size(budget_bytes)}</text>'
        )
    for number, run in enumerate(runs):
        points = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in [(0, 0), *run["memory"]])
        colour = f"var(--c{number % COLOURS})"
        parts.append(f'<polyline class="memory" points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    legend = "".join(
        f'<span style="color:var(--c{number % COLOURS})">■</span> {escape(run["name"])} '
        for number, run in enumerate(runs)
    )
    note = "" if shown else f"<br/>The budget, {format_size(budget_bytes)}, is far above these curves."
    return f'<svg viewBox="0 0 {WIDE} {HIGH}" role="img">{"".join(parts)}</svg><p>{legend}{note}</p>'


def _draw_reads(read_map: Mapping[str, Any], seconds: float) -> str:
    """One band per file, its first byte at the top; one mark per read."""
    files, end = read_map["files"], max(seconds, 1e-9)
    if not files:
        return "<p>This process read no files itself.</p>"
    high = min(HIGH, max(80, 28 * len(files))) + TOP + BOTTOM
    band = (high - TOP - BOTTOM) / len(files)
    marks = "".join(
        f"M{LEFT + (WIDE - LEFT - RIGHT) * min(at, end) / end:.1f} {TOP + band * (number + 0.1 + 0.8 * begin):.1f}"
        f"v{max(2, 0.8 * band * (stop - begin)):.1f}"
        for at, number, begin, stop in read_map["reads"]
    )
    lines = "".join(
        f'<line x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{TOP + band * number:.1f}" y2="{TOP + band * number:.1f}" '
        f'stroke="var(--line)"/>'
        for number in range(len(files) + 1)
    )
    step = -(-len(files) * 24 // (high - TOP - BOTTOM))  # label as many files as there is room for
    names = "".join(
        f'<text x="{LEFT - 6}" y="{TOP + band * (number + 0.5) + 4:.1f}" text-anchor="end">file {number + 1}</text>'
        for number in range(0, len(files), step)
    )
    some = "every read" if read_map["one_of"] == 1 else f"one read of {read_map['one_of']:,}"
    first, last = (escape(os.path.basename(name.rstrip("/"))) for name in (files[0], files[-1]))
    which = f"file 1 is {first}" if len(files) == 1 else f"file 1 is {first}, file {len(files)} is {last}"
    return (
        f'<svg viewBox="0 0 {WIDE} {high:.0f}" role="img" aria-label="read map">{lines}{names}'
        f'<path class="reads" d="{marks}" stroke="var(--c0)" stroke-width="2" fill="none"/>'
        f"{_draw_times(high - BOTTOM, end)}</svg>"
        f"<p>Time runs from left to right. Each band is one file, from its first byte (top) to its last. One mark for "
        f"{some}; {which}.</p>"
    )


def _draw_mixing(mixed: Mapping[str, Any]) -> str:
    """Where each sample comes from: a cloud if well shuffled, a line if not shuffled at all."""
    side = HIGH - TOP - BOTTOM
    marks = "".join(
        f"M{LEFT + (WIDE - LEFT - RIGHT) * position:.1f} {TOP + side * row:.1f}h2" for position, row in mixed["samples"]
    )
    wide = WIDE - LEFT - RIGHT
    frame = f'<rect x="{LEFT}" y="{TOP}" width="{wide}" height="{side}" fill="none" stroke="var(--line)"/>'
    texts = (
        f'<text x="{LEFT - 6}" y="{TOP + 10}" text-anchor="end">first</text>'
        f'<text x="{LEFT - 6}" y="{TOP + side}" text-anchor="end">last row</text>'
        f'<text x="{LEFT}" y="{HIGH - BOTTOM + 22}">epoch begins</text>'
        f'<text x="{WIDE - RIGHT}" y="{HIGH - BOTTOM + 22}" text-anchor="end">epoch ends</text>'
    )
    quality = "" if mixed["quality"] is None else f"The quality is {mixed['quality']:.2f} (1.00 is a uniform shuffle). "
    return (
        f'<svg viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="shuffle">{frame}{texts}'
        f'<path class="mixing" d="{marks}" stroke="var(--c0)" stroke-width="2" fill="none"/></svg>'
        f"<p>{quality}One mark for each of {len(mixed['samples']):,} samples: when it comes, and which row it is. "
        f"A cloud is well shuffled; bands and lines are not.</p>"
    )


def _draw_times(y: float, end: float) -> str:
    """Seconds below a chart."""
    return "".join(
        f'<text x="{LEFT + (WIDE - LEFT - RIGHT) * at / end:.1f}" y="{y + 22:.1f}" text-anchor="middle">{at:g} s</text>'
        for at in ticks(end)
    )


def _draw_axis(place: Any, end: float, top: float) -> str:
    """Horizontal lines with their sizes, and seconds below."""
    lines = []
    unit, name = next((size, name) for size, name in UNITS if top >= size or size == 1)
    for at in ticks(top / unit):
        x, y = place(0, at * unit)
        lines.append(f'<line x1="{x}" x2="{WIDE - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{at:g} {name}</text>')
    return "".join(lines) + _draw_times(HIGH - BOTTOM, end)


def ticks(end: float) -> list[float]:
    """Two to six round numbers from 0 to ``end``."""
    power = 10.0 ** math.floor(math.log10(end))
    step = next(power * factor for factor in (0.2, 0.5, 1, 2) if end / (power * factor) <= 5.5)
    return [float(f"{number * step:.6g}") for number in range(math.floor(end / step + 1e-9) + 1)]
