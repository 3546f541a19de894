"""The picture of README and home page, as SVG: penstock and the fastest other loader, by rate and by memory."""

from collections.abc import Callable, Mapping, Sequence
from html import escape

from benchmarks.results import Results, rate_text
from penstock.base.sizes import MiB, format_size

WIDE, LEFT, RIGHT, GAP = 900, 204, 70, 24
TOP, BAR, GROUP, BOTTOM = 118, 15, 46, 40
PANEL = (WIDE - LEFT - 2 * RIGHT - GAP) / 2
OURS, OTHERS = "#0072b2", "#b5651d"  # told apart by people who see no red or no green, and in grey

STYLE = (
    "text{font:13px system-ui,-apple-system,'Segoe UI',sans-serif;fill:#1d2733}"
    ".heading{font-size:17px;font-weight:600}.title{font-weight:600}.tick,.note{fill:#5b6875;font-size:12px}"
    f".ours{{fill:{OURS}}}.others{{fill:{OTHERS}}}line{{stroke:#d8dee4}}"
)


def summary(shown: Sequence[Results], names: Mapping[str, str]) -> str:
    """Two panels of paired bars, from zero, on linear axes."""
    high = TOP + GROUP * len(shown) + BOTTOM
    pairs = [(each.ours(), each.best_other()) for each in shown]
    labels = [
        f'<text x="{LEFT - 10}" y="{TOP + GROUP * number + 22}" text-anchor="end">{escape(names[each.name])}</text>'
        for number, each in enumerate(shown)
    ]
    rates = [(ours.rate, other.rate) for ours, other in pairs]
    peaks = [(ours.numbers["peak_bytes"] / MiB, other.numbers["peak_bytes"] / MiB) for ours, other in pairs]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {high}" role="img">',
        "<title>Samples per second and peak memory of penstock and the fastest other loader</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDE}" height="{high}" rx="8" fill="#ffffff"/>',
        '<text x="20" y="30" class="heading">penstock and the fastest other loader, on the same files</text>',
        _legend(),
        *labels,
        _panel(rates, LEFT, high, "samples per second (longer is better)", rate_text),
        _panel(peaks, LEFT + PANEL + RIGHT + GAP, high, "peak memory in MiB (shorter is better)", _mib),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _mib(mebibytes: float) -> str:
    return format_size(mebibytes * MiB)


def _legend() -> str:
    return (
        '<rect x="20" y="44" width="14" height="14" class="ours"/><text x="40" y="56">penstock</text>'
        '<rect x="120" y="44" width="14" height="14" class="others"/><text x="140" y="56">fastest other loader</text>'
    )


def _panel(
    pairs: Sequence[tuple[float, float]], left: float, high: float, title: str, text: Callable[[float], str]
) -> str:
    top = max(max(pair) for pair in pairs)
    step = tick_step(top)
    parts = [f'<text x="{left:.1f}" y="{TOP - 22}" class="title">{escape(title)}</text>']
    tick = 0.0
    while tick <= top:
        x = left + PANEL * tick / top
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 10}" y2="{high - BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{high - BOTTOM + 20}" text-anchor="middle" class="tick">{tick:,.0f}</text>')
        tick += step
    for number, pair in enumerate(pairs):
        for which, value in enumerate(pair):
            y, wide = TOP + GROUP * number + which * (BAR + 2), PANEL * value / top
            kind = ("ours", "others")[which]
            parts.append(f'<rect x="{left:.1f}" y="{y}" width="{wide:.1f}" height="{BAR}" class="{kind}"/>')
            parts.append(f'<text x="{left + wide + 5:.1f}" y="{y + 12}">{escape(text(value))}</text>')
    return "\n".join(parts)


def tick_step(top: float) -> float:
    """A round step, such that an axis from 0 to ``top`` has three to six ticks."""
    power = 1.0
    while top / power >= 10:
        power *= 10
    return next(power * factor for factor in (0.5, 1, 2, 5) if top / (power * factor) < 5.5)
