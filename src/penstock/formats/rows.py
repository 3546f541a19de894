"""Arrays of one file as fields of one dataset: the axis of their rows, and their common number of rows."""

from collections.abc import Iterable, Mapping, Sequence

from penstock.errors import ConfigError, SchemaMismatch


def checked_axis(path: str, name: str, shape: Sequence[int], axis: int) -> int:
    """Check that the array has this axis of rows."""
    if not 0 <= axis < len(shape):
        expected = f"which has shape {tuple(shape)}: expected 0 to {len(shape) - 1}"
        raise ConfigError(f"{path}: row_axis={axis} for {name!r}, {expected}")
    return axis


def common_rows(path: str, rows: Mapping[str, int], *, asked_for: bool) -> int:
    """The number of rows of all fields; ``asked_for`` is whether the caller named the fields."""
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"{name} has {count:,}" for name, count in rows.items())
        if asked_for:
            raise SchemaMismatch(f"{path}: the fields differ in their number of rows: {counts}")
        raise SchemaMismatch(
            f"{path}: its arrays differ in their number of rows ({counts}); name those that belong together with "
            f"fields=(…)"
        )
    return next(iter(rows.values()))


def list_names(names: Iterable[str]) -> str:
    """Names for a message: at most ten."""
    known = list(names)
    shown = ", ".join(map(repr, known[:10]))
    return f"{shown} and {len(known) - 10} more" if len(known) > 10 else shown
