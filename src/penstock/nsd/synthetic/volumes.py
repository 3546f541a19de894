"""Brain mask, regions and noise ceiling of a synthetic subject: smooth blobs."""

import os
from functools import cached_property

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.nsd.layout import SubjectLayout
from penstock.nsd.libraries import save_nifti
from penstock.nsd.synthetic.scale import Scale

STREAMS = ("early", "midventral", "midlateral", "midparietal", "ventral", "lateral", "parietal")
VISUAL = ("V1v", "V1d", "V2v", "V2d", "V3v", "V3d", "hV4")
NOT_CORTEX, NOT_IN_REGION = -1, 0
UNMEASURED = 3
"""Voxels of the region without a noise ceiling (NaN)."""


@dataclass(frozen=True)
class Anatomy:
    """Which voxel is what; all arrays are (X, Y, Z)."""

    scale: Scale

    @cached_property
    def brain(self) -> np.ndarray:
        """Nine tenths of the volume, around its middle."""
        return self._nearest(np.array([0.5, 0.5, 0.5]), np.ones(self.scale.volume, bool), self.scale.voxels * 9 // 10)

    @cached_property
    def cortex(self) -> np.ndarray:
        """The brain but for its core."""
        core = self._nearest(np.array([0.5, 0.5, 0.5]), self.brain, self.scale.voxels // 3)
        return np.asarray(self.brain & ~core)

    @cached_property
    def nsdgeneral(self) -> np.ndarray:
        """A lump of the cortex, at the back of the head."""
        return self._nearest(np.array([0.45, 0.1, 0.4]), self.cortex, self.scale.region_voxels)

    def labelled(self, region: np.ndarray) -> np.ndarray:
        """-1 outside the cortex, 0 outside the region, 1 to 7 in slices of it."""
        labels = np.where(self.cortex, NOT_IN_REGION, NOT_CORTEX).astype(np.float32)
        inside = np.flatnonzero(region)
        labels.reshape(-1)[inside] = 1 + np.arange(len(inside)) * 7 // len(inside)
        return labels

    def _nearest(self, to: np.ndarray, among: np.ndarray, count: int) -> np.ndarray:
        grid = np.ogrid[tuple(slice(0, size) for size in self.scale.volume)]
        along = zip(grid, to, self.scale.volume, strict=True)
        distance = sum(((at - centre * (size - 1)) / size) ** 2 for at, centre, size in along)
        chosen = np.zeros(self.scale.voxels, bool)
        order = np.argsort(np.where(among, distance, np.inf).reshape(-1), kind="stable")
        chosen[order[:count]] = True
        return chosen.reshape(self.scale.volume)


def write_volumes(layout: SubjectLayout, anatomy: Anatomy) -> None:
    """Masks, regions with the names of their labels, and the noise ceiling."""
    for folder in (layout.regions, layout.beta_folder, *{os.path.dirname(p) for p in layout.label_tables("x")}):
        os.makedirs(folder, exist_ok=True)
    region = anatomy.nsdgeneral
    general = anatomy.labelled(region)
    save_nifti(layout.brainmask, anatomy.brain.astype(np.int16))
    save_nifti(os.path.join(layout.regions, "nsdgeneral.nii.gz"), np.minimum(general, 1))
    for name, labels in (("streams", STREAMS), ("prf-visualrois", VISUAL)):
        save_nifti(os.path.join(layout.regions, f"{name}.nii.gz"), general)
        table = "".join(f"{number} {label}\n" for number, label in enumerate(("Unknown", *labels)))
        for path in layout.label_tables(name)[:2]:
            with open(path, "w") as file:
                file.write(table)
    ceiling = np.linspace(0, 1, anatomy.scale.voxels, dtype=np.float32).reshape(anatomy.scale.volume)
    ceiling.reshape(-1)[np.flatnonzero(region)[:UNMEASURED]] = np.nan
    save_nifti(layout.noise_ceiling, ceiling)
