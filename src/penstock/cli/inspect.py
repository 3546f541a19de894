"""``penstock inspect``: what is there, and how it will be read."""

import argparse

import penstock


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A path or several, and which of their fields."""
    parser.add_argument("path", nargs="+", help='files, or a pattern in quotes: "betas_session*.hdf5"')
    parser.add_argument("--fields", nargs="+", metavar="NAME", help="these fields only")
    parser.add_argument("--skip", action="store_true", help="go on where a file cannot be opened, and say which")


def run(args: argparse.Namespace) -> int:
    """Print what is found; 1 if something had to be left out."""
    path = args.path[0] if len(args.path) == 1 else args.path
    found = penstock.inspect(path, fields=args.fields, on_error="skip" if args.skip else "raise")
    print(found)
    return 1 if found.left_out else 0
