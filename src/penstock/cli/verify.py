"""``penstock verify``: whether files have changed or are damaged, and which samples are affected."""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import penstock
from penstock.base.progress import Progress
from penstock.base.sizes import format_size
from penstock.cli.arguments import add_path, count, source_of
from penstock.files.files import Files
from penstock.files.manifest import NAME
from penstock.formats.paths import paths_of
from penstock.loader.verify import Verdict, verify
from penstock.loader.verify_files import bytes_of, default_manifest, write_manifest

EXAMPLES = f"""examples:
  penstock verify "data/*.h5" --write
      save the sizes and digests of these files in {NAME} beside them

  penstock verify "data/*.h5"
      compare the files with it; without one, read and decode everything, which finds whatever the
      format's own checksums detect

  penstock verify "train-{{000..017}}.tar" --manifest copy.json
      compare with another manifest

A loader compares as it reads: penstock.open(…, manifest="{NAME}")

exit codes: 0 success; 1 something has changed, is damaged or cannot be read; 2 invalid request (a missing file, say)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(parser)
    parser.add_argument(
        "--write", nargs="?", const="", metavar="FILE", help=f"write a manifest: {NAME} beside the files, or FILE"
    )
    parser.add_argument(
        "--manifest", metavar="FILE", help=f"the manifest to compare with (default: {NAME} beside them)"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--memory", metavar="SIZE", help="most memory that reading may hold (default: a small amount)")
    parser.add_argument("--workers", type=count, metavar="N", help="processes that read (default: this one)")


def run(args: argparse.Namespace) -> int:
    """Write a manifest, compare with one, or read everything; 1 if something is wrong."""
    source = source_of(args)
    if args.write is not None:
        return _write(source, args.write or None, as_json=args.json)
    manifest = args.manifest or default_manifest(paths_of(source, Files()))
    if args.manifest is None and not os.path.isfile(manifest):
        if not args.json:
            print(f"no {manifest} to compare with (--write makes one): reading everything", flush=True)
        return _read(source, {"memory": args.memory, "workers": args.workers}, as_json=args.json)
    return _compare(source, manifest, {"memory": args.memory, "workers": args.workers}, as_json=args.json)


def _write(source: str | list[str], goal: str | None, *, as_json: bool) -> int:
    total = bytes_of(source)
    with Progress("hashing", max(1, total), "bytes") as progress:
        written = write_manifest(source, goal, progress=lambda more, bad: progress.add(more))
    facts = {"manifest": str(written), "bytes": total}
    print(json.dumps(facts, indent=2) if as_json else f"written: {written}, for {format_size(total)}")
    return 0


def _compare(source: str | list[str], manifest: str, how: Mapping[str, Any], *, as_json: bool) -> int:
    total = bytes_of(source)
    verdict = _verify(("comparing", total, "bytes", "changed"), source, manifest=manifest, **how)
    if as_json:
        print(json.dumps({"manifest": str(manifest), "bytes": total, **verdict.as_json()}, indent=2))
        return 0 if verdict.sound else 1
    for damage in verdict.damages:
        print(f"changed: {damage}")
    print_unreadable(verdict)
    found = f"places that changed: {len(verdict.damages):,}" if verdict.damages else "nothing has changed"
    print(f"verified: {format_size(total)} against {manifest}, {found}")
    return 0 if verdict.sound else 1


def _read(source: str | list[str], how: Mapping[str, Any], *, as_json: bool) -> int:
    ds = penstock.open(source, on_error="skip")
    verdict = read_all(ds, how)
    if as_json:
        lost = {"files_left_out": [str(why) for why in ds.left_out], "fields_left_out": dict(ds.fields_left_out)}
        print(json.dumps({"manifest": None, **lost, **verdict.as_json()}, indent=2))
        return 0 if verdict.sound and not ds.left_out else 1
    print_unreadable(verdict)
    for why in ds.left_out:
        print(f"left out: {why}")
    for damage in verdict.damages:
        print(f"damaged: {damage}")
    if verdict.unchecked:
        print(
            f"not checked: {', '.join(verdict.unchecked)}: the format has no checksum there, so a damaged byte would "
            f"go unnoticed; --write makes a manifest"
        )
    print_total(ds, verdict)
    return 0 if verdict.sound and not ds.left_out else 1


def read_all(ds: penstock.Dataset, how: Mapping[str, Any]) -> Verdict:
    """Read everything, to find what cannot be read; ``how``: memory, and workers."""
    bar = ("reading", _count_values(ds), "values", "cannot be read")
    return _verify(bar, ds, **how)


def _verify(bar: tuple[str, int, str, str], source: Any, **options: Any) -> Verdict:
    """Run ``penstock.verify`` with a progress bar: its title, total and unit, and the word for what is wrong."""
    (title, total, unit, problem), found = bar, 0

    def note() -> str:
        return f"{found:,} {problem}" if found else ""

    with Progress(title, max(1, total), unit, note) as progress:

        def advance(more: int, bad: int) -> None:
            nonlocal found
            found = bad
            progress.add(more)

        return verify(source, progress=advance, **options)


def print_unreadable(verdict: Verdict) -> None:
    """The samples that cannot be read, and the chunks that hold a fill value."""
    for fault in verdict.faults:
        print(f"cannot be read: {fault}")
    if verdict.filled:
        print(f"never written: {verdict.filled:,} chunks, which read as their fill value")
    sys.stdout.flush()


def print_total(ds: penstock.Dataset, verdict: Verdict) -> None:
    wrong = f"{verdict.unreadable:,} cannot be read" if verdict.unreadable else "all can be read"
    print(f"verified: {_count_values(ds):,} values (one field of one sample each), {wrong}")


def _count_values(ds: penstock.Dataset) -> int:
    return len(ds) * len(ds.fields)
