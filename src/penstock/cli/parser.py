"""An argument parser whose errors show the usage of the command and suggest what was probably meant."""

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from penstock.base.checks import nearest


class Parser(argparse.ArgumentParser):
    """Suggests the nearest known word; parsers of subcommands are of this class too."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Report arguments that a command does not know with the usage of that command, not of the whole program."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown)
        return found, unknown

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exit with the usage and suggestions."""
        known = [name for action in self._actions for name in action.option_strings]
        options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        hints = [suggestion(word, known) for word in options]
        self.error(f"unknown arguments: {' '.join(unknown)}{''.join(hints)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(each) for each in action.choices]
            text = f"invalid choice: {value!r}{suggestion(str(value), choices)}"
            raise argparse.ArgumentError(action, f"{text} (choose from {', '.join(choices)})")


def suggestion(word: str, known: Iterable[str]) -> str:
    """``; did you mean inspect?``, or nothing if no known word is near."""
    near = nearest(word, known)
    return f"; did you mean {near}?" if near else ""
