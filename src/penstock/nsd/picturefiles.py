"""A folder of pictures as rows: each file read and decoded when it is wanted."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from penstock.errors import DataError, Missing, SchemaMismatch, Unavailable
from penstock.memory import aligned
from penstock.nsd.outside import needed
from penstock.pictures import decode
from penstock.spec import Fields, FieldSpec, Origin, ReadPath
from penstock.store import Out, check_rows, digest

FILES_TOLD = 4096
"""Names that go into the fingerprint, evenly spread."""


class PictureFiles:
    """``image``: (height, width, 3) of uint8, as the first file has it, or of the size asked for."""

    blocks = None

    def __init__(self, paths: Sequence[str], size: int | None) -> None:
        self.paths, self.size = tuple(paths), size
        first = self._decoded(0)
        self._pixels = first.nbytes
        self._largest = max(Path(path).stat().st_size for path in self.paths[:: max(1, len(self.paths) // 1000)])
        self.fields: Fields = {"image": FieldSpec(first.dtype, first.shape if size is None else (size, size, 3))}

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def index_bytes(self) -> int:
        return sum(map(len, self.paths)) + 60 * len(self.paths)

    @property
    def fingerprint(self) -> str:
        told = self.paths[:: max(1, len(self.paths) // FILES_TOLD)]
        return digest("pictures", self.size, len(self.paths), [(Path(p).name, Path(p).stat().st_size) for p in told])

    def scratch_bytes(self, rows: int) -> int:
        """Python's own, one picture at a time: the file, its pixels, and once more while they are resized."""
        return aligned(2 * self._largest) + 3 * aligned(self._pixels)

    def read_into(self, rows: np.ndarray, at: np.ndarray, out: Out) -> None:
        check_rows(rows, self)
        if "image" not in out:
            return
        for row, place in zip(rows.tolist(), at.tolist(), strict=True):
            pixels, goal = self._decoded(row), out["image"][place]
            if self.size is not None:
                images = needed("PIL.Image")
                small = images.fromarray(pixels).resize((self.size, self.size), images.Resampling.BILINEAR)
                pixels = np.asarray(small)
            if pixels.shape != goal.shape:
                raise SchemaMismatch(
                    f"{self.paths[row]}: a picture of {pixels.shape}, but {self.paths[0]} has {goal.shape}; pass a size"
                )
            goal[:] = pixels

    def _decoded(self, row: int) -> np.ndarray:
        path = self.paths[row]
        try:
            return decode(Path(path).read_bytes())
        except FileNotFoundError:
            raise Missing(f"{path}: the file was there when the folder was opened, and is gone; restore it") from None
        except OSError as error:
            raise Unavailable(f"{path}: cannot be read ({error.strerror})") from error
        except DataError as error:
            raise type(error)(f"{path}: {error}") from error

    def origin(self, row: int) -> Origin:
        return Origin(self.paths[row], "image")

    def close(self) -> None:
        """Nothing stays open."""

    def read_paths(self) -> Sequence[ReadPath]:
        return [ReadPath("image", self.fields["image"], len(self), "a file each", "decoded when it is wanted")]
