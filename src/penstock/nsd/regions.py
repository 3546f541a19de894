"""Which voxels: regions by name, by file or by mask, in NIfTI order, and back into a volume.

Files of regions hold -1 where there is no cortex, 0 outside the region and the number of a label inside: ``> 0``, never
``astype(bool)``. The order of voxels is that of ``nifti[mask]`` (x slowest), unless HDF5's (z slowest) is asked for.
"""

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from penstock.errors import ConfigError, Corrupt, Missing, SchemaMismatch
from penstock.nsd.layout import Layout
from penstock.nsd.outside import load_nifti
from penstock.store import digest

Region = str | os.PathLike[str] | np.ndarray | Sequence[Any] | None
Order = Literal["nifti", "hdf5"]

KNOWN_LABELS = {
    "prf-visualrois": ("Unknown", "V1v", "V1d", "V2v", "V2d", "V3v", "V3d", "hV4"),
    "streams": ("Unknown", "early", "midventral", "midlateral", "midparietal", "ventral", "lateral", "parietal"),
}
"""For roots without the tables of labels, which lie in another folder of the release."""

HALVES = ("v", "d")
"""V1 is V1v and V1d, its ventral and dorsal halves."""


@dataclass(frozen=True, eq=False)
class Voxels:
    """The voxels of a dataset, in the order in which they come."""

    name: str
    shape: tuple[int, int, int]
    """X, Y, Z of the volume."""
    index: np.ndarray = field(repr=False)
    """Their numbers in C order over (X, Y, Z)."""

    def __len__(self) -> int:
        return len(self.index)

    @property
    def coordinates(self) -> np.ndarray:
        """(voxels, 3): x, y, z of each."""
        return np.stack(np.unravel_index(self.index, self.shape), axis=1)

    @property
    def mask(self) -> np.ndarray:
        """(X, Y, Z): whether each voxel of the volume is one of them."""
        return self.volume(np.ones(len(self), bool), empty=False)

    @property
    def key(self) -> str:
        """Names and digests them: other voxels have another key."""
        label = "".join(letter if letter.isalnum() else "-" for letter in self.name)
        return f"{label}-{digest(self.shape, self.index.tobytes())}"

    def volume(self, values: np.ndarray, empty: Any = 0) -> np.ndarray:
        """Values of the voxels, put back where they are in (X, Y, Z)."""
        if np.shape(values) != (len(self),):
            raise ConfigError(f"volume: values of shape {np.shape(values)} for {len(self):,} voxels: one for each")
        whole = np.full(self.shape, empty, np.asarray(values).dtype)
        whole.reshape(-1)[self.index] = values
        return whole


def find_voxels(layout: Layout, region: Region, min_ncsnr: float | None, order: Order) -> Voxels | None:
    """The voxels of a region; None for the whole volume."""
    if order not in ("nifti", "hdf5"):
        raise ConfigError(f'voxel_order={order!r}: expected "nifti" or "hdf5"')
    if region is None and min_ncsnr is None:
        return None
    mask = None if region is None else _mask(layout, region)
    name = "brain" if region is None else _name(region)
    if min_ncsnr is not None:
        ceiling = load_nifti(layout.noise_ceiling)
        good = np.nan_to_num(ceiling, nan=-np.inf) >= min_ncsnr
        if mask is not None and mask.shape != good.shape:
            raise SchemaMismatch(f"{layout.noise_ceiling}: shape {good.shape}, but the region has {mask.shape}")
        mask = good if mask is None else mask & good
        name = f"{name}, ncsnr from {min_ncsnr}"
    assert mask is not None
    if not mask.any():
        raise ConfigError(f"roi={name!r}: selects no voxel at all")
    x, y, z = mask.shape
    if order == "nifti":
        index = np.flatnonzero(mask)
    else:
        index = np.arange(mask.size).reshape(mask.shape).T[mask.T]
        name = f"{name}, hdf5 order"
    return Voxels(name, (x, y, z), index)


def volume_shape(layout: Layout) -> tuple[int, ...] | None:
    """X, Y, Z as any volume of the subject tells it; None where there is none."""
    for path in (layout.brainmask, *sorted(glob.glob(os.path.join(glob.escape(layout.regions), "*.nii.gz")))):
        if os.path.isfile(path):
            return load_nifti(path).shape
    return None


def region_names(layout: Layout) -> dict[str, tuple[str, ...]]:
    """Every region that there is a file of, and the names of its labels."""
    paths = sorted(glob.glob(os.path.join(glob.escape(layout.regions), "*.nii.gz")))
    files = [os.path.basename(path).removesuffix(".nii.gz") for path in paths]
    return {name: tuple(label for label in _labels(layout, name).values() if label != "Unknown") for name in files}


def _name(region: Region) -> str:
    if isinstance(region, str | os.PathLike):
        return os.path.basename(os.fspath(region)).removesuffix(".gz").removesuffix(".nii")
    if isinstance(region, np.ndarray):
        return "mask"
    return "+".join(_name(each) for each in region or ())


def _mask(layout: Layout, region: Any) -> np.ndarray:
    """(X, Y, Z) of booleans."""
    if isinstance(region, str | os.PathLike):
        return _named(layout, os.fspath(region))
    if isinstance(region, list | tuple):
        masks = [_mask(layout, each) for each in region]
        if not masks or len({mask.shape for mask in masks}) > 1:
            raise ConfigError(f"roi={region!r}: expected at least one region, and all of one shape")
        return np.asarray(np.logical_or.reduce(masks))
    mask = np.asarray(region)
    if mask.ndim != 3 or mask.dtype != bool:
        raise ConfigError(
            f"roi: an array of {mask.dtype} and shape {mask.shape}: expected booleans of shape (X, Y, Z). Labels "
            f"become booleans by a comparison, such as labels > 0 (-1 stands for voxels outside the cortex)"
        )
    expected = volume_shape(layout)
    if expected is not None and mask.shape != expected:
        transposed = "; it is transposed, as HDF5 sees volumes: pass mask.T" if mask.shape == expected[::-1] else ""
        raise ConfigError(f"roi: a mask of shape {mask.shape}, but volumes are (X, Y, Z) = {expected}{transposed}")
    return mask


def _named(layout: Layout, name: str) -> np.ndarray:
    if os.path.isfile(name):
        return load_nifti(name) > 0
    if name == "brainmask":
        return load_nifti(layout.brainmask) > 0
    file, _, label = name.partition(":")
    path = os.path.join(layout.regions, f"{file}.nii.gz")
    if os.path.isfile(path):
        volume = load_nifti(path)
        return np.isin(volume, _numbers(layout, file, label)) if label else volume > 0
    if not label:
        homes = {each: wanted for each in region_names(layout) if (wanted := _matching(_labels(layout, each), name))}
        if len(homes) == 1:
            ((file, wanted),) = homes.items()
            return np.isin(load_nifti(os.path.join(layout.regions, f"{file}.nii.gz")), wanted)
        if homes:
            told = ", ".join(repr(f"{home}:{name}") for home in homes)
            raise ConfigError(f"roi={name!r}: a label of several regions; say which: {told}")
    raise Missing(f"roi={name!r}: no such region. {_there(layout)}")


def _there(layout: Layout) -> str:
    found = region_names(layout)
    if not found:
        return (
            f"There is no file of regions in {layout.regions}; fetch that folder of the release, or pass the path of a "
            f"NIfTI file, or booleans of shape (X, Y, Z)"
        )
    told = "; ".join(f"{name} ({', '.join(labels)})" if labels else name for name, labels in found.items())
    return f"There are: {told}. A label alone will do (V1), or region:label, a path, or booleans of shape (X, Y, Z)"


def _numbers(layout: Layout, file: str, label: str) -> list[int]:
    labels = _labels(layout, file)
    if label.isdecimal():
        return [int(label)]
    wanted = _matching(labels, label)
    if not wanted:
        told = ", ".join(labels.values()) or f"unknown here, for want of {layout.label_tables(file)[0]}"
        raise Missing(f"roi='{file}:{label}': no such label. Labels of {file}: {told}; a number will do too")
    return wanted


def _matching(labels: dict[int, str], name: str) -> list[int]:
    """The label of this name, or its halves."""
    exact = [number for number, label in labels.items() if label == name]
    return exact or [number for number, label in labels.items() if label in {f"{name}{half}" for half in HALVES}]


def _labels(layout: Layout, region: str) -> dict[int, str]:
    """Numbers of labels -> their names."""
    plain = region.removeprefix("lh.").removeprefix("rh.")
    for path in layout.label_tables(plain):
        if os.path.isfile(path):
            return _parsed(path)
    return dict(enumerate(KNOWN_LABELS.get(plain, ())))


def _parsed(path: str) -> dict[int, str]:
    """Lines of a number and a name; colours may follow."""
    found = {}
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) < 2 or not words[0].lstrip("-").isdecimal():
                raise Corrupt(f"{path}: {line.strip()[:80]!r}: expected a number and a name on each line")
            found[int(words[0])] = words[1]
    return found
