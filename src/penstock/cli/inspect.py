"""``penstock inspect``: what files contain, and how they will be read."""

import argparse
import json

import penstock
from penstock.cli.arguments import add_path, count, source_of
from penstock.cli.verify import print_total, print_unreadable, read_all
from penstock.dataset.dataset import OnError
from penstock.formats.open import open_quietly

EXAMPLES = """examples:
  penstock inspect "data/*.h5"
      fields, layout, compression, and how each will be read; reads no data

  penstock inspect "train-{000..017}.tar" --skip
      continue if a file cannot be opened, and list such files at the end

  penstock inspect "data/*.h5" --deep
      read and decode every chunk or member, and list what cannot be read

  penstock inspect "data/*.h5" --json
      the same as JSON, with sizes in bytes

exit codes: 0 success; 1 something was left out or cannot be read; 2 invalid request (a missing file, say)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(parser)
    parser.add_argument("--fields", nargs="+", metavar="NAME", help="these fields only")
    parser.add_argument("--skip", action="store_true", help="continue if a file cannot be opened, and list such files")
    parser.add_argument("--deep", action="store_true", help="read every chunk or member, and list what cannot be read")
    parser.add_argument(
        "--allow-fill", action="store_true", help="accept fill values for chunks that were never written"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON, with sizes in bytes")
    parser.add_argument("--memory", metavar="SIZE", help="most memory that --deep may hold (default: a small amount)")
    parser.add_argument("--workers", type=count, metavar="N", help="processes that --deep reads in (default: this one)")


def run(args: argparse.Namespace) -> int:
    """Print what is found; 1 if something was left out."""
    on_error: OnError = "skip" if args.skip or args.deep else "raise"
    ds = open_quietly(source_of(args), fields=args.fields, on_error=on_error, allow_fill=args.allow_fill)
    found = penstock.inspect(ds)
    if not args.json:
        print(found, flush=True)
    verdict = read_all(ds, {"memory": args.memory, "workers": args.workers}) if args.deep else None
    if args.json:
        print(json.dumps(found.as_json() | ({} if verdict is None else {"deep": verdict.as_json()}), indent=2))
    elif verdict is not None:
        print_unreadable(verdict)
        print_total(ds, verdict)
    return 1 if found.left_out or (verdict is not None and verdict.unreadable) else 0
