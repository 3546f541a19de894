"""python -m benchmarks.figures [--check]: write all published numbers, from benchmarks/results.

Writes docs/benchmarks.md, the table between two marks in README.md and docs/index.md, and docs/images/results.svg.
``--check`` writes nothing and exits with 1 if a file differs from what would be written.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import picture, results
from benchmarks.catalog import CATALOG, SUMMARY, About
from benchmarks.results import Results
from penstock.base.sizes import format_size

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "<!-- results: written by `make figures`, from benchmarks/results -->"
END = "<!-- end of results -->"

HEAD = """---
hide: [navigation]
---

# Benchmarks

Each table was measured by one command: all loaders took turns in one run, each in a fresh process, with files in the
page cache. Rates are medians. Memory is the peak above the start, over all processes of a loader. “× best other”
compares each rate with the fastest loader that is not penstock.

`make bench` measures again, and `make figures` writes this page from the files in `benchmarks/results`.
"""

ELSEWHERE = "Other measurements"


def files() -> dict[Path, str]:
    """What each file should contain."""
    all_results = [results.read(name) for name in results.names()]
    shown = [results.read(name) for name in SUMMARY if name in results.names()]
    found = {
        ROOT / "docs" / "benchmarks.md": page(all_results, shown),
        ROOT / "docs" / "images" / "results.svg": picture.summary(shown, SUMMARY),
    }
    for path in (ROOT / "README.md", ROOT / "docs" / "index.md"):
        found[path] = replace_marked(path.read_text(), f"{summary(shown)}\n\n{measured_where(shown)}")
    return found


def replace_marked(text: str, new: str) -> str:
    """The text with what is between the two marks replaced."""
    pattern = re.compile(f"({re.escape(BEGIN)}\n).*?({re.escape(END)})", re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}\n{new}\n\n{found[2]}", text)


def summary(shown: Sequence[Results]) -> str:
    """penstock beside the fastest other loader, one line per benchmark."""
    lines = ["| | penstock | memory | fastest other loader | memory | which one |", "|---|---:|---:|---:|---:|---|"]
    for each in shown:
        ours, best = each.ours(), each.best_other()
        cells = [
            SUMMARY[each.name],
            f"**{results.rate_text(ours.rate)}/s**", format_size(ours.numbers["peak_bytes"]),
            f"{results.rate_text(best.rate)}/s", format_size(best.numbers["peak_bytes"]), best.label,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def measured_where(shown: Sequence[Results]) -> str:
    """Machine and date of the summary."""
    machines, dates = sorted({each.machine for each in shown}), sorted({each.date for each in shown})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"Samples per second and peak memory, measured on {when}: {'; '.join(machines)}."


def page(all_results: Sequence[Results], shown: Sequence[Results]) -> str:
    """The page of all results."""
    known = {each.name: each for each in all_results}
    listed = [name for name in CATALOG if name in known]
    more = [name for name in known if name not in CATALOG]
    sections: dict[str, list[Results]] = {}
    for name in [*listed, *more]:
        sections.setdefault(_about(known[name]).section, []).append(known[name])
    parts = [
        HEAD,
        "![Samples per second and peak memory of penstock and the fastest other loader](images/results.svg)\n",
        f"{summary(shown)}\n",
        *(part for section, each in sections.items() for part in [f"## {section}\n", *map(_one, each)]),
    ]
    return "\n".join(parts)


def _about(result: Results) -> About:
    known = CATALOG.get(result.name, About(ELSEWHERE, result.title or result.name, result.about))
    return About(known.section, result.title or known.title, result.about or known.text)


def _one(result: Results) -> str:
    about = _about(result)
    lines = [f"### {about.title}", "", *([about.text, ""] if about.text else []), results.table(result), ""]
    return "\n".join([*lines, f"*{result.date}, {result.machine}:* `{result.command}`", ""])


def differing() -> Iterator[Path]:
    """Files that are not what the results say."""
    for path, text in files().items():
        if not path.exists() or path.read_text() != text:
            yield path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file differs")
    if parser.parse_args().check:
        for path in (wrong := list(differing())):
            print(f"{path.relative_to(ROOT)} differs from benchmarks/results: run make figures")
        return 1 if wrong else 0
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
