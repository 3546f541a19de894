"""Which files a path, a pattern or a list of them stands for, here and on other machines."""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from penstock.braces import expand_braces
from penstock.errors import ConfigError, DataError, Missing, SourceError
from penstock.fileio import Files
from penstock.formats.registry import folder_format, formats, tried
from penstock.urls import check_scheme, is_remote

Path = str | os.PathLike[str]

# More than this a pattern in braces cannot mean.
MOST_FILES = 1_000_000

# So many names in a folder are looked at to say what might have been meant.
LOOKED_AT = 10_000


def paths_of(
    path: Path | Iterable[Path], files: Files, left_out: list[DataError | SourceError] | None = None
) -> list[str]:
    """The files that are meant; those that are not there go to ``left_out``, if there is one."""
    if not isinstance(path, str | os.PathLike):
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
        return _addresses(name, files)
    if os.path.isfile(name):
        return [name]
    if os.path.isdir(name):
        if folder_format(name) is None:
            raise ConfigError(
                f"{name}: is a folder, and of no format that is one (tried: {tried()}). Name the files in it, for "
                f"example {_suggested(name)}"
            )
        return [name]
    if "{" in name and (expanded := _expanded(name)) != [name]:
        return paths_of(expanded, files, left_out)
    check_scheme(name)
    if os.path.exists(name):
        raise ConfigError(f"{name}: is neither a file nor a folder, but a pipe or a device; expected one of those")
    if not glob.has_magic(name):
        raise Missing(f"{name}: no such file (looked in {os.path.dirname(os.path.abspath(name))}); check the path")
    matches = sorted(filter(_can_be_opened, glob.glob(name, recursive=True)), key=_natural)
    if not matches:
        folder = os.path.dirname(os.path.abspath(name))
        absent = "" if glob.has_magic(folder) or os.path.isdir(folder) else ", which is not there"
        raise Missing(f"{name}: the pattern matches no file (looked in {folder}{absent}); check the path")
    return matches


def _suggested(folder: str) -> str:
    """Patterns for what lies in a folder, by the names that its files have."""
    found = Counter(_known_suffix(name) for name in _some_names(folder) if not name.startswith("."))
    del found[""]
    patterns = [f"{os.path.join(folder, f'*{suffix}')!r} ({count:,})" for suffix, count in found.most_common(3)]
    return ", or ".join(patterns) or repr(os.path.join(folder, "*.hdf5"))


def _some_names(folder: str) -> Iterator[str]:
    try:
        with os.scandir(folder) as entries:
            yield from (entry.name for entry in islice(entries, LOOKED_AT))
    except OSError:
        return


def _known_suffix(name: str) -> str:
    """The longest ending that a format here is known by."""
    endings = (suffix for known in formats() for suffix in known.suffixes if name.lower().endswith(suffix))
    return max(endings, key=len, default="")


def _can_be_opened(name: str) -> bool:
    return os.path.isfile(name) or (os.path.isdir(name) and folder_format(name) is not None)


def _addresses(pattern: str, files: Files) -> list[str]:
    """Files on other machines, by what may be shown of their addresses."""
    found: list[str] = []
    for each in _expanded(pattern):
        # What follows a question mark in an address of the web is no pattern.
        starred = glob.has_magic(each.replace("?", "")) if each.startswith("s3://") else "*" in each.partition("?")[0]
        found += sorted(files.remote.listed(each), key=_natural) if starred else [each]
    return [files.remote.admit(each) for each in found]


def _expanded(name: str) -> list[str]:
    found = list(islice(expand_braces(name), MOST_FILES + 1))
    if len(found) > MOST_FILES:
        raise ConfigError(f"{name!r:.100}: stands for more than {MOST_FILES:,} files")
    return found


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Sort key that puts session 2 before session 10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]
