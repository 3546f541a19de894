"""What ``inspect --deep`` and ``verify`` share: a verification with a bar, and what it found, line by line."""

import sys
from typing import Any

import penstock
from penstock.cli.progress import Progress
from penstock.verification import Verdict, verify


def checked(title: str, total: int, unit: str, wrong: str, source: Any, **options: Any) -> Verdict:
    """Verify behind a bar that counts what is wrong; ``options`` are those of ``verify``."""
    found = 0

    def note() -> str:
        return f"{found:,} {wrong}" if found else ""

    with Progress(title, max(1, total), unit, note) as progress:

        def go_on(more: int, bad: int) -> None:
            nonlocal found
            found = bad
            progress.add(more)

        return verify(source, progress=go_on, **options)


def read_all(ds: penstock.Dataset, memory: str | None) -> Verdict:
    """Read everything, and list what cannot be read."""
    verdict = checked("reading", values_of(ds), "values", "cannot be read", ds, memory=memory)
    tell_samples(verdict)
    return verdict


def values_of(ds: penstock.Dataset) -> int:
    return len(ds) * len(ds.fields)


def tell_samples(verdict: Verdict) -> None:
    """Which samples suffer, and what stands for a fill value."""
    for fault in verdict.faults:
        print(f"cannot be read: {fault}")
    if verdict.filled:
        print(f"never written: {verdict.filled:,} chunks, which stand for their fill value")
    sys.stdout.flush()


def tell_end(ds: penstock.Dataset, verdict: Verdict) -> None:
    """The last line."""
    wrong = f"{verdict.unreadable:,} cannot be read" if verdict.unreadable else "all can be read"
    print(f"verified: {values_of(ds):,} values (a field of a sample each), {wrong}")
