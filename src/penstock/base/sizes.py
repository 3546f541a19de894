"""Sizes in bytes: how people write them, and how we print them.

``"2GiB"`` and ``"2GB"`` differ by 7 %, so both are parsed exactly: KiB, MiB, GiB, TiB are powers of 1024; kB, MB, GB,
TB powers of 1000.
"""

import re

from penstock.base.checks import is_whole, shown
from penstock.errors import ConfigError

UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip

MiB = 2**20
KiB = 2**10

MOST_FILE_BYTES = 2**60
"""No file is larger: metadata that say so are wrong."""

_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_size(size: int | str, *, argument: str) -> int:
    """``"2GiB"`` or a number of bytes -> bytes; ``argument`` names the caller's parameter in the error."""
    if is_whole(size) and size > 0:  # type: ignore[operator]
        return int(size)
    written = _WRITTEN.fullmatch(size) if isinstance(size, str) else None
    if written and written[2].lower() in UNITS:
        digits, _, decimals = written[1].partition(".")  # exactly: not through a float
        bytes_ = int(digits + decimals) * UNITS[written[2].lower()] // 10 ** len(decimals)
        if bytes_ > 0:
            return bytes_
    raise ConfigError(
        f"{argument}={shown(size)} is not a size: expected a positive number of bytes or a text such as "
        f'"768MiB", "2GiB" or "1.5GB"'
    )


def format_size(bytes_: int | float) -> str:
    """``305_000_000 -> "291 MiB"``: three digits are enough to compare by eye."""
    amount, unit = float(bytes_), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(amount) < 1024:
            break
        amount, unit = amount / 1024, larger
    digits = 0 if unit == "B" or abs(amount) >= 100 else 1 if abs(amount) >= 10 else 2
    return f"{amount:.{digits}f} {unit}"


def format_count(number: int, noun: str) -> str:
    """``1 row``, ``2 rows``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('s') else 's'}"
