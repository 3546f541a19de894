"""What commands ask alike about a training run: files, batch size, budget, fields."""

import argparse

import penstock
from penstock.errors import ConfigError


def add_training_arguments(parser: argparse.ArgumentParser, examples: str, *, files: str) -> None:
    """``files`` is how many there must be: ``"+"``, or ``"*"`` where there may be none."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = examples
    parser.add_argument("path", nargs=files, help='files, or a pattern in quotes: "betas_session*.hdf5"')
    parser.add_argument("--batch-size", type=count, default=32, metavar="N", help="samples a batch (%(default)s)")
    parser.add_argument("--memory", metavar="SIZE", help="the budget, as 2GiB or 1.5GB; else a quarter of what is free")
    parser.add_argument("--columns", nargs="+", metavar="NAME", help="these fields only")
    parser.add_argument("--mask", metavar="FILE", help=".npy of booleans: the part of each row that is wanted")
    parser.add_argument("--threads", type=count, metavar="N", help="reading threads at most; else one a core")


def opened(args: argparse.Namespace) -> penstock.Dataset:
    """The files, or the part of their rows, that these arguments name."""
    ds = penstock.open(args.path[0] if len(args.path) == 1 else args.path)
    return ds if args.mask is None else _masked(ds, args.mask)


def _masked(ds: penstock.Dataset, path: str) -> penstock.Dataset:
    """The dataset with the part of each row that a boolean array in a file selects, in the field of its shape."""
    import numpy as np

    try:
        mask = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--mask {path}: not an array that can be read: {error}") from None
    fitting = [name for name, spec in ds.fields.items() if spec.shape == mask.shape]
    if mask.dtype != bool or len(fitting) != 1:
        known = ", ".join(f"{name} {spec}" for name, spec in ds.fields.items())
        raise ConfigError(
            f"--mask {path}: expected booleans in the shape of one field, found {mask.dtype} {mask.shape}; there are "
            f"{known}"
        )
    return ds.select_within(fitting[0], mask)


def count(written: str) -> int:
    """An argument that counts something."""
    if not written.isdecimal() or int(written) < 1:
        raise argparse.ArgumentTypeError(f"{written!r}: expected a whole number, at least 1")
    return int(written)


def none_or_more(written: str) -> int:
    """The same, or 0."""
    return 0 if written == "0" else count(written)
