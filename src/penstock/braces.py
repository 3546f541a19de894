"""Braces in names of files, as shells expand them: ``train-{000..017}.tar``, ``{train,val}.h5``."""

import re
from collections.abc import Iterator

from penstock.errors import ConfigError

_NUMBERS = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)(?:\.\.(-?[0-9]+))?\Z")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?[0-9]+))?\Z")


def expand_braces(pattern: str) -> Iterator[str]:
    """``a{1,2}b{08..10}`` -> every combination, the last brace changing fastest, as a shell does."""
    inside = _first_braces(pattern)
    if inside is None:
        yield _unescaped(pattern)
        return
    begin, commas, end = inside
    before = _unescaped(pattern[:begin])
    for middle in _alternatives(pattern, begin, commas, end):
        for after in expand_braces(pattern[end + 1 :]):
            yield before + middle + after


def _alternatives(pattern: str, begin: int, commas: list[int], end: int) -> Iterator[str]:
    body = pattern[begin + 1 : end]
    if commas:
        for left, right in zip([begin, *commas], [*commas, end], strict=True):
            yield from expand_braces(pattern[left + 1 : right])
    elif found := _NUMBERS.match(body):
        first, last, step = found.groups()
        padded = any(re.match(r"-?0[0-9]", each) for each in (first, last))
        width = max(len(first), len(last)) if padded else 0
        yield from (f"{number:0{width}d}" for number in _steps(int(first), int(last), step))
    elif found := _LETTERS.match(body):
        first, last, step = found.groups()
        letters = [at for at in _steps(ord(first), ord(last), None) if chr(at).isalpha()]
        yield from (chr(at) for at in letters[:: abs(int(step or 1)) or 1])
    else:  # neither a choice nor a range: plain text
        yield from (f"{{{each}}}" for each in expand_braces(body))


def _steps(first: int, last: int, step: str | None) -> range:
    size = abs(int(step or 1)) or 1
    return range(first, last + 1, size) if first <= last else range(first, last - 1, -size)


def _first_braces(pattern: str) -> tuple[int, list[int], int] | None:
    """Where the first brace opens, the commas directly inside it, and where it closes."""
    depth, begin = 0, -1
    commas: list[int] = []
    for found in re.finditer(r"\\.|[{},]", pattern, re.DOTALL):
        at, mark = found.start(), found[0]
        if mark == "{":
            begin = at if depth == 0 else begin
            depth += 1
        elif mark == "}":
            depth -= 1
            if depth == 0:
                return begin, commas, at
            if depth < 0:
                break
        elif mark == "," and depth == 1:
            commas.append(at)
    if depth:
        raise ConfigError(f"{pattern!r:.100}: a brace without its partner; write \\{{ and \\}} for plain ones")
    return None


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)
