"""Titles and explanations of the benchmarks, by the name of their results file, in the order of the page."""

from typing import NamedTuple


class About(NamedTuple):
    """What a benchmark measures."""

    section: str
    title: str
    text: str = ""


HDF5 = "HDF5"
SHARDS = "Tar shards"
OTHERS = "Other formats"
NSD = "The Natural Scenes Dataset"
COMMANDS = "Estimates and commands"

VOLUMES = (
    "480 volumes of 150 × 150 × 100, stored as int16 and delivered as float32, each joined with a picture of "
    "425 × 425 × 3. One shuffled epoch, batch 32."
)
ROWS = "Rows of 4.5 MB (int16), one shuffled epoch."
JPEGS = (
    "JPEGs of 425 × 425 with (3, 15724) float16 voxels, shuffled; pictures are delivered as float32, by penstock as a "
    "channels-last view, by the others as contiguous planes. “Bare” is two threads that only read, decode and convert "
    "pictures to channels last, without a loader."
)

CATALOG = {
    "volumes-contiguous": About(HDF5, "Volumes with pictures, contiguous", VOLUMES),
    "volumes-gzip": About(HDF5, "Volumes with pictures, gzip-4 + shuffle", VOLUMES),
    "hdf5-contiguous": About(HDF5, "Contiguous, delivered as float32", ROWS),
    "hdf5-gzip": About(HDF5, "gzip-4 + shuffle, one row per chunk", ROWS),
    "hdf5-eights": About(HDF5, "gzip-4 + shuffle, 8 rows per chunk", ROWS),
    "hdf5-guessed": About(HDF5, "gzip-4, h5py's own chunks: 47 rows per chunk", ROWS),
    "hdf5-zstd": About(HDF5, "zstd + shuffle, one row per chunk", ROWS),
    "hdf5-lzf": About(HDF5, "lzf + shuffle, one row per chunk", ROWS),
    "hdf5-blosc-lz4": About(HDF5, "blosc-lz4, one row per chunk", ROWS),
    "hdf5-bitshuffle-lz4": About(HDF5, "bitshuffle-lz4, one row per chunk", ROWS),
    "voxel-major": About(
        HDF5, "One voxel's 750 trials per chunk, with a mask", "A mask of 15,724 of 699,192 voxels, one epoch."
    ),
    "index": About(
        HDF5, "Opening 40 files of 699,192 chunks each",
        "Compared with h5py's own walk through the chunk index, which only visits it.",
    ),
    "shards": About(SHARDS, "Pictures and voxels, batch 32", JPEGS),
    "shards-300": About(SHARDS, "Pictures and voxels, batch 300", JPEGS),
    "shards-volumes": About(
        SHARDS, "Volumes of 9 MB in 18 shards, batch 4", "Shuffled; WebDataset with `shuffle(500)`."
    ),
    "shards-unread": About(
        SHARDS, "A large member that no column asks for", "Shards with and without 4 MB per sample that is not read."
    ),
    "folders": About(OTHERS, "A folder of 425 × 425 JPEGs, batch 32", "Delivered as float32, channels first."),
    "zarr-rows": About(OTHERS, "Zarr, zstd, one row of 4.5 MB per chunk, batch 32"),
    "zarr-sixteens": About(OTHERS, "Zarr, zstd, 16 rows of 4.5 MB per chunk, batch 32"),
    "lmdb-volumes": About(OTHERS, "LMDB, volumes of 4.5 MB, batch 32"),
    "lmdb-records": About(OTHERS, "LMDB, records of 4 KiB, batch 256"),
    "tiledb-plain": About(OTHERS, "TileDB, one row of 4.5 MB per tile, batch 32"),
    "tiledb-zstd": About(OTHERS, "TileDB, zstd, one row of 4.5 MB per tile, batch 32"),
    "records": About(OTHERS, "500,000 records of 4 KiB, batch 256"),
    "several": About(
        OTHERS, "Four datasets of different shapes in one loader",
        "12,682 to 15,724 float32 values per sample, batch 24 of each.",
    ),
    "remote": About(
        OTHERS, "Shards on a server 30 ms away, batch 32", "(3, 15724) float16 voxels and a number, over loopback."
    ),
    "nsd-voxel-major": About(
        NSD, "As released, all 40 sessions of a synthetic subject 1",
        "One voxel's 750 trials per chunk; `nsdgeneral` and 224-pixel pictures, shuffled, batch 32. Time includes "
        "opening the files.",
    ),
    "nsd-prepared": About(
        NSD, "After `nsd.prepare()`",
        "The same subject, copied trial by trial. “numpy” gathers rows from memory-mapped copies, without a loader.",
    ),
    "nsd-whole-brain": About(
        NSD, "Whole brains, trial by trial", "40 sessions of (750, 150, 150, 100), with pictures, batch 32."
    ),
    "conversion": About("Converting", "A session stored by voxel, converted to trials"),
    "converted": About("Converting", "Shuffled epochs of Zarr, compared with the npy file that it was made of"),
    "foretold": About(
        COMMANDS, "`penstock plan`, compared with what then happened",
        "Peak memory, bytes read and time of an epoch. Memory: the most of five runs; time: the median of five.",
    ),
    "foretold-others": About(
        COMMANDS, "`penstock plan` for other loaders, compared with what then happened",
        "Peak memory, with a training step that lets their queues fill.",
    ),
    "answers": About(
        COMMANDS, "How long `inspect` and `plan` take", "For the first time, and again with the saved index."
    ),
    "faults": About(
        "Damaged and hostile files", "What readers do with them",
        "100 samples and one fault. Bold outcomes are silent: wrong data, lost samples, or code that ran.",
    ),
    "device": About("A GPU", "Volumes and z-scores onto a CUDA device", "int16 on the bus, float32 on the device."),
}  # fmt: skip

# What README and home page show, and its name there.
SUMMARY = {
    "volumes-contiguous": "HDF5 volumes + pictures",
    "volumes-gzip": "the same, gzip-compressed",
    "zarr-rows": "Zarr volumes, zstd",
    "shards": "tar shards, JPEGs + arrays",
    "folders": "folder of JPEGs",
    "nsd-whole-brain": "NSD, whole brains",
}
