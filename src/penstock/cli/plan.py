"""``penstock plan``: what training would take, before it starts."""

import argparse
import json
from typing import Any

import penstock
from penstock.cli.training_arguments import add_training_arguments, count, none_or_more, opened
from penstock.errors import ConfigError
from penstock.rivals import Habits

EXAMPLES = """examples:
  penstock plan "betas_session*.hdf5" --batch-size 32 --memory 2GiB
      what a loader over these files would hold, read and take, and what to do about it

  penstock plan "betas_session*.hdf5" --columns betas --mask roi.npy
      the same for part of each volume: roi.npy is a boolean array of the shape of one

  penstock plan "train-{000..017}.tar" --world 8 --workers 4 --shuffle-buffer 500
      on each of 8 ranks, beside DataLoader and WebDataset with 4 workers

  penstock plan --shape 750,150,150,100 --dtype float32 --files 40
      from shapes alone, before there are files; rows come first

  penstock plan --shape 750,150,150,100 --with picture:uint8:425,425,3 --json
      with a picture to each row, as JSON for scripts

exit codes: 0 told; 2 it cannot be done as asked (memory too little: the smallest that works is named)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Files or shapes, and how they would be trained from."""
    add_training_arguments(parser, EXAMPLES, files="*")
    parser.add_argument("--no-shuffle", action="store_true", help="read in order")
    parser.add_argument("--window", metavar="SIZE", help="where rows come in blocks: how much is mixed together")
    parser.add_argument("--device", help="plan for batches that are copied to this device: cuda")
    parser.add_argument("--world", type=count, metavar="N", help="ranks that share an epoch")
    parser.add_argument("--workers", type=none_or_more, default=4, metavar="N", help="of other loaders (%(default)s)")
    parser.add_argument(
        "--shuffle-buffer", type=count, default=1000, metavar="K", help="samples, of WebDataset (%(default)s)"
    )
    parser.add_argument("--no-measure", action="store_true", help="do not read for a second to see how fast it is")
    parser.add_argument("--json", action="store_true", help="sizes in bytes, for scripts")
    shapes = parser.add_argument_group("from shapes alone")
    shapes.add_argument("--shape", type=_shape, metavar="ROWS,…", help="of one file: 750,150,150,100")
    shapes.add_argument("--dtype", default="float32", help="(%(default)s)")
    shapes.add_argument("--files", type=count, default=1, metavar="N", help="of that shape (%(default)s)")
    shapes.add_argument(
        "--with", dest="others", action="append", default=[], type=_field, metavar="NAME:DTYPE:SHAPE",
        help="a further field of each row: picture:uint8:425,425,3",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print the forecast."""
    if bool(args.path) == (args.shape is not None):
        raise ConfigError("name files, or a --shape, and not both; --help has examples")
    told = penstock.plan(
        opened(args) if args.path else _shapes(args),
        batch_size=args.batch_size,
        files=args.files,
        habits=Habits(args.workers, args.shuffle_buffer),
        measure=0 if args.no_measure else 1,
        **_options(args),
    )
    print(json.dumps(told.as_json(), indent=2) if args.json else told)
    return 0


def _options(args: argparse.Namespace) -> dict[str, Any]:
    given = {
        "memory": args.memory, "threads": args.threads, "world_size": args.world, "columns": args.columns,
        "window": args.window, "device": args.device, "shuffle": False if args.no_shuffle else None,
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
