"""``penstock convert``: files in another layout."""

import argparse
import json
import sys
from typing import Any

import penstock
from penstock.base.progress import Progress
from penstock.base.sizes import format_size
from penstock.base.spec import row_bytes
from penstock.cli.arguments import add_path, count, masked, source_of
from penstock.errors import ConfigError
from penstock.testing.measure import tree_bytes

EXAMPLES = """examples:
  penstock convert "data/*.h5" betas.zarr --memory 512MiB
      Zarr v3 in shards, so that each row can be read by itself

  penstock convert betas.hdf5 betas.npy --row-axis 1 --memory 64MiB
      a file stored by voxel, rewritten by row: everything is read once and written once

  penstock convert "data/*.h5" betas.h5 --compression zstd --dry-run
      show what it would do and how much memory it needs, and write nothing

  penstock convert pictures.h5 "train-%06d.tar" --shuffle 0
      tar shards in shuffled order

  penstock convert "data/*.h5" betas --like plan
      the layout that `penstock plan` advises; prints the expected time and size first

  penstock convert betas.hdf5 betas.zarr --part 3/40
  penstock convert betas.hdf5 betas.zarr
      the third of 40 array jobs; then, when all are done, the call that finishes the output

An interrupted conversion is continued by the same command. The output appears under its name when it is complete.
Beside it are a manifest (penstock verify OUT --manifest OUT.manifest.json) and a record of where the data came from.

exit codes: 0 success; 2 invalid request (if memory is too small, the smallest that works is named)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Files, where to, and how."""
    add_path(parser)
    parser.add_argument(
        "to", help="what to write: .zarr, .h5, .npy, .tar, .parquet or .lmdb; train-%%06d.tar for several"
    )
    parser.add_argument("--memory", default="512MiB", metavar="SIZE", help="most memory to hold (%(default)s)")
    parser.add_argument("--fields", nargs="+", metavar="NAME", help="these fields only")
    parser.add_argument("--mask", metavar="FILE", help="a boolean .npy array that selects a part of each row")
    parser.add_argument("--row-axis", type=int, default=0, metavar="N", help="the axis of the samples (%(default)s)")
    parser.add_argument(
        "--compression", choices=["auto", "zstd", "blosc", "gzip", "none"],
        help="default: auto for Zarr (zstd where it saves nine tenths), none for HDF5",
    )  # fmt: skip
    parser.add_argument("--rows-per-chunk", type=count, metavar="N", help="default: about 1 MiB per chunk")
    parser.add_argument("--shard-bytes", default="256MiB", metavar="SIZE", help="size of shards, about (%(default)s)")
    parser.add_argument("--shuffle", type=int, metavar="SEED", help="write rows in an order shuffled with this seed")
    parser.add_argument("--workers", type=count, metavar="N", help="processes (default: one per core if they fit)")
    parser.add_argument(
        "--like",
        choices=["plan"],
        help="the layout that `penstock plan` advises; prints expected time and size first",
    )
    parser.add_argument("--part", type=_part, metavar="K/N", help="only the K-th of N parts, for array jobs")
    parser.add_argument("--finish", action="store_true", help="only put the finished parts together")
    check = parser.add_mutually_exclusive_group()
    check.add_argument(
        "--verify", action="store_true", help="at the end, compare the whole output with the source, read once more"
    )
    check.add_argument("--no-verify", action="store_true", help="skip reading what was written back to compare it")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an existing output, once the new one is complete"
    )
    parser.add_argument("--restart", action="store_true", help="start again instead of continuing")
    parser.add_argument("--dry-run", action="store_true", help="show what it would do, and write nothing")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, with sizes in bytes")


def run(args: argparse.Namespace) -> int:
    """Convert, and print what was done."""
    if args.finish and args.part is not None:
        raise ConfigError("--part, --finish: parts are finished by a call of their own, without --part")
    ds = penstock.open(source_of(args), args.fields, row_axis=args.row_axis)
    ds = ds if args.mask is None else masked(ds, args.mask)
    total = len(ds) * row_bytes(ds.fields)
    with Progress("converting", total, "bytes", lambda: f"{format_size(tree_bytes())} held") as bar:
        done = penstock.convert(ds, args.to, progress=lambda done, _: bar.advance_to(done), **_options(args))
    if args.dry_run:
        document = done.plan.as_json() | ({} if done.expected is None else {"expected": done.expected.as_json()})
        print(json.dumps(document, indent=2) if args.json else done.plan)
    else:
        print(json.dumps(done.as_json(), indent=2) if args.json else done)
    return 0


def announce(text: str) -> None:
    """Print what will be done to stderr: stdout is for the result."""
    print(text, file=sys.stderr, flush=True)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "memory": args.memory, "like": args.like, "announce": announce, "compression": args.compression,
        "rows_per_chunk": args.rows_per_chunk, "shard_bytes": args.shard_bytes, "shuffle": args.shuffle,
        "workers": args.workers, "part": args.part, "only_finish": args.finish, "overwrite": args.overwrite,
        "verify": "source" if args.verify else not args.no_verify, "restart": args.restart, "dry_run": args.dry_run,
    }  # fmt: skip


def _part(written: str) -> tuple[int, int]:
    number, _, of = written.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{written!r}: expected two numbers, such as 3/40")
    return int(number), int(of)
