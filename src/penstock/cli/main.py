"""``penstock <command>``: finds the command, runs it, and turns errors into one line and an exit code.

A command is a module of this package, listed in ``COMMANDS``, with ``EXAMPLES`` (the end of its help),
``add_arguments(parser)`` and ``run(args) -> int``, the exit code. Only the command that is run is imported, so that
``--help`` stays quick.

Exit codes: 0 success; 1 the command found something wrong; 2 invalid request; 130 interrupted; 141 the reader of the
output is gone (``| head``).
"""

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from types import ModuleType

import penstock
from penstock.base import stop
from penstock.cli.parser import Parser
from penstock.errors import PenstockError

COMMANDS = {
    "inspect": "show what files contain: fields, layout, and how each will be read",
    "verify": "check whether files are intact: write a manifest of digests, or compare with it",
    "plan": "estimate what training needs: memory, bytes, time; and what other loaders need",
    "convert": "write files in another layout, once, within a memory budget: Zarr, HDF5, npy, tar, Parquet",
    "bench": "run the loader as training would: rate, memory, waits, bottleneck; compare with others",
    "nsd": "the Natural Scenes Dataset: show or prepare yours, or synthesize one",
    "demo": "make a small dataset, train from it inside a memory budget, and compare with torch's DataLoader",
}

EXAMPLES = """examples:
  penstock inspect "data/*.h5"
      what the files contain, and how they will be read

  penstock plan "data/*.h5" --batch-size 32 --memory 2GiB
      what training from them needs

  penstock bench "data/*.h5" --memory 2GiB --html report.html
      how fast this machine reads them, and what limits it

  penstock plan --help
      the options of a command, with examples

exit codes: 0 success; 1 the command found something wrong; 2 invalid request; 130 after Ctrl-C"""

INVALID = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells count
UNREAD = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; ``argv`` is ``sys.argv[1:]`` unless given."""
    given = sys.argv[1:] if argv is None else list(argv)
    name = " ".join(["penstock", *[word for word in given[:1] if word in COMMANDS]])
    try:
        args = _parse(given)
        with warnings.catch_warnings():
            warnings.showwarning = partial(_show_warning, name)
            code = int(_import_command(args.command).run(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has left; what is still in the buffer must go somewhere when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except PenstockError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return INVALID
    except KeyboardInterrupt as interrupt:
        interrupt.with_traceback(None)  # it may hold a progress bar, which prints when it is deleted
        print(f"\n{name}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _import_command(name: str) -> ModuleType:
    """The module of a command. Ctrl-C waits until it is there: libraries report an interrupted import as broken."""
    with stop.without_interrupts():
        return importlib.import_module(f"penstock.cli.{name}")


def _show_warning(name: str, message: Warning | str, *_: object, **__: object) -> None:
    """On one line, without the line of our code that Python would show."""
    print(f"{name}: {message}", file=sys.stderr)


def _parse(given: Sequence[str]) -> argparse.Namespace:
    try:
        return _make_parser(given).parse_args(given)
    finally:
        sys.stdout.flush()  # --help may be piped too


def _make_parser(given: Sequence[str]) -> argparse.ArgumentParser:
    """The parser, with the arguments of the one command that is named in ``given``."""
    parser = Parser(
        prog="penstock",
        description=penstock.__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"penstock {penstock.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, purpose in COMMANDS.items():
        raw = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, help=purpose, description=purpose, formatter_class=raw)
        if name in given:
            module = _import_command(name)
            command.epilog = module.EXAMPLES
            module.add_arguments(command)
    return parser
