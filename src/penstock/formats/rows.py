"""Arrays of one file as fields of one sample: along which axis the rows lie, and that all have as many."""

from collections.abc import Mapping, Sequence

from penstock.errors import ConfigError, SchemaMismatch


def checked_axis(path: str, name: str, shape: Sequence[int], axis: int) -> int:
    """The axis of an array's rows, which must be one of its own."""
    if not 0 <= axis < len(shape):
        expected = f"which has shape {tuple(shape)}: expected 0 to {len(shape) - 1}"
        raise ConfigError(f"{path}: row_axis={axis} for {name!r}, {expected}")
    return axis


def common_rows(path: str, rows: Mapping[str, int], *, asked_for: bool) -> int:
    """How many rows all of these have; ``asked_for`` tells whether the caller named them, or they are all there are."""
    if len(set(rows.values())) > 1:
        told = ", ".join(f"{name} has {count:,}" for name, count in rows.items())
        if asked_for:
            raise SchemaMismatch(f"{path}: the fields asked for differ in rows: {told}")
        raise SchemaMismatch(
            f"{path}: its arrays differ in rows ({told}); name those that belong together with fields=(…)"
        )
    return next(iter(rows.values()))
