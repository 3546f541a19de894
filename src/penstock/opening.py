"""``open``: files of any known format as one dataset."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from penstock import index
from penstock.combine import Concat
from penstock.dataset import Dataset, OnError, check_on_error
from penstock.errors import ConfigError, DataError, SourceError
from penstock.fileio import MAX_OPEN_FILES, Files, remote_files
from penstock.formats import raw
from penstock.formats.registry import OpenOptions, format_of
from penstock.kinds import MAX_MEMBER_BYTES, Decoders, Wanted, decoder_of
from penstock.manifest import load
from penstock.packing import MAX_EXPANSION
from penstock.paths import Path, paths_of
from penstock.pictures import MAX_PIXELS, Fit
from penstock.sizes import parse_size
from penstock.steady import steadily
from penstock.store import Store
from penstock.urls import is_remote

if TYPE_CHECKING:
    from penstock.remote import RemoteOptions

# So many of the files that cannot be opened are named.
NAMED_FAILURES = 10


def open(
    path: Path | Iterable[Path],
    fields: Sequence[str] | None = None,
    *,
    row_axis: int | Mapping[str, int] = 0,
    max_open_files: int = MAX_OPEN_FILES,
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
    ``"train-{000..017}.tar"``, or a list of them. They may lie on other machines: ``"https://…/train-{000..017}.tar"``,
    ``"s3://bucket/*.h5"``.

    Several files follow each other as given; the files of a pattern in natural order (session 2 before session 10).

    fields:          the fields to read; all by default
    row_axis:        the axis of HDF5 and Zarr arrays along which samples lie; a dict where fields differ
    max_open_files:  data files held open at once, by all threads together; 0 opens a file for each request
    allow_fill:      take the fill value for chunks that were never written, and count them in ``Loader.stats``; they
                     are an error otherwise, for a lost one looks the same
    allow_external:  folders that an HDF5 file may take data from besides its own: virtual datasets, external storage
    swmr:            read HDF5 files that are still being written, as long as they are now; see ``Dataset.refresh``
    on_error:        "skip" leaves out files that cannot be opened, and lists why in ``Dataset.left_out``
    index_dir:       where tables of many chunks are kept between runs: a folder, False for nowhere, None for the
                     user's cache folder (or $PENSTOCK_CACHE)
    cache_dir:       a folder for whole copies of files on other machines, shared by all processes that name it; None
                     reads ranges over the network
    cache_bytes:     how much that folder may hold ("200GB"); None for as much as the disk does
    remote:          how patient to be with servers: ``penstock.remote.RemoteOptions``
    manifest:        what ``penstock verify … --write`` wrote of these files: each block is held against its digest when
                     it is first read, and files that the manifest does not list are refused
    size:            bring pictures of any size to this one: (height, width), or one number for both
    fit:             how: "resize" stretches, "cover" scales and cuts off what stands out, "crop" cuts out the middle
    max_pixels:      pictures that declare more are refused before they are decoded
    max_member_bytes:  files of an archive, of a folder or in a database that have more are refused before they are read
    max_expansion:   compressed files that expand to more than so many times their size are refused
    decoders:        your own by extension or field, where samples are files: ``{"pfm": read_pfm}``, a function of the
                     bytes. What makes arrays of one shape gives arrays, anything else lists. Or by name: "bytes",
                     "text", "json", "array" (npy of any shape) or "arrays" (npz), which give lists. Or what plain
                     bytes are an array of: ``{"vector": "float32"}``, ``{"patch": ("uint8", (64, 64))}``
    """
    if isinstance(fields, str):
        raise ConfigError(f"fields={fields!r}: expected a tuple of names, such as ({fields!r},)")
    check_on_error(on_error)
    if swmr and manifest is not None:
        raise ConfigError("swmr=True, manifest=…: a file that is being written has none; leave out one of the two")
    folder = None if index_dir is False else index.default_folder() if index_dir is None else os.fspath(index_dir)
    options = OpenOptions(
        None if fields is None else tuple(fields),
        allow_fill,
        remote_files(
            cache_dir,
            cache_bytes,
            remote,
            max_open=max_open_files,
            manifest=None if manifest is None else load(manifest),
            max_expansion=max_expansion,
        ),
        row_axis,
        swmr,
        on_error,
        folder,
        tuple(os.fspath(each) for each in allow_external),
        replace(
            _wanted(size, fit, max_pixels, decoders),
            max_member_bytes=parse_size(max_member_bytes, argument="max_member_bytes"),
        ),
    )
    return _Opened(path if isinstance(path, str | os.PathLike) else tuple(path), options)


def open_raw(
    path: Path | Iterable[Path],
    dtype: Any,
    shape: Sequence[int] = (),
    *,
    offset: int = 0,
    field: str = "data",
    max_open_files: int = MAX_OPEN_FILES,
    manifest: Path | None = None,
) -> Dataset:
    """Files that hold rows one after another and say nothing of themselves: dtype and shape are those of one row.

    path:            as ``open`` takes it; each file has as many rows as fit
    offset:          bytes before the first row, in each file
    manifest:        as ``open`` takes it
    """
    row = raw.row_spec(dtype, shape)
    files = Files(max_open_files, manifest=None if manifest is None else load(manifest))
    if not isinstance(offset, int) or offset < 0:
        raise ConfigError(f"offset={offset!r}: expected a number of bytes, 0 or more")
    paths = paths_of(path if isinstance(path, str | os.PathLike) else tuple(path), files)
    stores = [raw.open_file(each, field, row, offset, files) for each in paths]
    store = stores[0] if len(stores) == 1 else Concat(stores)
    if len(store) == 0:
        raise ConfigError(f"no samples in {paths[0] if len(paths) == 1 else f'any of {len(paths)} files'}")
    return Dataset(store)


class _Opened(Dataset):
    """A dataset as ``open`` gave it, which knows how to open itself again."""

    def __init__(self, path: Path | Sequence[Path], options: OpenOptions) -> None:
        self._path, self._options = path, options
        left_out: list[DataError | SourceError] = []
        paths = paths_of(path, options.files, left_out)
        asked_for = len(paths) + len(left_out)
        files = options.files
        if files.manifest is not None and paths and is_remote(paths[0]):
            files.manifest = files.manifest.of_addresses(paths)
        stores = []
        for each in paths:
            try:
                stores.append(_open_store(each, options))
                left_out += getattr(stores[-1], "left_out", ())  # files of a folder
            except (DataError, SourceError) as error:
                left_out.append(error)
                if options.on_error == "raise" and isinstance(error, SourceError):
                    break  # whoever asks again waits again
        if left_out and options.on_error == "raise":
            raise _refusal(left_out, asked_for)
        if not stores:
            raise ConfigError(f"no file could be opened, of {len(left_out)}: the first said: {left_out[0]}")
        store = stores[0] if len(stores) == 1 else Concat(stores)
        if len(store) == 0:
            raise ConfigError(f"no samples in {paths[0] if len(paths) == 1 else f'any of {len(paths)} files'}")
        super().__init__(store, None, left_out)

    def refresh(self) -> Dataset:
        return _Opened(self._path, self._options)


def _open_store(path: str, options: OpenOptions) -> Store:
    def opened() -> Store:
        found = format_of(path, options.files)
        if not found.reads_itself:
            options.files.compare_whole(path)
        return found.open(path, options)

    return steadily(path, opened)


def _wanted(size: Any, fit: Fit, max_pixels: int, decoders: Decoders | None) -> Wanted:
    sides = [size, size] if isinstance(size, int) else size
    if sides is not None and not (
        isinstance(sides, tuple | list) and len(sides) == 2 and all(isinstance(s, int) and s > 0 for s in sides)
    ):
        raise ConfigError(f"size={size!r}: expected (height, width), or one number for both")
    if fit not in get_args(Fit):
        raise ConfigError(f"fit={fit!r}: expected one of {', '.join(map(repr, get_args(Fit)))}")
    wanted_size = None if sides is None else (sides[0], sides[1])
    own = {name.lstrip("."): decoder_of(each) for name, each in (decoders or {}).items()}
    return Wanted(wanted_size, fit, max_pixels, decoders=own)


def _refusal(errors: Sequence[DataError | SourceError], files: int) -> DataError | SourceError:
    """One error for all files that cannot be opened: of the first one's kind, which begins it."""
    first, *others = errors
    if not others:
        return first
    told = "; ".join(f"{error!s:.200}" for error in others[: NAMED_FAILURES - 1])
    more = f"; and {len(errors) - NAMED_FAILURES} more" if len(errors) > NAMED_FAILURES else ""
    return type(first)(
        f'{first}. {len(errors)} of {files} files cannot be opened (on_error="skip" leaves them out); the others: '
        f"{told}{more}"
    )
