"""``report.html``: one page that needs nothing else. Pictures are SVG in it; its style follows the reader's device."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from penstock.sizes import format_size

WIDE, HIGH = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 70, 10, 14, 30
COLOURS = 4
"""Named c0 … in the style."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --paper: #ffffff; --faint: #8894a0; --line: #d8dee4;
        --c0: #0b6bcb; --c1: #c8501e; --c2: #2d8a4e; --c3: #8a4fbf; --limit: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6ebf0; --paper: #14191f; --faint: #8b98a5; --line: #313a44;
          --c0: #6cb2ff; --c1: #ff9a66; --c2: #6fd08c; --c3: #c79bf2; --limit: #ff8a80; } }
body { margin: 0 auto; max-width: 44rem; padding: 1rem; background: var(--paper); color: var(--ink);
       font: 16px/1.5 system-ui, sans-serif; }
svg { width: 100%; height: auto; } svg text { fill: var(--faint); font: 12px system-ui, sans-serif; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: right; padding: .3rem .5rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
@media (max-width: 30rem) { body { font-size: 15px; padding: .6rem; } th, td { padding: .25rem .3rem; } }
"""


def page(told: Mapping[str, Any]) -> str:
    """The numbers of a bench as a page."""
    runs = told["runs"]
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/><meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>penstock bench</title><style>{STYLE}</style></head><body>
<h1>penstock bench</h1>
<p><strong>What holds it up:</strong> {escape(told["bottleneck"])}.</p>
<div class="scroll">{_table(runs)}</div>
<h2>Rate</h2>
{_bars(runs)}
<h2>Memory over time</h2>
{_memory(runs, told["budget_bytes"])}
<h2>Where the reading threads' time went</h2>
{_stages(told["stages"])}
<p>{format_size(told["planned_bytes"])} planned of a budget of {format_size(told["budget_bytes"])};
{format_size(told["bytes_read"])} read by {told["threads"]} threads. If the step never waited:
{told["samples_per_s_if_never_waiting"]:,.0f} samples/s; if reading never did:
{told["samples_per_s_of_reading_alone"]:,.0f}.</p>
</body></html>
"""


def _table(runs: Sequence[Mapping[str, Any]]) -> str:
    rows = "".join(
        f"<tr><td>{escape(run['name'])}</td><td>{run['samples_per_s']:,.0f}</td><td>{format_size(run['peak_bytes'])}</td>"
        f"<td>{run['waited'] / max(1e-9, run['seconds']):.0%}</td></tr>"
        for run in runs
    )
    return f"<table><tr><th>loader</th><th>samples/s</th><th>peak memory</th><th>waited</th></tr>{rows}</table>"


def _bars(runs: Sequence[Mapping[str, Any]]) -> str:
    return _horizontal([(run["name"], run["samples_per_s"], f"{run['samples_per_s']:,.0f} samples/s") for run in runs])


def _stages(stages: Mapping[str, float]) -> str:
    return _horizontal([(what, seconds, f"{seconds:.2f} s") for what, seconds in stages.items()])


def _horizontal(rows: Sequence[tuple[str, float, str]]) -> str:
    """A bar a row, what it is and how much above it."""
    most, step = max(value for _, value, _ in rows) or 1, 44
    drawn = "".join(
        f'<text x="0" y="{number * step + 14}">{escape(name)}: {escape(told)}</text>'
        f'<rect x="0" y="{number * step + 19}" width="{max(1, WIDE * value / most):.1f}" height="16" '
        f'fill="var(--c{number % COLOURS})"/>'
        for number, (name, value, told) in enumerate(rows)
    )
    return f'<svg viewBox="0 0 {WIDE} {len(rows) * step}" role="img">{drawn}</svg>'


def _memory(runs: Sequence[Mapping[str, Any]], budget_bytes: int) -> str:
    peak = max(run["peak_bytes"] for run in runs)
    # A budget far above what anybody held would flatten the curves: then it is told, not drawn.
    shown = budget_bytes <= 4 * peak
    top = 1.08 * max(peak, budget_bytes if shown else 0) or 1
    end = max(run["seconds"] for run in runs) or 1

    def place(seconds: float, bytes_: float) -> tuple[float, float]:
        return (
            LEFT + (WIDE - LEFT - RIGHT) * seconds / end,
            HIGH - BOTTOM - (HIGH - TOP - BOTTOM) * bytes_ / top,
        )

    parts = [_axis(place, end, top)]
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
    note = "" if shown else f" The budget, {format_size(budget_bytes)}, is far above."
    return f'<svg viewBox="0 0 {WIDE} {HIGH}" role="img">{"".join(parts)}</svg><p>{legend}{note}</p>'


def _axis(place: Any, end: float, top: float) -> str:
    lines = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        x, y = place(0, share * top)
        lines.append(f'<line x1="{x}" x2="{WIDE - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{format_size(share * top)}</text>')
        x, y = place(share * end, 0)
        lines.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{share * end:.1f} s</text>')
    return "".join(lines)
