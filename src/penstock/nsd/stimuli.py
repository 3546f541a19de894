"""What was shown, by the picture's number from 0: pictures from HDF5 or a folder, and further arrays by picture."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.base import checks
from penstock.base.dataclass import dataclass
from penstock.base.dtypes import checked_dtype, is_float
from penstock.base.urls import is_remote
from penstock.dataset.composition import from_arrays
from penstock.dataset.dataset import Dataset
from penstock.dataset.store import Out, Store, Wrapper, digest
from penstock.errors import ConfigError, Corrupt, Missing, Unavailable
from penstock.files.files import Files
from penstock.files.retry import open_for_parser
from penstock.formats.open import open, open_with
from penstock.nsd.layout import COCO_224, SubjectLayout
from penstock.nsd.libraries import needed

BRICK, SMALL = "imgBrick", "images"
NUMBERED = re.compile(r"(?:.*_)?nsd(\d+)\.\w+|(\d+)\.\w+")
HASHED_FILES = 4096
"""Files of a folder whose names and sizes go into its fingerprint, evenly spread."""


@dataclass(frozen=True)
class Pictures:
    """How pictures are delivered.

    source:  an HDF5 file, a folder of files named by number, or None for the file in the root
    size:    height and width; pictures of another size are resized (bilinear, antialiased). None delivers them as
             stored: 425 pixels in the release
    dtype:   "uint8" from 0 to 255, or a float from 0 to 1; None delivers them as stored
    """

    source: str | os.PathLike[str] | None = None
    size: int | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.source is not None and not isinstance(self.source, str | os.PathLike):
            raise ConfigError(
                f"images={checks.shown(self.source)}: expected where pictures are, or how they are delivered, such as "
                f'Pictures(size=224, dtype="float32")'
            )
        if self.size is not None:
            checks.whole("images: size", self.size, least=1)


@dataclass(frozen=True)
class Found:
    """Pictures of shape (3, height, width), and the row of each number; -1 where there is none."""

    pictures: Dataset
    rows: np.ndarray
    path: str


def find_pictures(layout: SubjectLayout, wanted: Pictures, files: Files) -> Found:
    """The pictures, with the size and dtype asked for."""
    path = _source(layout) if wanted.source is None else os.fspath(wanted.source)
    if os.path.isdir(path):
        pictures, rows = _folder(path, wanted.size, files)
    elif os.path.isfile(path) or is_remote(path):
        pictures = _brick(path, files)
        rows = np.arange(len(pictures))
    else:
        raise Missing(f"images: {path}: no such file or folder")
    return Found(_converted(pictures, wanted), rows, path)


def _source(layout: SubjectLayout) -> str:
    looked = [layout.stimuli, os.path.join(layout.root, os.path.basename(layout.stimuli))]
    looked.append(os.path.join(layout.root, COCO_224))
    for path in looked:
        if os.path.isfile(path):
            return path
    raise Missing(
        f"no pictures: neither {looked[0]} nor {COCO_224} in {layout.root} is there. Fetch one of them, pass "
        f'images="a/folder" or images="a/file.hdf5", or ask for columns without "image"'
    )


def _brick(path: str, files: Files) -> Dataset:
    """``image``, as stored; channels last or first."""
    for name in (BRICK, SMALL):
        try:
            return open_with(files, path, [name]).rename(image=name)
        except Missing:
            continue
    raise Missing(f"{path}: has neither {BRICK!r} (the release's name) nor {SMALL!r} (MindEye2's)")


def _folder(path: str, size: int | None, files: Files) -> tuple[Dataset, np.ndarray]:
    """Pictures named by number: ``shared0001_nsd02951.png`` counts from 1, as the release does; ``2950.png`` from 0."""
    whole = open_with(files, path, ["image"], size=size)
    found: dict[int, tuple[str, int]] = {}
    for row in range(len(whole)):
        file = os.path.join(path, whole.keys[row])
        if matched := NUMBERED.fullmatch(os.path.basename(file)):
            number = int(matched[1]) - 1 if matched[1] else int(matched[2])
            if number in found:
                raise ConfigError(f"images: {found[number][0]} and {file}: both are picture {number}; keep one of them")
            found[number] = file, row
    if not found:
        raise Missing(f"images: {path}: no picture in it is named by a number (shared0001_nsd02951.png, or 2950.png)")
    rows = np.full(max(found) + 1, -1, np.int64)
    rows[list(found)] = np.arange(len(found))
    chosen = whole.select([row for _, row in found.values()])
    return Dataset(NumberedPictures(chosen.store, [file for file, _ in found.values()], size)), rows


class NumberedPictures(Wrapper):
    """Pictures of a folder, with the fingerprint that earlier versions saved in states."""

    def __init__(self, store: Store, paths: Sequence[str], size: int | None) -> None:
        super().__init__(store)
        hashed = paths[:: max(1, len(paths) // HASHED_FILES)]
        about = [(os.path.basename(path), os.stat(path).st_size) for path in hashed]
        self._fingerprint = digest("pictures", size, len(paths), about)

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        self.store.read_into(rows, at, out)


def _converted(pictures: Dataset, wanted: Pictures) -> Dataset:
    shape, stored = pictures.fields["image"].shape, pictures.fields["image"].dtype
    last = shape[-1] in (1, 3)
    size = shape[:2] if last else shape[1:]
    if wanted.size is not None and size != (wanted.size, wanted.size):
        pictures = pictures.map(Resize(wanted.size, last))
    dtype = stored if wanted.dtype is None else checked_dtype(wanted.dtype, argument="images: dtype")
    if dtype != stored:
        if not is_float(dtype):
            raise ConfigError(f"images: dtype={wanted.dtype!r}: they are stored as {stored}; expected that, or a float")
        divisor = 255 if stored == np.uint8 else 1
        pictures = pictures.cast("image", dtype, divisor=divisor)
    return pictures.permute("image", 2, 0, 1) if last else pictures


class Resize:
    """Resizes the pictures of a read, one by one, with Pillow."""

    def __init__(self, size: int, channels_last: bool) -> None:
        self.size, self.channels_last = size, channels_last

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        images, size = batch["image"], self.size
        shape = (size, size, images.shape[3]) if self.channels_last else (images.shape[1], size, size)
        made = np.empty((len(images), *shape), images.dtype)
        for picture, goal in zip(images, made, strict=True):
            if self.channels_last and picture.dtype == np.uint8:
                goal[:] = _resized(picture, size)
            else:
                planes = np.moveaxis(picture, -1, 0) if self.channels_last else picture
                for channel, plane in enumerate(planes):
                    small = _resized(plane if plane.dtype == np.uint8 else plane.astype(np.float32), size)
                    goal[(..., channel) if self.channels_last else channel] = small
        return {"image": made}


def _resized(pixels: np.ndarray, size: int) -> np.ndarray:
    images = needed("PIL.Image")
    return np.asarray(images.fromarray(np.ascontiguousarray(pixels)).resize((size, size), images.Resampling.BILINEAR))


def find_extra(name: str, given: Any, stimuli: np.ndarray) -> tuple[Dataset, np.ndarray]:
    """One row per picture from an array, .npy, HDF5 or .json, and the rows of these pictures."""
    if isinstance(given, str | os.PathLike) and os.fspath(given).endswith(".json"):
        given = _json(os.fspath(given))
    if isinstance(given, Mapping):
        return _keyed(name, given, stimuli)
    dataset = open(given) if isinstance(given, str | os.PathLike) else given
    if not isinstance(dataset, Dataset):
        dataset = from_arrays(**{name: given})
    if len(dataset.fields) != 1:
        fields = ", ".join(dataset.fields)
        raise ConfigError(f"extra: {name!r}: has fields {fields}; choose one: penstock.open(…).only(…)")
    if len(dataset) <= stimuli.max():
        raise ConfigError(
            f"extra: {name!r}: has {len(dataset):,} rows, but picture {stimuli.max()} was shown: expected one row for "
            f"each stim_id, or a dict of them"
        )
    return dataset, stimuli


def _json(path: str) -> Any:
    try:
        with open_for_parser(path) as file:
            return json.load(file)
    except Unavailable as error:
        raise Missing(f"extra: {error}") from None
    except ValueError as error:
        raise Corrupt(f"extra: {path}: not JSON ({error})") from error


def _keyed(name: str, values: Mapping[Any, Any], stimuli: np.ndarray) -> tuple[Dataset, np.ndarray]:
    """Numbers, arrays or texts by stim_id; texts become UTF-8 padded with zeros, see ``text``."""
    try:
        by_number = {int(key): value for key, value in values.items()}
    except (TypeError, ValueError):
        raise ConfigError(
            f"extra: {name!r}: keys {list(values)[:3]!r}: expected the numbers of pictures (stim_id)"
        ) from None
    shown = np.unique(stimuli)
    absent = [int(number) for number in shown if int(number) not in by_number]
    if absent:
        raise Missing(f"extra: {name!r}: nothing for {len(absent):,} pictures that were shown, the first {absent[:5]}")
    chosen = [by_number[int(number)] for number in shown]
    if any(isinstance(value, str) for value in chosen):
        encoded = [str(value).encode() for value in chosen]
        array = np.zeros((len(encoded), max(1, max(map(len, encoded)))), np.uint8)
        for line, word in zip(array, encoded, strict=True):
            line[: len(word)] = np.frombuffer(word, np.uint8)
    else:
        try:
            array = np.array(chosen)
        except ValueError as error:
            raise ConfigError(f"extra: {name!r}: values differ in shape ({error}); pad them") from None
    return from_arrays(**{name: array}), np.searchsorted(shown, stimuli)


def text(row: Any) -> str:
    """The text in one row of a field that was made of texts."""
    return bytes(np.asarray(row, np.uint8)).rstrip(b"\0").decode()
