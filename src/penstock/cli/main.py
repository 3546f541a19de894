"""``penstock <command>``: finds the command, runs it, and turns what went wrong into one line and an exit code.

A command is a module of this package, listed in ``COMMANDS``, with two functions: ``add_arguments(parser)`` and
``run(args) -> int``, the exit code. Only the command that was asked for is imported, so that ``--help`` stays quick.

Exit codes: 0 done; 1 the command itself found something wrong; 2 it could not be done as asked; 130 interrupted; 141
nobody read on (``| head``).
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import penstock
from penstock.errors import PenstockError

COMMANDS = {
    "inspect": "what is in files: fields, layout, and how each will be read",
    "verify": "whether files are what they were: write a manifest of digests, or compare with it",
    "plan": "what training from files would take: memory, bytes, time; and what other loaders would",
    "bench": "run the loader as it would train: rate, memory, waits, the bottleneck; beside others",
    "nsd": "the Natural Scenes Dataset: synthesize one, or prepare yours for training",
    "demo": "make a small dataset, train from it inside a memory budget, and compare with torch's DataLoader",
}

EXAMPLES = """examples:
  penstock inspect "betas_session*.hdf5"
      what is there, and how it will be read

  penstock plan "betas_session*.hdf5" --batch-size 32 --memory 2GiB
      what training from it would take

  penstock bench "betas_session*.hdf5" --memory 2GiB --html report.html
      how fast it is here, and what holds it up

  penstock plan --help
      more of each command, with examples

exit codes: 0 done; 1 the command found something wrong; 2 it cannot be done as asked; 130 after Ctrl-C"""

UNDOABLE = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells count
UNREAD = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; ``argv`` is ``sys.argv[1:]`` unless given."""
    given = sys.argv[1:] if argv is None else list(argv)
    name = " ".join(["penstock", *[word for word in given[:1] if word in COMMANDS]])
    try:
        args = _parsed(given)
        code = int(importlib.import_module(f"penstock.cli.{args.command}").run(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read the output has enough; what is left in the buffer must go somewhere when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except PenstockError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return UNDOABLE
    except KeyboardInterrupt as interrupt:
        interrupt.with_traceback(None)  # it may hold a bar that was just begun, which takes its leave when it dies
        print(f"\n{name}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parsed(given: Sequence[str]) -> argparse.Namespace:
    try:
        return _parser(given).parse_args(given)
    finally:
        sys.stdout.flush()  # --help is piped as well


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    """The whole parser, with the arguments of the one command that is named in ``given``."""
    parser = argparse.ArgumentParser(
        prog="penstock",
        description=penstock.__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"penstock {penstock.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=purpose)
        if name in given:
            importlib.import_module(f"penstock.cli.{name}").add_arguments(command)
    return parser
