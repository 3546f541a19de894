"""Sizes in bytes: how people write them, and how we print them.

``"2GiB"`` and ``"2GB"`` differ by 7 %, and a budget is a law, so both are understood exactly: KiB, MiB, GiB, TiB are
powers of 1024; kB, MB, GB, TB powers of 1000.
"""

import re
from fractions import Fraction

from penstock.errors import ConfigError

UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip

MiB = 2**20
KiB = 2**10

_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_size(size: int | str, *, argument: str) -> int:
    """``"2GiB"`` or a number of bytes -> bytes; ``argument`` names the caller's parameter in the error."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    written = _WRITTEN.fullmatch(size) if isinstance(size, str) else None
    if written and written[2].lower() in UNITS:
        bytes_ = int(Fraction(written[1]) * UNITS[written[2].lower()])  # exactly: 4.1GB is no float
        if bytes_ > 0:
            return bytes_
    raise ConfigError(
        f"{argument}={size!r} is not a size: expected a positive number of bytes or a text such as "
        f'"768MiB", "2GiB" or "1.5GB"'
    )


def format_size(bytes_: int | float) -> str:
    """``305_000_000 -> "291 MiB"``: three digits are enough to compare by eye."""
    return _formatted(bytes_, 1024, ("KiB", "MiB", "GiB", "TiB", "PiB"))


def format_decimal(bytes_: int | float) -> str:
    """``305_000_000 -> "305 MB"``: as disks are sold, and as people multiply shapes in their heads."""
    return _formatted(bytes_, 1000, ("kB", "MB", "GB", "TB", "PB"))


def _formatted(bytes_: int | float, step: int, units: tuple[str, ...]) -> str:
    amount, unit = float(bytes_), "B"
    for larger in units:
        if abs(amount) < step:
            break
        amount, unit = amount / step, larger
    digits = 0 if unit == "B" or abs(amount) >= 100 else 1 if abs(amount) >= 10 else 2
    return f"{amount:.{digits}f} {unit}"
