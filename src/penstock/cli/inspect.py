"""``penstock inspect``: what is there, and how it will be read."""

import argparse

import penstock
from penstock.cli.checking import read_all, tell_end
from penstock.dataset import OnError

EXAMPLES = """examples:
  penstock inspect "betas_session*.hdf5"
      fields, layout, compression, and how each will be read; reads no data

  penstock inspect "train-{000..017}.tar" --skip
      go on where a file cannot be opened, and list those at the end

  penstock inspect "betas_session*.hdf5" --deep
      read and decode every chunk or member, and list what cannot be read

exit codes: 0 all well; 1 something had to be left out or cannot be read; 2 nothing can be said (no such file, say)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A path or several, and which of their fields."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("path", nargs="+", help='files, or a pattern in quotes: "betas_session*.hdf5"')
    parser.add_argument("--fields", nargs="+", metavar="NAME", help="these fields only")
    parser.add_argument("--skip", action="store_true", help="go on where a file cannot be opened, and say which")
    parser.add_argument("--deep", action="store_true", help="read every chunk or member, and list what cannot be read")
    parser.add_argument("--allow-fill", action="store_true", help="take fill values for chunks that were never written")
    parser.add_argument("--memory", metavar="SIZE", help="the most that --deep may hold; little, if left out")


def run(args: argparse.Namespace) -> int:
    """Print what is found; 1 if something had to be left out."""
    path = args.path[0] if len(args.path) == 1 else args.path
    on_error: OnError = "skip" if args.skip or args.deep else "raise"
    ds = penstock.open(path, fields=args.fields, on_error=on_error, allow_fill=args.allow_fill)
    found = penstock.inspect(ds)
    print(found, flush=True)
    if not args.deep:
        return 1 if found.left_out else 0
    verdict = read_all(ds, args.memory)
    tell_end(ds, verdict)
    return 1 if found.left_out or verdict.unreadable else 0
