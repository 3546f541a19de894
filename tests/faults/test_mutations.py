"""Files with fields, records, regions or words changed: right data, the format library's data, or an error of ours.

``mutations.py`` makes the changes and ``fuzz_child.py`` reads what becomes of them, many in one child. Each promise is
checked for every one of them:

- where a checksum covers the changed bytes, other values never come; where none does, other values may, and other
  shapes, dtypes or rows only where the format's own library reads the same from the changed file;
- nothing takes longer than five seconds of work, or more memory than the budget and 64 MiB;
- every error is a PenstockError, and the process lives;
- ``verify`` says the same as the loader, and with ``on_error="skip"`` every row comes or is told.

A failure names its format and seed: ``python fuzz_child.py SAMPLES SCRATCH FORMAT:SEED:SEED+1`` does it again, where
``python mutation_samples.py SAMPLES`` has written the files.
"""

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork, limits and /proc")

HERE = Path(__file__).parent
FORMATS = re.findall(r'^    "([\w-]+)": \(', (HERE / "mutation_samples.py").read_text(), re.MULTILINE)

HANG_S = 30.0
"""Without a word from a child: six times what one change may take, for machines that others use too."""


class Child:
    """A process that works through some changes, and can be waited for line by line."""

    def __init__(self, samples: Path, scratch: Path, jobs: list[tuple[str, int, int]]) -> None:
        program = [sys.executable, str(HERE / "fuzz_child.py"), str(samples), str(scratch)]
        self.process = subprocess.Popen(
            [*program, *(f"{name}:{first}:{end}" for name, first, end in jobs)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def lines(self) -> Iterator[str]:
        """What it says; ends where it ends, or says nothing for too long."""
        waiting, until = b"", time.monotonic() + HANG_S
        while select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
            more = os.read(self.process.stdout.fileno(), 65536)
            if not more:
                return
            *whole, waiting = (waiting + more).split(b"\n")
            yield from (line.decode() for line in whole)
            until = time.monotonic() + HANG_S

    def end(self) -> str:
        """How it ended; one that hangs is killed."""
        hangs = self.process.poll() is None and not select.select([self.process.stdout], [], [], 1.0)[0]
        if hangs:
            self.process.kill()
        said = self.process.communicate()[1].decode(errors="replace")
        return "hangs" if hangs else f"ended with {self.process.returncode}: {said[-600:]}"


def outcomes(samples: Path, scratch: Path, names: list[str], seeds: range) -> Iterator[tuple[str, int, str]]:
    """Format, seed and what came of it, for every change; a child that dies or hangs is replaced."""
    jobs = [(name, seeds.start, seeds.stop) for name in names]
    while jobs:
        child, begun = Child(samples, scratch, jobs), None
        for line in child.lines():
            name, seed, *rest = line.split("\t")
            begun = None if rest else (name, int(seed))
            if rest:
                yield name, int(seed), "\t".join(rest)
                jobs = after(jobs, name, int(seed))
        told = child.end()
        if jobs and begun is None:
            raise AssertionError(f"the child for {jobs[0]} {told}")
        if begun is not None:
            yield *begun, f"BAD child {told}"
            jobs = after(jobs, *begun)


def after(jobs: list[tuple[str, int, int]], name: str, seed: int) -> list[tuple[str, int, int]]:
    """What is left to do when one is done."""
    _, _, end = jobs[0]
    return [(name, seed + 1, end), *jobs[1:]] if seed + 1 < end else jobs[1:]


@pytest.fixture(scope="session")
def samples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    subprocess.run([sys.executable, str(HERE / "mutation_samples.py"), str(folder)], check=True, timeout=60)
    return folder


def check(samples: Path, scratch: Path, names: list[str], seeds: range) -> None:
    found = list(outcomes(samples, scratch, names, seeds))
    assert len(found) == len(names) * len(seeds)
    bad = [each for each in found if "BAD" in each[2]]
    told = "\n".join(f"{name}:{seed}:{seed + 1}\t{outcome}" for name, seed, outcome in bad[:10])
    assert not bad, f"{len(bad)} of {len(found)} changes break a promise:\n{told}"
    for name in names:
        assert any("right" not in outcome for each, _, outcome in found if each == name), f"{name}: nothing was noticed"


GROUPS = [FORMATS[begin : begin + 8] for begin in range(0, len(FORMATS), 8)]


@pytest.mark.case(24)
@pytest.mark.parametrize("names", GROUPS, ids=lambda names: f"{names[0]}-to-{names[-1]}")
def test_six_changes_of_each_format_keep_every_promise(samples, tmp_path, names):
    check(samples, tmp_path / "changed", names, range(6))


@pytest.mark.slow
@pytest.mark.case(24)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FORMATS)
def test_three_hundred_changes_keep_every_promise(samples, tmp_path, name):
    check(samples, tmp_path / "changed", [name], range(1000, 1300))


if __name__ == "__main__":  # SAMPLES SCRATCH FIRST END FORMAT …: lists what breaks a promise
    for kind in sys.argv[5:] or FORMATS:
        for told in outcomes(Path(sys.argv[1]), Path(sys.argv[2]), [kind], range(int(sys.argv[3]), int(sys.argv[4]))):
            print(*told, sep="\t", flush=True)
