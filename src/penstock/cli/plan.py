"""``penstock plan``: estimate what training needs, before it starts."""

import argparse
import json
from typing import Any

import penstock
from penstock.cli.arguments import add_contender_arguments, add_training_arguments, count, open_dataset
from penstock.errors import ConfigError
from penstock.loader.rivals import Habits

EXAMPLES = """examples:
  penstock plan "data/*.h5" --batch-size 32 --memory 2GiB
      memory, reads and time that training from these files needs, with advice

  penstock plan "data/*.h5" --columns volume --mask roi.npy
      the same for a part of each volume: roi.npy is a boolean array of its shape

  penstock plan "train-{000..017}.tar" --world 8 --workers 4 --shuffle-buffer 500
      on each of 8 ranks, compared with DataLoader and WebDataset with 4 workers

  penstock plan --shape 750,150,150,100 --dtype float32 --files 40
      from shapes alone, before there are files; the first axis is rows

  penstock plan --shape 750,150,150,100 --with picture:uint8:425,425,3 --json
      with one picture per row, as JSON

exit codes: 0 success; 2 invalid request (if memory is too small, the smallest that works is named)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Files or shapes, and how training would read them."""
    add_training_arguments(parser, files="*")
    parser.add_argument("--no-shuffle", action="store_true", help="read in order")
    parser.add_argument("--window", metavar="SIZE", help="how much data is shuffled together, if rows come in blocks")
    parser.add_argument("--device", help="plan for batches copied to this device: cuda")
    parser.add_argument("--world", type=count, metavar="N", help="number of ranks that share an epoch")
    add_contender_arguments(parser, workers=4)
    parser.add_argument(
        "--no-measure", action="store_true", help="skip the one-second trial that measures reading speed"
    )
    parser.add_argument("--json", action="store_true", help="print the estimate as JSON, with sizes in bytes")
    shapes = parser.add_argument_group("from shapes alone")
    shapes.add_argument("--shape", type=_shape, metavar="ROWS,…", help="shape of one file: 750,150,150,100")
    shapes.add_argument("--dtype", default="float32", help="data type of the values (%(default)s)")
    shapes.add_argument(
        "--files", type=count, default=1, metavar="N", help="number of files of that shape (%(default)s)"
    )
    shapes.add_argument(
        "--with", dest="others", action="append", default=[], type=_field, metavar="NAME:DTYPE:SHAPE",
        help="another field of each row: picture:uint8:425,425,3",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print the estimate."""
    if bool(args.path) == (args.shape is not None):
        raise ConfigError("expected files or --shape, and not both; --help has examples")
    forecast = penstock.plan(
        open_dataset(args) if args.path else _shapes(args),
        batch_size=args.batch_size,
        files=args.files,
        habits=Habits(args.workers, args.shuffle_buffer),
        measure=0 if args.no_measure else 1,
        **_options(args),
    )
    print(json.dumps(forecast.as_json(), indent=2) if args.json else forecast)
    return 0


def _options(args: argparse.Namespace) -> dict[str, Any]:
    given = {
        "memory": args.memory, "threads": args.threads, "processes": args.processes, "world_size": args.world,
        "columns": args.columns, "window": args.window, "device": args.device,
        "shuffle": False if args.no_shuffle else None,
    }  # fmt: skip
    options = {name: value for name, value in given.items() if value is not None}
    if "window" in options and args.window.isdecimal():
        options["window"] = int(args.window)
    return options


def _shapes(args: argparse.Namespace) -> dict[str, tuple[tuple[int, ...], str]]:
    if args.mask:
        raise ConfigError(
            "--mask: needs files; from shapes alone, give the number of selected elements: --shape 750,15724"
        )
    rows = args.shape[0]
    return {"data": (args.shape, args.dtype), **{name: ((rows, *shape), dtype) for name, dtype, shape in args.others}}


def _shape(written: str) -> tuple[int, ...]:
    return tuple(count(part.strip()) for part in written.split(","))


def _field(written: str) -> tuple[str, str, tuple[int, ...]]:
    name, colon, rest = written.partition(":")
    dtype, _, shape = rest.partition(":")
    if not (name and colon and dtype):
        raise argparse.ArgumentTypeError(f"{written!r}: expected NAME:DTYPE:SHAPE, such as picture:uint8:425,425,3")
    return name, dtype, _shape(shape) if shape else ()
