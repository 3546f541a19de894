"""Which voxels: regions by name, by file or by mask, in NIfTI order, and back into a volume.

Region files hold -1 where there is no cortex, 0 outside the region and the number of a label inside: voxels are those
``> 0``, never ``astype(bool)``. Voxels come in the order of ``nifti[mask]`` (x slowest), or in HDF5's (z slowest).
"""

import glob
import io
import os
from collections.abc import Sequence
from dataclasses import field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from penstock.base import checks
from penstock.base.dataclass import dataclass
from penstock.dataset.store import digest
from penstock.errors import ConfigError, Corrupt, Missing, SchemaMismatch
from penstock.files.retry import open_for_parser
from penstock.nsd.layout import SubjectLayout
from penstock.nsd.libraries import load_nifti, nifti_shape
from penstock.nsd.parsed import parsed

Region = str | os.PathLike[str] | np.ndarray | Sequence[Any] | None
Order = Literal["nifti", "hdf5"]

KNOWN_LABELS = {
    "prf-visualrois": ("Unknown", "V1v", "V1d", "V2v", "V2d", "V3v", "V3d", "hV4"),
    "streams": ("Unknown", "early", "midventral", "midlateral", "midparietal", "ventral", "lateral", "parietal"),
}
"""For roots without the label tables, which are in another folder of the release."""

HALVES = ("v", "d")
"""V1 is V1v and V1d, its ventral and dorsal halves."""
HEMISPHERES = ("lh.", "rh.")
PREFERRED = "prf-visualrois"
"""Of several regions with a label of the same name, the one that a bare name such as V1 means."""


@dataclass(frozen=True, eq=False)
class Voxels:
    """The voxels of a dataset, in the order in which they come."""

    name: str
    shape: tuple[int, int, int]
    """X, Y, Z of the volume."""
    index: np.ndarray = field(repr=False)
    """Their numbers in C order over (X, Y, Z)."""
    source: str = ""
    """The files and labels they come from: ``prf-visualrois.nii.gz: V1v, V1d``."""

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

    @cached_property
    def key(self) -> str:
        """A name that differs for other voxels."""
        label = "".join(letter if letter.isalnum() else "-" for letter in self.name)
        return f"{label}-{digest(self.shape, self.index.tobytes())}"

    def volume(self, values: np.ndarray, empty: Any = 0) -> np.ndarray:
        """Values of the voxels, put back where they are in (X, Y, Z)."""
        if np.shape(values) != (len(self),):
            raise ConfigError(f"volume: values of shape {np.shape(values)} for {len(self):,} voxels: one for each")
        whole = np.full(self.shape, empty, np.asarray(values).dtype)
        whole.reshape(-1)[self.index] = values
        return whole


@dataclass(frozen=True, eq=False)
class _Found:
    """A mask (X, Y, Z), and where it comes from."""

    mask: np.ndarray
    source: str


def find_voxels(layout: SubjectLayout, region: Region, min_ncsnr: float | None, order: Order) -> Voxels | None:
    """The voxels of a region; None for the whole volume."""
    if order not in ("nifti", "hdf5"):
        raise ConfigError(f'voxel_order={order!r}: expected "nifti" or "hdf5"')
    if region is None and min_ncsnr is None:
        return None
    found = None if region is None else _find(layout, region)
    name = "brain" if region is None else _name(region)
    if min_ncsnr is not None:
        found = _above_ceiling(layout, found, min_ncsnr)
        name = f"{name}, ncsnr from {min_ncsnr}"
    assert found is not None
    mask = found.mask
    if not mask.any():
        raise ConfigError(f"roi={name!r}: selects no voxel at all ({found.source})")
    x, y, z = mask.shape
    if order == "nifti":
        index = np.flatnonzero(mask)
    else:
        index = np.arange(mask.size).reshape(mask.shape).T[mask.T]
        name = f"{name}, hdf5 order"
    return Voxels(name, (x, y, z), index, found.source)


def _above_ceiling(layout: SubjectLayout, found: _Found | None, least: float) -> _Found:
    if isinstance(least, bool) or not isinstance(least, int | float | np.number):
        raise ConfigError(f"min_ncsnr={checks.shown(least)}: expected a number, such as 0.2")
    if not os.path.isfile(layout.noise_ceiling):
        raise Missing(f"min_ncsnr={least}: {layout.noise_ceiling} is not there; fetch it, or leave min_ncsnr out")
    good = np.nan_to_num(_values(layout.noise_ceiling), nan=-np.inf) >= least
    if found is None:
        return _Found(good, os.path.basename(layout.noise_ceiling))
    if found.mask.shape != good.shape:
        raise SchemaMismatch(
            f"{layout.noise_ceiling}: has shape {good.shape}, but the region ({found.source}) has {found.mask.shape}"
        )
    return _Found(found.mask & good, found.source)


def volume_shape(layout: SubjectLayout) -> tuple[int, ...] | None:
    """X, Y, Z of any volume of the subject; None where there is no volume."""
    for path in (layout.brainmask, *sorted(glob.glob(os.path.join(glob.escape(layout.regions), "*.nii.gz")))):
        if os.path.isfile(path):
            return _shape(path)
    return None


def _shape(path: str) -> tuple[int, ...]:
    return tuple(parsed(path, "shape", lambda path: {"shape": np.array(nifti_shape(path))})["shape"].tolist())


def _values(path: str) -> np.ndarray:
    return parsed(path, "volume", lambda path: {"volume": _compact(load_nifti(path))})["volume"]


def _compact(volume: np.ndarray) -> np.ndarray:
    """Labels as whole numbers of two bytes; other values as they are."""
    with np.errstate(invalid="ignore"):
        labels = volume.astype(np.int16)
    return labels if np.array_equal(labels, volume) else volume


def _load(layout: SubjectLayout, path: str) -> np.ndarray:
    """The labels in a region's file, which must be of the subject's own space."""
    volume = _values(path)
    if os.path.isfile(layout.brainmask) and volume.shape != (expected := _shape(layout.brainmask)):
        raise SchemaMismatch(
            f"{path}: has shape {volume.shape}, but {layout.brainmask} has {expected}: it belongs to another space or "
            f"subject"
        )
    return volume


def region_names(layout: SubjectLayout) -> dict[str, tuple[str, ...]]:
    """Every region with a file, and the names of its labels."""
    paths = sorted(glob.glob(os.path.join(glob.escape(layout.regions), "*.nii.gz")))
    files = [os.path.basename(path).removesuffix(".nii.gz") for path in paths]
    return {name: tuple(label for label in _labels(layout, name).values() if label != "Unknown") for name in files}


def _name(region: Region) -> str:
    if isinstance(region, str | os.PathLike):
        return os.path.basename(os.fspath(region)).removesuffix(".gz").removesuffix(".nii")
    if isinstance(region, np.ndarray) and region.dtype.kind != "U":
        return "mask"
    return "+".join(_name(each) for each in (() if region is None else region))


def _find(layout: SubjectLayout, region: Any) -> _Found:
    if isinstance(region, str | os.PathLike):
        return _named(layout, os.fspath(region), is_path=not isinstance(region, str))
    if isinstance(region, list | tuple) or (isinstance(region, np.ndarray) and region.dtype.kind == "U"):
        found = [_find(layout, each) for each in region]
        if not found:
            raise ConfigError(f"roi={region!r}: expected at least one region, or None for whole volumes")
        if len({each.mask.shape for each in found}) > 1:
            shapes = ", ".join(f"{each.source}: {each.mask.shape}" for each in found)
            raise SchemaMismatch(f"roi={region!r}: regions of different shapes ({shapes})")
        united = np.asarray(np.stack([each.mask for each in found]).any(axis=0))
        return _Found(united, "; ".join(each.source for each in found))
    if region is None or np.ndim(region) == 0:
        raise ConfigError(
            f"roi={checks.shown(region)}: expected a region's name, a NIfTI file, booleans of shape (X, Y, Z), or a "
            f"list of these"
        )
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
    return _Found(mask, "a mask")


def _named(layout: SubjectLayout, name: str, *, is_path: bool) -> _Found:
    """A file, a region, region:label, or a label alone."""
    if os.path.isfile(name):
        return _Found(_load(layout, name) > 0, name)
    if is_path or os.path.sep in name or name.endswith((".nii", ".nii.gz")):
        region = _name(name)
        is_region = os.path.isfile(os.path.join(layout.regions, f"{region}.nii.gz"))
        raise Missing(f"roi={name!r}: no such file" + (f"; for the region of the release, pass {region!r}" * is_region))
    if name == "brainmask":
        return _Found(_values(layout.brainmask) > 0, os.path.basename(layout.brainmask))
    region, _, label = name.partition(":")
    files = _files(layout, region)
    if files:
        return _labelled(layout, files, _numbers(layout, region, label) if label else None)
    if not label:
        return _by_label(layout, name)
    raise _no_region(layout, name)


def _files(layout: SubjectLayout, region: str) -> list[str]:
    """The file of a region, or those of its hemispheres; none where there is no such region."""

    def path(name: str) -> str:
        return os.path.join(layout.regions, f"{name}.nii.gz")

    if os.path.isfile(path(region)):
        return [path(region)]
    halves = [path(f"{side}{region}") for side in HEMISPHERES]
    absent = [half for half in halves if not os.path.isfile(half)]
    if len(absent) == 1:
        there = os.path.basename(next(half for half in halves if half not in absent)).removesuffix(".nii.gz")
        raise Missing(
            f"roi={region!r}: {absent[0]} is not there, only the other hemisphere; fetch it, or pass roi={there!r}"
        )
    return [] if absent else halves


def _is_half(layout: SubjectLayout, region: str) -> bool:
    """Whether only one hemisphere of a region is there."""
    there = [os.path.isfile(os.path.join(layout.regions, f"{side}{region}.nii.gz")) for side in ("", *HEMISPHERES)]
    return not there[0] and there[1] != there[2]


def _labelled(layout: SubjectLayout, files: Sequence[str], numbers: Sequence[int] | None) -> _Found:
    """These labels of a region, or all of them; hemispheres are united."""
    masks, sources = [], []
    for path in files:
        volume, name = _load(layout, path), os.path.basename(path)
        masks.append(volume > 0 if numbers is None else np.isin(volume, numbers))
        known = _labels(layout, name.removesuffix(".nii.gz"))
        chosen = ", ".join(known.get(number, str(number)) for number in numbers or ())
        sources.append(f"{name}: {chosen}" if chosen else name)
    if len({mask.shape for mask in masks}) > 1:
        raise SchemaMismatch(f"{files[0]} and {files[1]}: have shapes {masks[0].shape} and {masks[1].shape}")
    return _Found(np.asarray(np.stack(masks).any(axis=0)), "; ".join(sources))


def _by_label(layout: SubjectLayout, name: str) -> _Found:
    """A label alone, of whichever region has it; ``lh.V1`` is that of one hemisphere."""
    side = next((side for side in HEMISPHERES if name.startswith(side)), "")
    label = name.removeprefix(side)
    known = [each for each in region_names(layout) if each.startswith(side)]
    regions = dict.fromkeys(each.removeprefix("lh.").removeprefix("rh.") for each in known)
    homes = {each: numbers for each in regions if (numbers := _matching(_labels(layout, each), label))}
    if not homes:
        raise _no_region(layout, name)
    whole = {home: numbers for home, numbers in homes.items() if not _is_half(layout, f"{side}{home}")}
    chosen = {PREFERRED: homes[PREFERRED]} if PREFERRED in homes else whole or homes
    found = [_labelled(layout, _files(layout, f"{side}{home}"), numbers) for home, numbers in chosen.items()]
    if any(not np.array_equal(found[0].mask, other.mask) for other in found[1:]):
        ways = ", ".join(repr(f"{side}{home}:{label}") for home in homes)
        raise ConfigError(f"roi={name!r}: a label of several regions, with different voxels; choose one: {ways}")
    return found[0]


def _no_region(layout: SubjectLayout, name: str) -> Missing:
    found = region_names(layout)
    if not found:
        return Missing(
            f"roi={name!r}: no such region. There is no file of regions in {layout.regions}; fetch that folder of the "
            f"release, or pass the path of a NIfTI file, or booleans of shape (X, Y, Z)"
        )
    labels = {label: f"{region}:{label}" for region, labels in found.items() for label in labels}
    near = checks.nearest(name, [*found, *labels, *labels.values()])
    path = os.path.join(layout.regions, f"{name.partition(':')[0]}.nii.gz")
    way = f"Did you mean {near!r}?" if near else f"If the release has it, fetch {path}."
    names = "; ".join(f"{name} ({', '.join(labels)})" if labels else name for name, labels in found.items())
    return Missing(
        f"roi={name!r}: no such region. {way} There are: {names}. A label alone will do (V1), or region:label, a path, "
        f"or booleans of shape (X, Y, Z)"
    )


def _numbers(layout: SubjectLayout, region: str, label: str) -> list[int]:
    """Numbers of a label by its name, or else by its number: names may be digits too (area 4 of HCP_MMP1 is 8)."""
    labels = _labels(layout, region)
    if found := _matching(labels, label):
        return found
    if label.isdecimal():
        return [int(label)]
    names = ", ".join(labels.values()) or f"unknown, because {layout.label_tables(region)[0]} is not there"
    near = checks.nearest(label, labels.values())
    way = f" Did you mean '{region}:{near}'?" if near else ""
    raise Missing(f"roi='{region}:{label}': no such label.{way} Labels of {region}: {names}; a number will do too")


def _matching(labels: dict[int, str], name: str) -> list[int]:
    """The label of this name, or its halves."""
    exact = [number for number, label in labels.items() if label == name]
    return exact or [number for number, label in labels.items() if label in {f"{name}{half}" for half in HALVES}]


def _labels(layout: SubjectLayout, region: str) -> dict[int, str]:
    """Label numbers -> label names."""
    plain = region.removeprefix("lh.").removeprefix("rh.")
    for path in layout.label_tables(plain):
        if os.path.isfile(path):
            return _parsed(path)
    return dict(enumerate(KNOWN_LABELS.get(plain, ())))


def _parsed(path: str) -> dict[int, str]:
    """Lines of a number and a name; colours may follow."""
    found = {}
    with io.TextIOWrapper(open_for_parser(path), encoding="utf-8", errors="replace") as file:
        for line in file:
            entries = line.split()
            if not entries or entries[0].startswith("#"):
                continue
            if len(entries) < 2 or not entries[0].lstrip("-").isdecimal():
                raise Corrupt(f"{path}: {line.strip()[:80]!r}: expected a number and a name on each line")
            found[int(entries[0])] = entries[1]
    return found
