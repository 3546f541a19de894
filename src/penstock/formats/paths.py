"""The files that a path, a pattern or a list of them stands for, on this machine and others.

Patterns have stars, or braces as shells expand them: ``train-{000..017}.tar``, ``{train,val}.h5``.
"""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from penstock.base import checks
from penstock.base.urls import check_scheme, is_in_bucket, is_remote, scheme_of
from penstock.errors import ConfigError, DataError, Missing, SourceError, Unavailable
from penstock.files.files import Files
from penstock.formats.registry import folder_format, formats, known_formats

Path = str | os.PathLike[str]

# A pattern in braces that stands for more files is a mistake.
MOST_FILES = 1_000_000

# Names of a folder that are looked at to suggest what might have been meant.
LOOKED_AT = 10_000

_NUMBERS = r"(-?[0-9]+)\.\.(-?[0-9]+)(?:\.\.(-?[0-9]+))?\Z"
_LETTERS = r"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?[0-9]+))?\Z"


def paths_of(
    path: Path | Iterable[Path], files: Files, left_out: list[DataError | SourceError] | None = None
) -> list[str]:
    """The files; those that are missing go to ``left_out``, if that is given."""
    if not isinstance(path, str | os.PathLike):
        if isinstance(path, bytes | Mapping) or not isinstance(path, Iterable):
            raise ConfigError(f"{checks.shown(path)}: expected a path, a pattern, or a list of them")
        found = []
        for one in path:
            try:
                found += paths_of(one, files, left_out)
            except Missing as error:
                if left_out is None:
                    raise
                left_out.append(error)
        if not found and not left_out:
            raise Missing("no files: the list of paths is empty")
        return found
    name = os.fspath(path)
    if is_remote(name):
        return _list_addresses(name, files)
    if os.path.isfile(name):
        return [make_absolute(name)]
    if os.path.isdir(name):
        if folder_format(name) is None:
            raise ConfigError(
                f"{name}: is a folder of no known format (tried: {known_formats()}). Name the files in it, for "
                f"example {_suggest_patterns(name)}"
            )
        return [make_absolute(name)]
    if "{" in name and (found := expand_pattern(name)) != [name]:
        return paths_of(found, files, left_out)
    check_scheme(name)
    if os.path.exists(name):
        raise ConfigError(f"{name}: expected a file or a folder, found {_describe_no_file(name)}")
    if not glob.has_magic(name):
        raise Missing(f"{name}: no such file (looked in {os.path.dirname(os.path.abspath(name))}); check the path")
    matches = _match_pattern(name, left_out)
    if not matches and not left_out:
        folder = os.path.dirname(os.path.abspath(name))
        absent = "" if glob.has_magic(folder) or os.path.isdir(folder) else ", which is not there"
        raise Missing(f"{name}: the pattern matches no file (looked in {folder}{absent}); check the path")
    return [make_absolute(each) for each in matches]


def make_absolute(path: str) -> str:
    """An absolute path, which stays valid if the working directory changes; an address stays as it is.

    Nothing else changes: ``..`` may lead elsewhere behind a link, and the last part names the samples.
    """
    if not path:
        raise ConfigError("path='': expected a path, or \".\" for the current folder")
    if os.path.isabs(path) or scheme_of(path) or path[:5].lower() == "pipe:":
        return path
    try:
        return os.path.join(os.getcwd(), path)
    except FileNotFoundError:
        raise Unavailable(
            f"{path}: the current folder, to which this path is relative, was removed; change to another"
        ) from None


def _suggest_patterns(folder: str) -> str:
    """Patterns that match the files of a folder, by their suffixes."""
    found = Counter(_find_suffix(name) for name in _list_some_names(folder) if not name.startswith("."))
    del found[""]
    patterns = [f"{os.path.join(folder, f'*{suffix}')!r} ({count:,})" for suffix, count in found.most_common(3)]
    return ", or ".join(patterns) or repr(os.path.join(folder, "*.hdf5"))


def _list_some_names(folder: str) -> Iterator[str]:
    try:
        with os.scandir(folder) as entries:
            yield from (entry.name for entry in islice(entries, LOOKED_AT))
    except OSError:
        return


def _find_suffix(name: str) -> str:
    """The longest suffix of a known format."""
    endings = (suffix for known in formats() for suffix in known.suffixes if name.lower().endswith(suffix))
    return max(endings, key=len, default="")


def _match_pattern(pattern: str, left_out: list[DataError | SourceError] | None) -> list[str]:
    """What a pattern matches, in the order of numbers in names. Folders that are not datasets are
    skipped.
    """
    found = []
    for name in sorted(glob.glob(pattern, recursive=True), key=_natural_key):
        is_folder = os.path.isdir(name)
        if os.path.isfile(name) or (is_folder and folder_format(name) is not None):
            found.append(name)
        elif not is_folder or _find_suffix(name):
            what = "a folder in which the files of a dataset are not there" if is_folder else _describe_no_file(name)
            error = Missing(
                f'{name}: {what}, and {pattern!r} matches it. Remove it, name the files, or pass on_error="skip"'
            )
            if left_out is None:
                raise error
            left_out.append(error)
    return found


def _describe_no_file(name: str) -> str:
    return "a pipe or a device" if os.path.exists(name) else "a link to a file that is not there"


def _list_addresses(pattern: str, files: Files) -> list[str]:
    """Files on other machines, by addresses without secrets."""
    found: list[str] = []
    for each in expand_pattern(pattern):
        # In a web address, a question mark begins the query: it is no pattern.
        starred = glob.has_magic(each.replace("?", "")) if is_in_bucket(each) else "*" in each.partition("?")[0]
        found += sorted(files.remote.listed(each), key=_natural_key) if starred else [each]
    return [files.remote.admit(each) for each in found]


def expand_pattern(name: str) -> list[str]:
    """All names that a pattern in braces stands for."""
    found = list(islice(expand_braces(name), MOST_FILES + 1))
    if len(found) > MOST_FILES:
        raise ConfigError(f"{name!r:.100}: stands for more than {MOST_FILES:,} files")
    return found


def _natural_key(name: str) -> list[tuple[int, int | str]]:
    """Sort key that puts session 2 before session 10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]


def expand_braces(pattern: str) -> Iterator[str]:
    """``a{1,2}b{08..10}`` -> every combination, the last brace changing fastest, as a shell does."""
    inside = _find_braces(pattern)
    if inside is None:
        yield _unescape(pattern)
        return
    begin, commas, end = inside
    before = _unescape(pattern[:begin])
    for middle in _expand_alternatives(pattern, begin, commas, end):
        for after in expand_braces(pattern[end + 1 :]):
            yield before + middle + after


def _expand_alternatives(pattern: str, begin: int, commas: list[int], end: int) -> Iterator[str]:
    body = pattern[begin + 1 : end]
    if commas:
        for left, right in zip([begin, *commas], [*commas, end], strict=True):
            yield from expand_braces(pattern[left + 1 : right])
    elif found := re.match(_NUMBERS, body):
        first, last, step = found.groups()
        padded = any(re.match(r"-?0[0-9]", each) for each in (first, last))
        width = max(len(first), len(last)) if padded else 0
        yield from (f"{number:0{width}d}" for number in _steps(int(first), int(last), step))
    elif found := re.match(_LETTERS, body):
        first, last, step = found.groups()
        letters = [at for at in _steps(ord(first), ord(last), None) if chr(at).isalpha()]
        yield from (chr(at) for at in letters[:: abs(int(step or 1)) or 1])
    else:  # neither a choice nor a range: plain text
        yield from (f"{{{each}}}" for each in expand_braces(body))


def _steps(first: int, last: int, step: str | None) -> range:
    size = abs(int(step or 1)) or 1
    return range(first, last + 1, size) if first <= last else range(first, last - 1, -size)


def _find_braces(pattern: str) -> tuple[int, list[int], int] | None:
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
        raise ConfigError(f"{pattern!r:.100}: a brace is not closed; write \\{{ and \\}} for plain ones")
    return None


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)
