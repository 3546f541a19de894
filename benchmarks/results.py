"""Results files: one JSON file per benchmark under ``benchmarks/results``, and the only source of published numbers.

    {"command": "python -m benchmarks records", "date": "2026-11-18", "machine": "…", "results": [row, …]}

A row has a ``label`` and numbers. ``rates`` is a list of samples per second, one per run; the median counts. The end of
any other key says how its number is written: ``_bytes``, ``_s`` (seconds), ``_per_s``, ``_ratio``; otherwise as it is.
A file may also have a ``title``, and an ``about`` that says what was measured; for benchmarks of this folder
both are in ``benchmarks/catalog.py``. ``make figures`` makes pages and pictures of all files.
"""

import datetime
import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.base.machine import cores
from penstock.base.sizes import format_size

FOLDER = Path(__file__).resolve().parent / "results"

# Labels that begin with these are no loaders: they show what the machine can do.
REFERENCES = ("bare", "numpy", "nothing")


@dataclass(frozen=True)
class Row:
    """One line of a results file."""

    label: str
    numbers: Mapping[str, Any]

    @property
    def rate(self) -> float:
        """Samples per second, the median of all runs."""
        return statistics.median(self.numbers["rates"])

    @property
    def is_ours(self) -> bool:
        return self.label.startswith("penstock")

    @property
    def is_loader(self) -> bool:
        return not self.label.startswith(REFERENCES)


@dataclass(frozen=True)
class Results:
    """One results file."""

    name: str
    command: str
    date: str
    machine: str
    rows: Sequence[Row]
    title: str = ""
    about: str = ""

    def ours(self) -> Row:
        """penstock's own row: the first one."""
        return next(row for row in self.rows if row.is_ours)

    def best_other(self) -> Row:
        """The fastest of the other loaders."""
        return max((row for row in self.rows if row.is_loader and not row.is_ours), key=lambda row: row.rate)


def write(name: str, command: str, rows: Sequence[Mapping[str, Any]], **more: str) -> None:
    """Replace the results of one benchmark by those of this run."""
    FOLDER.mkdir(exist_ok=True)
    today = datetime.date.today().isoformat()
    content = {"command": command, "date": today, "machine": machine()} | more | {"results": list(rows)}
    (FOLDER / f"{name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def read(name: str) -> Results:
    """The stored results of one benchmark."""
    found = json.loads((FOLDER / f"{name}.json").read_text())
    rows = found.pop("results", None) or found.pop("rows")
    known = {key: found.get(key, "") for key in ("command", "date", "machine", "title", "about")}
    return Results(
        name, rows=[Row(row["label"], {k: v for k, v in row.items() if k != "label"}) for row in rows], **known
    )


def names() -> list[str]:
    """All benchmarks that have results."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def machine() -> str:
    """This machine, in a few words."""
    model = ""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        pass
    kind = f"{model} ({platform.machine()})" if model else platform.machine()
    return f"{kind}, {cores()} cores, {platform.system()}, Python {platform.python_version()}"


def table(results: Results) -> str:
    """The rows as Markdown; where rows have rates, with each rate as a multiple of the best other loader's."""
    others = [row.rate for row in results.rows if "rates" in row.numbers and row.is_loader and not row.is_ours]
    best = max(others, default=0.0)
    lines = [_cells(row, best) for row in results.rows]
    headings = list(dict.fromkeys(heading for line in lines for heading in line))
    return "\n".join(
        [
            f"| {' | '.join(['', *headings[1:]])} |",
            f"|---|{'---:|' * (len(headings) - 1)}",
            *(f"| {' | '.join(line.get(heading, '') for heading in headings)} |" for line in lines),
        ]
    )


def _cells(row: Row, best: float) -> dict[str, str]:
    cells = {"label": row.label.replace("[", r"\[")}  # ds[i] is no link
    for key, value in row.numbers.items():
        if key == "rates":
            cells["samples/s"] = rate_text(row.rate)
            if best:
                cells["× best other"] = ratio_text(row.rate / best).removesuffix(" ×")
        else:
            heading, text = _written(key, value)
            cells[heading] = text
    if len(row.numbers.get("rates", ())) > 1:
        cells["all runs"] = ", ".join(map(rate_text, row.numbers["rates"]))
    return cells


def _written(key: str, value: Any) -> tuple[str, str]:
    """The heading of a column and a value of it, by the end of its key."""
    for end, unit, write_value in (
        ("_per_s", "/s", rate_text),
        ("_bytes", "", format_size),
        ("_ratio", " ratio", ratio_text),
        ("_s", "", lambda seconds: f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"),
    ):
        if key.endswith(end):
            heading = key.removesuffix(end).replace("_", " ") + unit
            return {"peak": "peak memory"}.get(heading, heading), "" if value is None else write_value(value)
    return key.replace("_", " "), "" if value is None else str(value)


def rate_text(per_second: float) -> str:
    """Samples per second: whole numbers, unless they are small."""
    return f"{per_second:,.0f}" if per_second >= 20 else f"{per_second:.2g}"


def ratio_text(ratio: float) -> str:
    """``4.3 ×``."""
    if ratio >= 1000:
        ratio = round(ratio, -2)
    return f"{ratio:,.0f} ×" if ratio >= 100 else f"{ratio:.2g} ×" if ratio < 0.1 else f"{ratio:.1f} ×"
