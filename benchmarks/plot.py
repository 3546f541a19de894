"""python -m benchmarks.plot: draws docs/images/volumes.svg from benchmarks/results, without any plotting library."""

import json
from html import escape
from pathlib import Path

from penstock.base.sizes import format_size

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "docs" / "images" / "volumes.svg"
WIDTH, BAR, GAP, LABEL, PANEL = 860, 18, 7, 210, 250
OURS, OTHERS = "#0b7285", "#adb5bd"


def panel(results: list[dict], left: int, top: int, title: str, value: str) -> list[str]:
    """Horizontal bars of one quantity."""
    shown = {"rate": lambda x: f"{x:,.0f}", "peak_bytes": format_size}[value]
    most = max(result[value] for result in results)
    parts = [f'<text x="{left}" y="{top - 8}" class="title">{escape(title)}</text>']
    for number, result in enumerate(results):
        y = top + number * (BAR + GAP)
        size = (PANEL - 70) * result[value] / most
        colour = OURS if result["label"].startswith("penstock") else OTHERS
        parts.append(f'<rect x="{left}" y="{y}" width="{size:.1f}" height="{BAR}" fill="{colour}"/>')
        parts.append(f'<text x="{left + size + 5:.1f}" y="{y + 13}">{shown(result[value])}</text>')
    return parts


def chart(results: list[dict], top: int, heading: str) -> list[str]:
    parts = [f'<text x="10" y="{top - 30}" class="heading">{escape(heading)}</text>']
    for number, result in enumerate(results):
        y = top + number * (BAR + GAP) + 13
        parts.append(f'<text x="{LABEL - 8}" y="{y}" text-anchor="end">{escape(result["label"])}</text>')
    parts += panel(results, LABEL, top, "samples a second", "rate")
    return parts + panel(results, LABEL + PANEL + 60, top, "memory held at the peak", "peak_bytes")


def main() -> None:
    parts, top = [], 60
    for name, heading in (("volumes-contiguous", "HDF5, contiguous"), ("volumes-gzip", "HDF5, gzip-4 + shuffle")):
        results = json.loads((HERE / "results" / f"{name}.json").read_text())["results"]
        for result in results:
            result["rate"] = sorted(result["rates"])[len(result["rates"]) // 2]
        parts += chart(results, top, heading)
        top += len(results) * (BAR + GAP) + 70
    style = "text{font:12px sans-serif;fill:#343a40}.title{font-style:italic}.heading{font-size:15px;font-weight:bold}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top - 50}"><style>{style}</style>'
    background = '<rect width="100%" height="100%" fill="white"/>'
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text("\n".join([head, background, *parts, "</svg>"]) + "\n")


if __name__ == "__main__":
    main()
