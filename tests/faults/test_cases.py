"""The numbered cases that docs/faults.md promises and those that are tested are the same."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_promised_case_is_tested_and_every_tested_one_promised():
    promised = {int(n) for n in re.findall(r"^\| (\d+) \|", (ROOT / "docs/faults.md").read_text(), re.MULTILINE)}
    tested = {
        int(n)
        for file in (ROOT / "tests").rglob("test_*.py")
        for marks in re.findall(r"mark\.case\(([\d, ]+)\)", file.read_text())
        for n in marks.split(",")
    }
    assert promised == tested
