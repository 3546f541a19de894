"""The packages that integrations need. If one is missing or too old, the error names the extra that installs it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from penstock.errors import ConfigError


@contextmanager
def needs(extra: str, least: str, *packages: str) -> Iterator[None]:
    """Import the first of these packages that is installed; if that fails, the error names the extra to install.

    Wrap the imports from it too: other releases may lack what is imported.
    """
    name = " or ".join(packages)
    way_out = f'{name} {least} or later is needed: pip install --upgrade "penstock[{extra}]"'
    try:
        found = _first_version(packages)
        if _numbers(found) < _numbers(least):
            raise ConfigError(f"{name} {found} is too old. {way_out}")
        yield
    except ImportError as error:
        raise ConfigError(f"{name} cannot be imported ({error}). {way_out}") from error


def _first_version(packages: tuple[str, ...]) -> str:
    for package in packages[:-1]:
        try:
            return str(import_module(package).__version__)
        except ImportError:
            pass
    return str(import_module(packages[-1]).__version__)


def _numbers(version: str) -> tuple[int, ...]:
    """``"2.6.0.post1" -> (2, 6, 0)``."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
