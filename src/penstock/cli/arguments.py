"""The arguments that several commands share: files, batch size, budget, fields."""

import argparse

import penstock
from penstock.errors import ConfigError, PenstockError
from penstock.formats.open import open_quietly


def add_training_arguments(parser: argparse.ArgumentParser, *, files: str) -> None:
    """``files`` is the number of paths, as argparse writes it: ``"+"``, or ``"*"`` if there may be none."""
    add_path(parser, files)
    parser.add_argument("--batch-size", type=count, default=32, metavar="N", help="samples per batch (%(default)s)")
    parser.add_argument("--memory", metavar="SIZE", help="the budget, such as 2GiB (default: a quarter of free memory)")
    parser.add_argument("--columns", nargs="+", metavar="NAME", help="use these fields only")
    parser.add_argument("--mask", metavar="FILE", help="a boolean .npy array that selects a part of each row")
    parser.add_argument("--threads", type=count, metavar="N", help="the most reader threads (default: one per core)")
    parser.add_argument(
        "--processes", type=int, metavar="N", help="reader processes; 0 reads in this one (default: by cores)"
    )


def add_path(parser: argparse.ArgumentParser, files: str = "+") -> None:
    """The paths of files, which ``source_of`` returns."""
    parser.add_argument("path", nargs=files, help='files, or a pattern in quotes: "data/*.h5"')


def add_contender_arguments(parser: argparse.ArgumentParser, *, workers: int) -> None:
    """How other loaders are run; ``workers`` is the default."""
    parser.add_argument(
        "--workers", type=count_or_zero, default=workers, metavar="N", help="of the other loaders (%(default)s)"
    )
    parser.add_argument(
        "--shuffle-buffer", type=count, default=1000, metavar="K", help="samples in WebDataset's buffer (%(default)s)"
    )


def source_of(args: argparse.Namespace) -> str | list[str]:
    """The path or pattern that a command was given, or several."""
    return args.path[0] if len(args.path) == 1 else list(args.path)


def open_dataset(args: argparse.Namespace) -> penstock.Dataset:
    """Open the files of a command, with the mask applied."""
    open_ = penstock.open if args.columns is None else open_quietly
    ds = open_(source_of(args))
    return ds if args.mask is None else masked(ds, args.mask)


def masked(ds: penstock.Dataset, path: str) -> penstock.Dataset:
    """Apply the boolean array in a file to the one field that has its shape."""
    from penstock.files.retry import open_for_parser
    from penstock.read.npy import decode_npy

    try:
        with open_for_parser(path) as file:
            mask = decode_npy(file.read())
    except PenstockError as error:
        raise ConfigError(f"--mask {path}: cannot be read as an array: {error}") from None
    fitting = [name for name, spec in ds.fields.items() if spec.shape == mask.shape]
    if mask.dtype != bool or len(fitting) != 1:
        known = ", ".join(f"{name} {spec}" for name, spec in ds.fields.items())
        raise ConfigError(
            f"--mask {path}: expected booleans in the shape of one field, found {mask.dtype} {mask.shape}; the "
            f"fields are {known}"
        )
    return ds.select_within(fitting[0], mask)


def count(written: str) -> int:
    """An argument that is a whole number, at least 1."""
    if not written.isdecimal() or int(written) < 1:
        raise argparse.ArgumentTypeError(f"{written!r}: expected a whole number, at least 1")
    return int(written)


def count_or_zero(written: str) -> int:
    """An argument that is a whole number, at least 0."""
    return 0 if written == "0" else count(written)
