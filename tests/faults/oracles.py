"""What the libraries of the formats read from a file: the second opinion on files whose description was changed.

In a child of its own, forked, because they may crash or hang where a file is damaged; TileDB, which has threads that a
fork does not take along, is asked here.
"""

import os
import pickle
import select
import signal
import tarfile
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np

Values = dict[str, np.ndarray]

LIMIT_S = 10.0
SCALED = ("nii", "nii-gz")
SHAPES_ALONE = ("hdf5-btree1", "hdf5-btree2", "hdf5-contiguous", "hdf5-new-contiguous")
"""Where metadata are made to lie over values, HDF5 delivers what it holds of the metadata, not what the file has."""
PICTURES = ("jpeg", "png", "tiff", "ppm", "bmp", "webp")


def hdf5(path: Path) -> Values:
    import h5py

    found: Values = {}
    with h5py.File(path, "r") as file:
        for name, item in file.items():
            if isinstance(item, h5py.Dataset):
                found[name] = item[...]
    return found


def zarr(path: Path) -> Values:
    import zarr

    store = zarr.storage.ZipStore(path, mode="r") if path.is_file() else path
    return {"data": zarr.open_array(store, mode="r")[...]}


def npz(path: Path) -> Values:
    with np.load(path) as found:
        return {name: found[name] for name in found}


def npy(path: Path) -> Values:
    return {"data": np.load(path)}


def tar(path: Path) -> Values:
    found: dict[str, list] = {}
    with tarfile.open(path, "r:", ignore_zeros=True) as archive:  # archives one after another are read whole
        for member in archive:
            if member.isfile() and "." in member.name:
                content = archive.extractfile(member).read()
                value = np.load(BytesIO(content)) if member.name.endswith(".npy") else int(content)
                found.setdefault(os.path.basename(member.name).partition(".")[2], []).append(value)
    return {name: np.array(values) for name, values in found.items()}


def database(path: Path) -> Values:
    import lmdb

    found: dict[str, list] = {}
    with lmdb.open(str(path), subdir=False, lock=False, readonly=True) as env, env.begin() as transaction:
        for key, value in transaction.cursor():
            found.setdefault(key.decode().partition(".")[2], []).append(np.load(BytesIO(value)))
    return {name: np.array(values) for name, values in found.items()}


def tile(path: Path) -> Values:
    import tiledb

    with tiledb.open(str(path)) as array:
        found = array[:]
    return dict(found) if isinstance(found, dict) else {"x": found}


def table(path: Path) -> Values:
    import pyarrow as pa
    import pyarrow.parquet as pq

    is_parquet = path.suffix == ".parquet"
    schema = pq.read_schema(path) if is_parquet else pa.ipc.open_file(path).schema
    kinds = {each.name: each.type for each in schema}
    kinds |= {name: kind.value_type for name, kind in kinds.items() if pa.types.is_fixed_size_list(kind)}
    names = [name for name, kind in kinds.items() if pa.types.is_primitive(kind) and not pa.types.is_temporal(kind)]
    # Other columns are no fields, and may be damaged.
    read = pq.read_table(path, columns=names) if is_parquet else pa.ipc.open_file(path).read_all()
    read.validate(full=True)
    return {name: np.array(read[name].to_pylist(), kinds[name].to_pandas_dtype()) for name in names}


def nifti(path: Path) -> Values:
    import nibabel

    values = np.asanyarray(nibabel.load(path).dataobj)
    return {"data": np.moveaxis(values, 3, 0) if values.ndim == 4 else values[None]}


def pictures(path: Path) -> Values:
    from PIL import Image

    return {"image": np.stack([np.asarray(Image.open(each).convert("RGB")) for each in sorted(path.iterdir())])}


ORACLES: dict[str, Callable[[Path], Values]] = {
    "hdf5": hdf5, "zarr2": zarr, "zarr3": zarr, "zarr": zarr, "npz": npz, "npy": npy, "tar": tar, "lmdb": database,
    "tiledb": tile, "parquet": table, "arrow": table, "nii": nifti, **dict.fromkeys(PICTURES, pictures),
}  # fmt: skip


def read(name: str, path: Path) -> Values | str:
    """All values, or why there are none."""
    oracle = ORACLES[name.partition("-")[0]]
    return _answer(oracle, path) if oracle is tile else _apart(oracle, path)


def _answer(oracle: Callable[[Path], Values], path: Path) -> Values | str:
    try:
        return oracle(path)
    except BaseException as error:
        return f"{type(error).__name__}: {error!s:.200}"


def _apart(oracle: Callable[[Path], Values], path: Path) -> Values | str:
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(int(LIMIT_S))
        with os.fdopen(writes, "wb") as pipe:
            pipe.write(pickle.dumps(_answer(oracle, path)))
        os._exit(0)
    os.close(writes)
    said, until = b"", time.monotonic() + 2 * LIMIT_S
    with os.fdopen(reads, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0, until - time.monotonic()))[0] and (more := pipe.read(1 << 20)):
            said += more
    _, status = os.waitpid(child, 0)
    return pickle.loads(said) if status == 0 and said else f"nothing: it ended with status {status}"
