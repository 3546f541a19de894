"""Datasets over the files of data.zip, one for each format and combination whose fingerprint is saved in states.

Only public names are used: what is checked is that a program's saved state still loads after an update.
"""

from itertools import islice

import numpy as np

import penstock as ps

ROWS = 12


def double(batch):
    return {name: values * 2 for name, values in batch.items()}


def datasets(root):
    """Name -> Dataset, in the order of a table: formats first, then what is made of them."""
    here = str(root)
    hdf5 = ps.open(f"{here}/rows.h5", fields=["x"])
    npy = ps.open(f"{here}/rows.npy")
    field = next(iter(npy.fields))
    formats = {
        "npy": npy,
        "hdf5 contiguous": hdf5,
        "hdf5 gzip": ps.open(f"{here}/rows.h5", fields=["gzip"]),
        "hdf5 chunks of rows": ps.open(f"{here}/rows.h5", fields=["blocks"]),
        "hdf5 all fields": ps.open(f"{here}/rows.h5"),
        "zarr 2": ps.open(f"{here}/two.zarr"),
        "zarr 3": ps.open(f"{here}/three.zarr"),
        "zarr shards": ps.open(f"{here}/shards.zarr"),
        "npz": ps.open(f"{here}/rows.npz"),
        "tar": ps.open(f"{here}/rows.tar"),
        "pictures": ps.open(f"{here}/pictures"),
        "lmdb": ps.open(f"{here}/rows.lmdb"),
        "tiledb": ps.open(f"{here}/rows.tiledb"),
        "parquet": ps.open(f"{here}/rows.parquet"),
        "nifti": ps.open(f"{here}/rows.nii"),
        "gzipped nifti": ps.open(f"{here}/rows.nii.gz"),
        "raw": ps.open_raw(f"{here}/rows.bin", dtype="<f4", shape=(ROWS, 4, 6)),
        "memory": ps.from_arrays(x=np.arange(ROWS * 3, dtype=np.int16).reshape(ROWS, 3)),
    }
    mask = np.arange(24).reshape(4, 6) % 3 == 0
    mean, spread = np.ones((4, 6), np.float32), np.full((4, 6), 2, np.float32)
    combinations = {
        "select": hdf5.select([5, 3, 1, 8, 9]),
        "slice": hdf5.select(slice(2, 9)),
        "mask of rows": hdf5.select(np.arange(ROWS) % 2 == 0),
        "part by mask": hdf5.select_within("x", mask),
        "crop": hdf5.select_within("x", (slice(1, 3), slice(0, 4))),
        "part of memory": formats["memory"].select_within("x", np.array([True, False, True])),
        "only": formats["hdf5 all fields"].only("blocks"),
        "rename": hdf5.rename(voxels="x"),
        "permute": hdf5.permute("x", 1, 0),
        "pad": hdf5.pad("x", to=7, value=1),
        "cast": hdf5.cast("x", "float32", divisor=300),
        "cast twice": hdf5.cast("x", "float32", scale=0.5).cast("x", "float64", offset=1),
        "cast of memory": formats["memory"].cast("x", "float32"),
        "picture as float": formats["pictures"].cast("image", "float32", divisor=255).permute("image", 2, 0, 1),
        "map": hdf5.map(double),
        "normalize": hdf5.normalize("x", mean, spread),
        "normalize by group": hdf5.normalize("x", np.stack([mean, spread]), np.stack([spread, mean]), [0, 1] * 6),
        "gather": hdf5.cast("x", "float32").gather([[0, 1], [2, -1], [5, 3]]),
        "gather mean": hdf5.cast("x", "float32").gather([[0, 1], [2, 4]], mean=True),
        "concat": ps.concat([hdf5.rename(y="x"), npy.rename(y=field).cast("y", "int16")]),
        "join": ps.join(x=(hdf5, [3, 1, 2]), image=(formats["pictures"].only("image"), [0, 2, 1])),
    }
    return {**formats, **combinations}


def nsd_datasets(root):
    from penstock.nsd import NSD

    subject = NSD(f"{root}/nsd", subject=1)
    return {
        "nsd": subject.dataset(),
        "nsd voxels": subject.dataset(("voxels", "coco")),
        "nsd volumes": subject.dataset(("voxels",), roi=None, dtype="int16"),
        "nsd z-scored": subject.dataset(("voxels",), zscore="session"),
    }


ORDERS = {
    "in order": {"shuffle": False},
    "shuffled": {"shuffle": True, "seed": 3},
    "in windows": {"shuffle": True, "seed": 3, "window": 4},
    "resampled": {"shuffle": ps.Resampled(ROWS, 20, seed=5)},
}
"""Arguments of a loader over "hdf5 chunks of rows"."""


def loader(ds, batches=0, **options):
    made = ps.Loader(ds, batch_size=4, memory="64MiB", threads=1, output="numpy", **options)
    for _ in islice(made, batches) if batches else ():
        pass
    return made


def rest(ds, state, **options):
    """The rows that come after a saved position, to the end of its epoch."""
    first = next(iter(ds.fields))
    resumed = loader(ds, columns=(first, "__index__"), **options)
    resumed.load_state_dict(state)
    return [row for _, rows in resumed for row in rows.tolist()]


def multi_loader(found, mode):
    members = {"a": found["npy"], "b": found["hdf5 gzip"]}
    return ps.MultiLoader(
        members, mode=mode, batch_size=4, shuffle=True, seed=2, memory="64MiB", threads=1, output="numpy"
    )
