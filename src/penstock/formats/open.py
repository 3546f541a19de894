"""``open``: files of any known format as one dataset."""

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from penstock.base import checks
from penstock.base.checks import explains_arguments
from penstock.base.sizes import parse_size
from penstock.base.urls import is_remote
from penstock.dataset.combine import Concat
from penstock.dataset.dataset import Dataset, OnError, check_on_error
from penstock.dataset.store import Store, StoreBase, as_base
from penstock.errors import ConfigError, DataError, FieldsLeftOut, LimitExceeded, SourceError
from penstock.files.compression import MAX_EXPANSION
from penstock.files.files import Files, remote_files
from penstock.files.manifest import load
from penstock.files.retry import retry_library
from penstock.formats import raw
from penstock.formats.paths import Path, expand_pattern, make_absolute, paths_of
from penstock.formats.registry import Format, NoSamples, OpenOptions, format_of
from penstock.read import saved_chunks
from penstock.read.kinds import MAX_MEMBER_BYTES, Decoders, MemberOptions, decoder_of
from penstock.read.pictures import MAX_PIXELS, Fit

if TYPE_CHECKING:
    from penstock.remote.ranges import RemoteOptions

# Rows without values take no bytes, so that a few bytes can declare any number of them.
MOST_EMPTY_ROWS = 1_000_000

# How many of the files that cannot be opened an error names.
NAMED_FAILURES = 10

_quiet: ContextVar[bool] = ContextVar("penstock opens quietly", default=False)


@explains_arguments(
    {"columns": "fields=(…) chooses fields of the files", "names": "fields=(…) chooses fields of the files"}
)
def open(
    path: Path | Iterable[Path],
    fields: Sequence[str] | None = None,
    *,
    row_axis: int | Mapping[str, int] = 0,
    max_open_files: int | None = None,
    allow_fill: bool = False,
    allow_external: Iterable[Path] = (),
    swmr: bool = False,
    on_error: OnError = "raise",
    index_dir: Path | Literal[False] | None = None,
    cache_dir: Path | None = None,
    cache_bytes: int | str | None = None,
    remote: "RemoteOptions | None" = None,
    manifest: Path | None = None,
    size: int | tuple[int, int] | None = None,
    fit: Fit = "resize",
    max_pixels: int = MAX_PIXELS,
    max_member_bytes: int | str = MAX_MEMBER_BYTES,
    max_expansion: int = MAX_EXPANSION,
    decoders: Decoders | None = None,
) -> Dataset:
    """Open files, or folders such as ``x.zarr``, as one dataset: a path, a pattern such as ``"betas_session*.hdf5"`` or
    ``"train-{000..017}.tar"``, or a list of them, on this machine or another: ``"https://…/train-{000..017}.tar"``,
    ``"s3://bucket/*.h5"``.

    The rows of several files follow each other, in the order given. Files of a pattern are sorted naturally (session 2
    before session 10).

    fields:          the fields to read; all by default
    row_axis:        the axis of HDF5 and Zarr arrays along which samples lie; a dict where fields differ
    max_open_files:  most data files open at once, for all threads together; 0 opens a file for each request, None takes
                     a quarter of what the system allows the process (``ulimit -n``)
    allow_fill:      deliver the fill value for chunks that were never written, and count them in ``Loader.stats``; they
                     are an error otherwise, because a lost chunk looks the same
    allow_external:  folders that an HDF5 file may take data from besides its own: virtual datasets, external storage
    swmr:            read HDF5 files that are still being written; ``Dataset.refresh`` then adds new rows
    on_error:        "skip" leaves out files that cannot be opened, and lists why in ``Dataset.left_out``
    index_dir:       where large chunk tables are saved between runs: a folder, False for nowhere, None for the user's
                     cache folder (or $PENSTOCK_CACHE)
    cache_dir:       a folder for whole copies of remote files, shared by all processes that use it; None reads ranges
                     over the network
    cache_bytes:     the size limit of that folder ("200GB"); None for no limit
    remote:          timeouts, retries and headers for servers: ``penstock.remote.RemoteOptions``
    manifest:        a file that ``penstock verify … --write`` made: each block is compared with its digest when it is
                     first read, and files that the manifest does not list are refused
    size:            resize all pictures to (height, width), or one number for both
    fit:             "resize" stretches, "cover" scales and crops the overhang, "crop" cuts out the middle
    max_pixels:      pictures that declare more pixels are refused before they are decoded
    max_member_bytes:  larger files of an archive, folder or database are refused before they are read
    max_expansion:   compressed files that expand by a larger factor are refused
    decoders:        your own decoders by extension or field, if samples are files: ``{"pfm": read_pfm}``, a function of
                     the bytes. Results of one shape become arrays, others lists. Or a name: "bytes", "text", "json",
                     "array" (npy of any shape) or "arrays" (npz), which give lists. Or the dtype of plain bytes:
                     ``{"vector": "float32"}``, ``{"patch": ("uint8", (64, 64))}``
    """
    allow_fill, swmr = checks.flag("allow_fill", allow_fill), checks.flag("swmr", swmr)
    check_on_error(on_error)
    if swmr and manifest is not None:
        raise ConfigError(
            "swmr=True, manifest=…: a file that is being written has no manifest; leave out one of the two"
        )
    folder = saved_chunks.folder_of(checks.path_or_off("index_dir", index_dir))
    options = OpenOptions(
        fields=None if fields is None else _check_names(fields),
        allow_fill=allow_fill,
        files=remote_files(
            None if cache_dir is None else checks.path("cache_dir", cache_dir),
            cache_bytes,
            remote,
            max_open=max_open_files,
            manifest=None if manifest is None else load(checks.path("manifest", manifest)),
            max_expansion=max_expansion,
        ),
        row_axis=_check_axes(row_axis),
        swmr=swmr,
        on_error=on_error,
        index_folder=folder,
        allow_external=tuple(map(os.path.abspath, _check_paths("allow_external", allow_external))),
        members=replace(
            _make_member_options(size, fit, max_pixels, decoders),
            max_member_bytes=parse_size(max_member_bytes, argument="max_member_bytes"),
        ),
    )
    ds = _Opened(_make_absolute(path if isinstance(path, str | os.PathLike) else _check_paths("path", path)), options)
    if ds.fields_left_out and not _quiet.get():
        warnings.warn(_describe_fields(ds.fields_left_out), FieldsLeftOut, stacklevel=3)
    return ds


def open_with(
    files: Files,
    path: Path | Iterable[Path],
    fields: Sequence[str],
    *,
    size: int | None = None,
    on_error: OnError = "raise",
) -> Dataset:
    """Files as ``open`` opens them, through handles that the caller shares between several datasets."""
    options = OpenOptions(
        fields=tuple(fields), files=files, on_error=on_error, index_folder=saved_chunks.folder_of(None),
        members=_make_member_options(size, "resize", MAX_PIXELS, None),
    )  # fmt: skip
    return _Opened(_make_absolute(path), options)


def open_quietly(path: Path | Iterable[Path], **options: Any) -> Dataset:
    """Open without a warning, for callers that report themselves which fields are left out."""
    token = _quiet.set(True)  # warnings.catch_warnings would silence other threads too
    try:
        return open(path, **options)
    finally:
        _quiet.reset(token)


def _describe_fields(left_out: Mapping[str, str]) -> str:
    reasons = "; ".join(f"{name!r}: {why}" for name, why in left_out.items())
    return (
        f"{len(left_out)} {'field is' if len(left_out) == 1 else 'fields are'} left out, because penstock cannot "
        f"deliver {'it' if len(left_out) == 1 else 'them'}: {reasons}. Name the fields you want with fields=(…) to "
        f"open without this warning, or ignore penstock.FieldsLeftOut"
    )


def open_raw(
    path: Path | Iterable[Path],
    dtype: Any,
    shape: Sequence[int] = (),
    *,
    offset: int = 0,
    field: str = "data",
    max_open_files: int | None = None,
    manifest: Path | None = None,
) -> Dataset:
    """Open raw binary files: rows one after another, without a header. ``dtype`` and ``shape`` are those of one row.

    path:            as for ``open``; each file has as many rows as fit
    offset:          bytes before the first row of each file
    manifest:        as for ``open``
    """
    row = raw.row_spec(dtype, shape)
    files = Files(max_open_files, manifest=None if manifest is None else load(checks.path("manifest", manifest)))
    offset = checks.whole("offset", offset, expected="a number of bytes")
    if not isinstance(field, str):
        raise ConfigError(f"field={checks.shown(field)}: expected a name")
    paths = paths_of(path if isinstance(path, str | os.PathLike) else _check_paths("path", path), files)
    stores = [raw.open_file(each, field, row, offset, files) for each in paths]
    store = stores[0] if len(stores) == 1 else Concat(stores)
    if len(store) == 0:
        raise ConfigError(f"no samples in {paths[0] if len(paths) == 1 else f'any of {len(paths)} files'}")
    return Dataset(store)


def _make_absolute(path: Path | Iterable[Path]) -> str | tuple[str, ...]:
    """The paths or patterns, independent of the working directory, so that ``refresh`` finds the same files."""
    if not isinstance(path, str | os.PathLike):
        return tuple(make_absolute(os.fspath(each)) for each in path)
    name = os.fspath(path)
    if name.startswith("{") and not os.path.exists(name):  # each alternative may be absolute
        return tuple(map(make_absolute, expand_pattern(name)))
    return make_absolute(name)


class _Opened(Dataset):
    """A dataset that ``open`` returned, which can open itself again."""

    def __init__(self, path: Path | Sequence[Path], options: OpenOptions) -> None:
        options = replace(options, fields_left_out={})  # collected anew
        self._path, self._options = path, options
        left_out: list[DataError | SourceError] = []
        paths = paths_of(path, options.files, left_out)
        asked_for = len(paths) + len(left_out)
        if paths and is_remote(paths[0]):
            options.files.compare_addresses(paths)
        stores: list[StoreBase] = []
        empty: list[NoSamples] = []
        for each in paths:
            if options.files.max_open is not None and not is_remote(each):
                options.files.close()  # parsing the next one takes a handle outside the pool
            try:
                stores.append(as_base(_open_store(each, options)))
                left_out += stores[-1].left_out
            except NoSamples as error:
                empty.append(error)
            except (DataError, SourceError) as error:
                left_out.append(error)
                if options.on_error == "raise" and isinstance(error, SourceError):
                    break  # each further file would wait for the same timeout
        if not stores:
            left_out += empty
        if left_out and options.on_error == "raise":
            raise _merge_errors(left_out, asked_for)
        if not stores:
            raise ConfigError(f"none of {len(left_out)} files could be opened; the first error: {left_out[0]}")
        store = stores[0] if len(stores) == 1 else Concat(stores)
        if len(store) == 0:
            raise ConfigError(f"no samples in {paths[0] if len(paths) == 1 else f'any of {len(paths)} files'}")
        super().__init__(store, None, [*left_out, *empty], None, options.fields_left_out)

    def refresh(self) -> Dataset:
        return _Opened(self._path, self._options)


def source_of(ds: Dataset) -> Any:
    """The path that a dataset was opened from; None if it was made of other datasets."""
    return ds._path if isinstance(ds, _Opened) else None


def _open_store(path: str, options: OpenOptions) -> Store:
    def opened() -> Store:
        found = format_of(path, options.files)
        if not found.reads_itself:
            options.files.compare_whole(path)
        _check_can_have_axis(path, found, options)
        return found.open(path, options)

    store = retry_library(path, opened)
    _check_names_of_axes(path, store, options)
    if len(store) > MOST_EMPTY_ROWS and not any(spec.is_list or spec.row_bytes for spec in store.fields.values()):
        raise LimitExceeded(
            f"{path}: declares {len(store):,} rows without any value; no more than {MOST_EMPTY_ROWS:,} are read. The "
            f"file is damaged: fetch it again"
        )
    return store


def _check_can_have_axis(path: str, found: Format, options: OpenOptions) -> None:
    if options.row_axis and not found.has_row_axis:
        raise ConfigError(
            f"{path}: row_axis={options.row_axis!r}: files of this kind ({found.name}) have their samples along one "
            f"axis only. Leave out row_axis"
        )


def _check_names_of_axes(path: str, store: Store, options: OpenOptions) -> None:
    """Refuse a misspelled name: its field would be read along another axis than the one that was meant."""
    for name in options.row_axis if isinstance(options.row_axis, Mapping) else ():
        if name not in store.fields and name not in options.fields_left_out:
            raise ConfigError(f"row_axis: {path} has no field {name!r} among {', '.join(map(repr, store.fields))}")


def _check_paths(argument: str, given: Any) -> tuple[str, ...]:
    if isinstance(given, str | bytes | os.PathLike | Mapping) or not isinstance(given, Iterable):
        raise ConfigError(f"{argument}={checks.shown(given)}: expected paths, such as [{checks.shown(given)}]")
    return tuple(checks.path(f"{argument}[{number}]", each) for number, each in enumerate(given))


def _check_names(given: Any) -> tuple[str, ...]:
    names = checks.names("fields", given)
    if not names:
        raise ConfigError(f"fields={checks.shown(given)}: expected at least one name, or None for all fields")
    return names


def _check_axes(given: Any) -> int | dict[str, int]:
    if not isinstance(given, Mapping):
        return checks.whole("row_axis", given, least=None)
    return {name: checks.whole(f"row_axis[{name!r}]", axis, least=None) for name, axis in given.items()}


def _make_member_options(size: Any, fit: Fit, max_pixels: int, decoders: Decoders | None) -> MemberOptions:
    sides = [size, size] if checks.is_whole(size) else size
    if sides is not None and not (
        isinstance(sides, tuple | list) and len(sides) == 2 and all(checks.is_whole(s) and s > 0 for s in sides)
    ):
        raise ConfigError(f"size={checks.shown(size)}: expected (height, width), or one number for both")
    checks.one_of("fit", fit, get_args(Fit))
    wanted_size = None if sides is None else (int(sides[0]), int(sides[1]))
    if decoders is not None and not (isinstance(decoders, Mapping) and all(isinstance(name, str) for name in decoders)):
        raise ConfigError(f"decoders={checks.shown(decoders)}: expected a dict, by extension or field")
    own = {name.lstrip("."): decoder_of(each) for name, each in (decoders or {}).items()}
    return MemberOptions(wanted_size, fit, checks.whole("max_pixels", max_pixels, least=1), decoders=own)


def _merge_errors(errors: Sequence[DataError | SourceError], files: int) -> DataError | SourceError:
    """One error for all files that cannot be opened, of the kind of the first."""
    first, *others = errors
    if not others:
        return first
    shown = "; ".join(f"{error!s:.200}" for error in others[: NAMED_FAILURES - 1])
    more = f"; and {len(errors) - NAMED_FAILURES} more" if len(errors) > NAMED_FAILURES else ""
    return type(first)(
        f'{first}. {len(errors)} of {files} files cannot be opened (on_error="skip" leaves them out); the others: '
        f"{shown}{more}"
    )
