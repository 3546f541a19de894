"""``Dataset``: the user's view of a store.

A ``Dataset`` never changes; each method returns another. Conversions are only declared, so that a loader can run them
where they are cheapest: on the way into the batch, or on the device after the copy.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from penstock.base import checks
from penstock.base.dtypes import checked_dtype, is_inexact, is_number, numpy_dtype
from penstock.base.machine import free_bytes
from penstock.base.sizes import MiB, format_size
from penstock.base.spec import Axes, Cast, Fields, FieldSpec, Origin, row_bytes
from penstock.base.torch_worker import fail_worker_on_lost_batch
from penstock.dataset.combine import Subset
from penstock.dataset.gather import Gathered
from penstock.dataset.keys import Keys
from penstock.dataset.map import EachTransform, Mapped, MappedEach, Transform
from penstock.dataset.normalize import Normalized
from penstock.dataset.rewrite import cast_fields, choose_fields, normalize_field, permute_fields, select_part
from penstock.dataset.row_numbers import row_numbers
from penstock.dataset.second_pass import Padded, Permuted
from penstock.dataset.store import Store, StoreBase, as_base
from penstock.errors import ConfigError, DataError, LimitExceeded, SourceError
from penstock.read.convert import convert
from penstock.read.part import row_part

Index = int | np.integer | slice | Sequence[int] | np.ndarray
Sample = dict[str, Any]

# Reads smaller than this do not ask how much memory is free.
ALWAYS_FITS = 256 * MiB
OnError = Literal["raise", "skip"]


class Dataset:
    """Finite rows of named fields: ``len(ds)``, ``ds[42]``, ``ds[[7, 3, 7]]``, ``ds[10:20]``."""

    def __init__(
        self,
        store: Store,
        casts: Mapping[str, Cast] | None = None,
        left_out: Sequence[DataError | SourceError] = (),
        axes: Mapping[str, Axes] | None = None,
        fields_left_out: Mapping[str, str] | None = None,
    ) -> None:
        self.store = as_base(store)
        """The rows as stored."""
        self.casts = dict(casts or {})
        """Conversions declared on top, by field."""
        self.left_out = tuple(left_out)
        """Why files are missing, if ``open`` skipped files that cannot be opened."""
        self.axes = dict(axes or {})
        """Orders of axes declared on top, by field."""
        self.fields_left_out = dict(fields_left_out or {})
        """Fields of the files that cannot be delivered, and why; empty if fields were chosen by name."""
        self._delivered = permute_fields(self.store, self.casts, self.contiguous_axes)
        views = {name: axes.order for name, axes in self.axes.items() if not axes.is_contiguous}
        if views:
            self._delivered = Permuted(self._delivered, views)

    @property
    def delivered(self) -> StoreBase:
        """The rows with every declared conversion applied."""
        return self._delivered

    @property
    def contiguous_axes(self) -> dict[str, tuple[int, ...]]:
        """Orders of axes that batches are laid out in, by field."""
        return {name: axes.order for name, axes in self.axes.items() if axes.is_contiguous}

    @property
    def fields(self) -> Fields:
        """Dtype and shape of each field of a sample."""
        return self._delivered.fields

    @property
    def fingerprint(self) -> str:
        """Differs when the data differ; the layout of memory makes no difference."""
        if not self.contiguous_axes:
            return self._delivered.fingerprint
        orders = {name: axes.order for name, axes in self.axes.items()}
        return Permuted(cast_fields(self.store, self.casts), orders).fingerprint

    def __len__(self) -> int:
        return len(self._delivered)

    @property
    def keys(self) -> Keys:
        """The names of the samples: ``ds.keys[7]``, ``ds.keys.find("000007")``."""
        return Keys(self)

    @property
    def classes(self) -> tuple[str, ...]:
        """The meaning of labels, if folders are classes: label 2 is ``classes[2]``."""
        return _find_classes(self.store)

    def __getitem__(self, index: Index | str) -> Sample:
        if isinstance(index, str):
            if index in self.fields and index not in self.keys:
                raise ConfigError(
                    f"ds[{index!r}]: that is a field, not a sample; ds[rows][{index!r}] gives it for some rows"
                )
            index = self.keys.find(index)
        if isinstance(index, int | np.integer):
            fail_worker_on_lost_batch()
            rows = self._rows([int(index)])
            return {name: values[0] for name, values in self._fetch(rows).items()}
        return self._fetch(self._rows(index))

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Many samples in one read; torch's ``DataLoader`` calls this for each batch."""
        fail_worker_on_lost_batch()
        batch = self._fetch(self._rows(indices))
        return [{name: values[k] for name, values in batch.items()} for k in range(len(indices))]

    def __iter__(self) -> Iterator[Sample]:
        return (self[row] for row in range(len(self)))

    def origin(self, row: int) -> Origin:
        """The file, and the place in it, that a sample comes from."""
        return self._delivered.origin(int(self._rows([row])[0]))

    def select(self, rows: slice | range | Sequence[int] | np.ndarray) -> "Dataset":
        """These rows, in this order: numbers, a slice, a range, or a mask with one boolean per row."""
        if isinstance(rows, slice):
            rows = range(*rows.indices(len(self)))
        ascending = isinstance(rows, range) and len(rows) > 1 and min(rows[0], rows[-1]) >= 0
        chosen = rows if isinstance(rows, range) and ascending else self._rows(rows)
        return self._with(Subset(self.store, chosen), self.casts)

    def select_within(self, field: str, wanted: Any) -> "Dataset":
        """Part of each row of ``field``: a mask (booleans with the row's shape -> one axis), or slices (-> a crop).

        Only chunks with wanted elements are read and decoded, if the format allows that.
        """
        spec = self._numbers(field, "select_within")
        if field in self.axes:
            raise ConfigError(f"select_within({field!r}, …): its axes were permuted; select first, then permute")
        try:
            part = row_part(spec.shape, wanted)
        except ConfigError as error:
            raise ConfigError(f"select_within({field!r}, …): {error}") from None
        return self._with(select_part(self.store, field, part), self.casts)

    def only(self, *names: str) -> "Dataset":
        """These fields alone; the others are not read."""
        if not names:
            raise ConfigError(f"only() needs at least one field: the dataset has {', '.join(map(repr, self.fields))}")
        for name in names:
            self._known(name)
        return self._renamed({name: name for name in names}, {})

    def rename(self, **new_to_old: str) -> "Dataset":
        """``rename(voxels="betas")``: the field ``betas`` under the name ``voxels``."""
        for old in new_to_old.values():
            self._known(old)
        old_to_new = {old: new for new, old in new_to_old.items()}
        names = {old_to_new.get(name, name): name for name in self.fields}
        if len(names) != len(self.fields) or len(old_to_new) != len(new_to_old):
            raise ConfigError(
                f"rename{tuple(new_to_old.items())}: two fields would have the same name, or one field two"
            )
        return self._renamed(names, self.fields_left_out)

    def permute(self, field: str, *axes: int, contiguous: bool = False) -> "Dataset":
        """Deliver the axes of a row in another order: ``permute("jpg", 2, 0, 1)`` gives channels, rows, columns.

        In a loader's batches this is a view, so pictures come as torch's "channels last", the fast format for
        convolutions. With ``contiguous=True`` memory has that order too: rows are written so as they are read, in the
        pass that converts them.
        """
        spec = self._known(field)
        if not all(map(checks.is_whole, axes)) or sorted(axes) != list(range(len(spec.shape))):
            raise ConfigError(f"permute({field!r}, {axes}): expected each of the {len(spec.shape)} axes of {spec} once")
        before = self.axes.get(field, Axes(tuple(range(len(axes))))).order
        wanted = Axes(tuple(before[axis] for axis in axes), checks.flag("permute: contiguous", contiguous))
        return Dataset(self.store, self.casts, self.left_out, {**self.axes, field: wanted}, self.fields_left_out)

    def pad(self, field: str, *, to: int, value: float = 0) -> "Dataset":
        """Fill each row of ``field`` up with ``value``, along its first axis, to a length of ``to``.

        Datasets whose rows differ in length (voxels of different subjects) can then be concatenated.
        """
        spec = self._known(field)
        if field in self.axes:
            raise ConfigError(f"pad({field!r}, …): its axes were permuted; pad first, then permute")
        if not spec.shape:
            raise ConfigError(f"pad({field!r}, …): its rows are single numbers ({spec}), which have no length")
        to = checks.whole(f"pad({field!r}, …): to", to, least=spec.shape[0])
        wanted, stored = _as_dtype(value, spec.dtype), _as_dtype(value, self.store.fields[field].dtype)
        if wanted is None:
            raise ConfigError(f"pad({field!r}, value={value!r}): {spec.dtype} has no such value")
        if stored is not None and field in self.casts:
            converted = np.empty(1, spec.dtype)
            convert(stored, converted, self.casts[field])
            stored = stored if np.array_equal(converted, wanted, equal_nan=True) else None
        if stored is not None:  # the declared conversion turns it into the wanted value
            return self._with(Padded(self.store, field, to, stored), self.casts)
        below = cast_fields(self.store, {field: self.casts[field]})
        others = {name: cast for name, cast in self.casts.items() if name != field}
        return self._with(Padded(below, field, to, wanted), others)

    def cast(
        self, field: str, dtype: Any, scale: float = 1.0, offset: float = 0.0, *, divisor: float = 1.0
    ) -> "Dataset":
        """Deliver ``field`` as ``value.astype(dtype) / divisor * scale + offset``."""
        self._numbers(field, "cast")
        try:
            wanted = Cast(numpy_dtype(dtype), float(scale), float(offset), float(divisor))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"cast({field!r}, {dtype!r}, scale={scale!r}, offset={offset!r}): expected a NumPy dtype and two "
                f"numbers ({error})"
            ) from None
        if not is_number(wanted.dtype):
            raise ConfigError(f"cast({field!r}, {dtype!r}): expected a dtype of plain numbers, such as float32")
        if wanted.divisor == 0:
            raise ConfigError(f"cast({field!r}, …, divisor=0): expected a divisor other than 0")
        if not is_inexact(wanted.dtype) and wanted.changes_values:
            raise ConfigError(
                f"cast({field!r}, {wanted.dtype}, scale={scale}, offset={offset}): scaling into whole numbers would "
                f"round; cast to a float, or scale in a map"
            )
        if field not in self.casts:
            return self._with(self.store, {**self.casts, field: wanted})
        earlier = cast_fields(self.store, {field: self.casts[field]})
        return self._with(earlier, {**self.casts, field: wanted})

    def map(self, function: Transform) -> "Dataset":
        """Pass every read through ``function``: a dict of arrays with one leading row axis in, another out.

        It is tried on one or two rows now, to learn what it returns and how long it takes. It then runs in the loader's
        threads, on as many rows at a time as take some tens of milliseconds. Its result for a row must not depend on
        other rows.
        """
        if not callable(function):
            raise ConfigError(f"map({checks.shown(function)}): expected a function")
        return Dataset(Mapped(self._delivered, function), None, self.left_out, None, self.fields_left_out)

    def map_each(self, function: EachTransform) -> "Dataset":
        """Pass every sample through ``function(sample, rng)``: a dict of one row's values in, another out.

        ``rng`` is a ``numpy.random.Generator`` that follows from the loader's seed, the epoch and the row alone. So an
        augmentation differs from epoch to epoch, and is the same for any number of threads, processes and ranks, and
        after a resume. Values may come back as arrays, numbers or torch tensors. ``ds[7]`` shows epoch 0 of seed 0.
        """
        if not callable(function):
            raise ConfigError(f"map_each({checks.shown(function)}): expected a function")
        return Dataset(MappedEach(self._delivered, function), None, self.left_out, None, self.fields_left_out)

    def normalize(
        self, field: str, mean: Any, spread: Any, group_of_row: Any = None, dtype: Any = "float32"
    ) -> "Dataset":
        """Deliver ``field`` as ``(value - mean) / spread``, in single precision; elements with no spread come as 0.

        ``mean`` and ``spread`` have the shape of a row, or one that numpy stretches to it: three numbers for the
        channels of pictures. With ``group_of_row`` (a number for each row of this dataset) they have one more axis in
        front: z-scores per session, say. A cast declared on the field comes first.
        """
        spec = self._known(field)
        kind = checked_dtype(dtype, argument=f"normalize({field!r}, …): dtype")
        if field in self.axes:
            raise ConfigError(f"normalize({field!r}, …): its axes were permuted; normalize first, then permute")
        cast = self.casts.get(field, Cast(np.dtype(np.float32)))
        unit = cast.divisor / cast.scale  # the cast is undone in the tables, so that values are converted once
        mean, spread = (np.asarray(mean, np.float32) - cast.offset) * unit, np.asarray(spread, np.float32) * unit
        others = {name: other for name, other in self.casts.items() if name != field}
        if group_of_row is None:
            if not mean.shape == spread.shape == spec.shape:
                return self._with(normalize_field(self.store, field, mean, spread, kind), others)
            mean, spread, group_of_row = mean[None], spread[None], np.zeros(len(self), np.int32)
        normalized = Normalized(self.store, field, mean=mean, spread=spread, group_of_row=group_of_row, dtype=kind)
        return self._with(normalized, others)

    def gather(self, rows: Any, *, mean: bool = False, absent: Literal["mean", "zeros"] = "mean") -> "Dataset":
        """Samples made of several rows: ``rows`` is (samples, rows of each). Fields get an axis for them, or with
        ``mean=True`` are averaged. -1 stands for no row: its place gets the mean of the others, or zeros.
        """
        gathered = Gathered(self._delivered, rows, mean=mean, absent=absent)
        return Dataset(gathered, None, self.left_out, None, self.fields_left_out)

    def to_dask(self, chunk: int | str = "64MiB") -> dict[str, Any]:
        """The fields as lazy Dask arrays, rows first, in chunks of about this size, aligned with those of the files."""
        from penstock.dataset.lazy import to_dask

        return to_dask(self, chunk)

    def refresh(self) -> "Dataset":
        """The same files as they are now, with the rows that were added since they were opened."""
        raise ConfigError("refresh() is for a dataset as open() gave it: refresh that one, then select, cast or map")

    def close(self) -> None:
        """Close files that are open; the dataset can still be read, and opens them again."""
        self.store.close()

    def __repr__(self) -> str:
        fields = [f"  {name}: {spec}" for name, spec in self.fields.items()]
        return "\n".join([self._summary(), *fields, *(f"  {line}" for line in self._describe_left_out())])

    def _repr_html_(self) -> str:
        from penstock.base import html
        from penstock.dataset.thumbnails import thumbnails

        lost = "\n".join(self._describe_left_out())
        text = html.paragraph(self._summary()) + html.field_table(self.fields) + thumbnails(self)
        return text + (html.paragraph(lost) if lost else "")

    def _summary(self) -> str:
        return f"Dataset of {len(self):,} rows, {format_size(len(self) * row_bytes(self.fields))} delivered"

    def _describe_left_out(self) -> list[str]:
        lines = [f"left out: field {name!r}: {why}" for name, why in self.fields_left_out.items()]
        return [*lines, f"left out: {len(self.left_out):,} files"] if self.left_out else lines

    def _renamed(self, names: Mapping[str, str], fields_left_out: Mapping[str, str]) -> "Dataset":
        casts = {new: self.casts[old] for new, old in names.items() if old in self.casts}
        axes = {new: self.axes[old] for new, old in names.items() if old in self.axes}
        return Dataset(choose_fields(self.store, names), casts, self.left_out, axes, fields_left_out)

    def _with(self, store: Store, casts: Mapping[str, Cast] | None = None) -> "Dataset":
        """Another dataset made of this one."""
        return Dataset(store, casts, self.left_out, self.axes, self.fields_left_out)

    def _fetch(self, rows: np.ndarray) -> dict[str, Any]:
        self._check_fits(len(rows))
        out = {name: spec.empty(len(rows)) for name, spec in self.fields.items()}
        self._delivered.read(rows, np.arange(len(rows)), out)
        return {name: list(values) if values.dtype.hasobject else values for name, values in out.items()}

    @cached_property
    def _row_need(self) -> int:
        """Memory that reading one row takes."""
        return row_bytes(self.fields) + self._delivered.scratch_bytes(1)

    def _check_fits(self, rows: int) -> None:
        """Refuse a read that does not fit into free memory; a loader has a budget instead."""
        if rows * self._row_need <= ALWAYS_FITS:
            return
        need = rows * row_bytes(self.fields) + self._delivered.scratch_bytes(rows)
        if need > (free := free_bytes()):
            raise LimitExceeded(
                f"{self.origin(0)}: reading {rows:,} rows at once takes {format_size(need)}, chunks and the like "
                f"included, and {format_size(free)} are free. Read fewer, or fields of smaller chunks, or use a Loader"
            )

    def _rows(self, index: Any) -> np.ndarray:
        return row_numbers(index, len(self))

    def _known(self, field: str) -> FieldSpec:
        if not isinstance(field, str) or field not in self.fields:
            raise ConfigError(f"no field {checks.shown(field)}: the dataset has {', '.join(map(repr, self.fields))}")
        return self.fields[field]

    def _numbers(self, field: str, verb: str) -> FieldSpec:
        spec = self._known(field)
        if spec.is_list:
            raise ConfigError(f"{verb}({field!r}, …): the field holds {spec.holds}, a list in each batch, not numbers")
        return spec


def _as_dtype(value: float, dtype: np.dtype) -> np.ndarray | None:
    """One value in this dtype; None if the dtype has no such value. Floats may be rounded."""
    try:
        with np.errstate(all="ignore"):
            given = np.asarray(value).reshape(1)
            found = given.astype(dtype)
    except (TypeError, ValueError):
        return None
    kept = np.isfinite(found) == np.isfinite(given) if is_inexact(dtype) else found == given
    return found if kept.all() else None


def check_on_error(on_error: Any) -> OnError:
    """``on_error``, if it is valid."""
    found: OnError = checks.one_of("on_error", on_error, get_args(OnError))
    return found


def _find_classes(store: StoreBase) -> tuple[str, ...]:
    return store.classes or next(filter(None, map(_find_classes, store.children)), ())
