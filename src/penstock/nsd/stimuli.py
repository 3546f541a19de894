"""What was shown, by the picture's number from 0: pictures from HDF5 or a folder, and further rows for each picture."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.dataset import Dataset, from_arrays
from penstock.errors import ConfigError, Corrupt, Missing
from penstock.nsd.layout import COCO_224, Layout
from penstock.nsd.outside import needed
from penstock.nsd.picturefiles import PictureFiles
from penstock.opening import open
from penstock.urls import is_remote

BRICK, SMALL = "imgBrick", "images"
NUMBERED = re.compile(r"(?:.*_)?nsd(\d+)\.\w+|(\d+)\.\w+")


@dataclass(frozen=True)
class Pictures:
    """How pictures are wanted.

    source:  an HDF5 file, a folder of files named by number, or None for what the root has
    size:    height and width; resized (bilinear, antialiased) where they are stored in another
    dtype:   "uint8" from 0 to 255, or a float from 0 to 1; None for as stored
    """

    source: str | os.PathLike[str] | None = None
    size: int | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Found:
    """Pictures of shape (3, height, width), and the row of each number; -1 where there is none."""

    pictures: Dataset
    rows: np.ndarray
    path: str


def find_pictures(layout: Layout, wanted: Pictures, options: Mapping[str, Any]) -> Found:
    """The pictures, as wanted."""
    path = _source(layout) if wanted.source is None else os.fspath(wanted.source)
    if os.path.isdir(path):
        pictures, rows = _folder(path, wanted.size)
    elif os.path.isfile(path) or is_remote(path):
        pictures = _brick(path, options if is_remote(path) else {})
        rows = np.arange(len(pictures))
    else:
        raise Missing(f"images: {path}: no such file or folder")
    return Found(_as_wanted(pictures, wanted), rows, path)


def _source(layout: Layout) -> str:
    looked = [layout.stimuli, os.path.join(layout.root, os.path.basename(layout.stimuli))]
    looked.append(os.path.join(layout.root, COCO_224))
    for path in looked:
        if os.path.isfile(path):
            return path
    raise Missing(
        f"no pictures: neither {looked[0]} nor {COCO_224} in {layout.root} is there. Fetch one of them, pass "
        f'images="a/folder" or images="a/file.hdf5", or ask for columns without "image"'
    )


def _brick(path: str, options: Mapping[str, Any]) -> Dataset:
    """``image``, as stored; channels last or first."""
    for name in (BRICK, SMALL):
        try:
            return open(path, fields=[name], **options).rename(image=name)
        except Missing:
            continue
    raise Missing(f"{path}: neither {BRICK!r} (the release's) nor {SMALL!r} (MindEye2's) is in it")


def _folder(path: str, size: int | None) -> tuple[Dataset, np.ndarray]:
    found = {}
    for name in sorted(os.listdir(path)):
        if matched := NUMBERED.fullmatch(name):
            # shared0001_nsd02951.png counts from 1, as the release does there; a bare number is a stim_id, from 0.
            number = int(matched[1]) - 1 if matched[1] else int(matched[2])
            found[number] = os.path.join(path, name)
    if not found:
        raise Missing(f"images: {path}: no file named by a number in it (shared0001_nsd02951.png, or 2950.png)")
    rows = np.full(max(found) + 1, -1, np.int64)
    rows[list(found)] = np.arange(len(found))
    return Dataset(PictureFiles(list(found.values()), size)), rows


def _as_wanted(pictures: Dataset, wanted: Pictures) -> Dataset:
    shape, stored = pictures.fields["image"].shape, pictures.fields["image"].dtype
    last = shape[-1] in (1, 3)
    size = shape[:2] if last else shape[1:]
    if wanted.size is not None and size != (wanted.size, wanted.size):
        pictures = pictures.map(Resize(wanted.size, last))
    if wanted.dtype is not None and np.dtype(wanted.dtype) != stored:
        if np.dtype(wanted.dtype).kind != "f":
            raise ConfigError(f"images: dtype={wanted.dtype!r}: they are stored as {stored}; expected that, or a float")
        divisor = 255 if stored == np.uint8 else 1
        pictures = pictures.cast("image", wanted.dtype, divisor=divisor)
    return pictures.permute("image", 2, 0, 1) if last else pictures


class Resize:
    """Pictures of a read, one by one, by Pillow."""

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
    """One row a picture from an array, .npy, HDF5 or .json, and the rows of these pictures."""
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
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Missing(f"extra: {path}: no such file") from None
    except ValueError as error:
        raise Corrupt(f"extra: {path}: not JSON ({error})") from error


def _keyed(name: str, values: Mapping[Any, Any], stimuli: np.ndarray) -> tuple[Dataset, np.ndarray]:
    """Numbers, arrays or texts by stim_id; texts become UTF-8 padded with zeros, see ``text``."""
    by_number = {int(key): value for key, value in values.items()}
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
    """The text of one row of a field that was made of texts."""
    return bytes(np.asarray(row, np.uint8)).rstrip(b"\0").decode()
