"""Docstrings name arguments in columns; the reference shows them as a list.

    batch_size:  samples per batch on each rank
    memory:      the most the loader may hold, as "2GiB" or bytes;
                 None takes a quarter of what is free
"""

import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*):  +(?=\S)")


def as_list(text: str) -> str:
    """The text with lines of columns as items, each with the lines that go on with it."""
    lines, inside = [], False
    for line in text.splitlines():
        if ARGUMENT.match(line):
            if not inside:
                lines.append("")
            inside = True
            lines.append(ARGUMENT.sub(lambda found: f"- `{found[1]}`: ", line))
        elif inside and line.startswith("  "):
            lines.append(f"    {line.strip()}")
        else:
            if inside and line:
                lines.append("")
            inside = False
            lines.append(line)
    return "\n".join(lines)


class Arguments(griffe.Extension):
    """Rewrites every docstring."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_list(obj.docstring.value)
