"""Libraries behind one door: scipy reads designs, nibabel volumes, and pandas shows the trial table."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

import numpy as np

from penstock.errors import ConfigError, Corrupt, Missing

T = TypeVar("T")


def needed(library: str) -> Any:
    """The library, or an error that says how to get it."""
    try:
        return import_module(library)
    except ImportError:
        name = library.split(".")[0]
        raise ConfigError(f'the Natural Scenes Dataset needs {name}: pip install "penstock[nsd]"') from None


def savemat(path: str, values: dict[str, np.ndarray]) -> None:
    """A MATLAB file of version 5."""
    needed("scipy.io").savemat(path, values)


def loadmat(path: str) -> dict[str, np.ndarray]:
    """The arrays of a MATLAB file of version 5."""
    try:
        found = needed("scipy.io").loadmat(path)
    except FileNotFoundError:
        raise Missing(f"{path}: no such file") from None
    except Exception as error:  # scipy raises whatever its parser stumbles over
        raise Corrupt(f"{path}: not a MATLAB file that scipy reads ({error}); fetch it again") from error
    return {name: value for name, value in found.items() if isinstance(value, np.ndarray)}


def save_nifti(path: str, volume: np.ndarray, voxel_mm: float = 1.8) -> None:
    """A NIfTI volume, compressed where the name says so."""
    nibabel = needed("nibabel")
    affine = np.diag([voxel_mm, voxel_mm, voxel_mm, 1.0])
    nibabel.save(nibabel.Nifti1Image(volume, affine), path)


def load_nifti(path: str) -> np.ndarray:
    """A NIfTI volume as stored, or scaled where its header says so."""
    return _read_nifti(path, lambda image: np.asanyarray(image.dataobj))


def nifti_shape(path: str) -> tuple[int, ...]:
    """The shape of a NIfTI volume, from its header."""
    return _read_nifti(path, lambda image: tuple(image.shape))


def _read_nifti(path: str, read: Callable[[Any], T]) -> T:
    nibabel = needed("nibabel")
    try:
        return read(nibabel.load(path))
    except FileNotFoundError:
        raise Missing(f"{path}: no such file") from None
    except Exception as error:  # nibabel, gzip and zlib each have their own
        raise Corrupt(f"{path}: not a NIfTI volume that nibabel reads ({error}); fetch it again") from error
