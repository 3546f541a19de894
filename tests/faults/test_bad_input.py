"""Bad files, bad arguments and bad functions: the right error, a way out, and a process that goes on.

Every message names the file or the argument. Batches delivered before an error are right; after it no reader thread is
left, and other loaders work.
"""

import os
import re
import threading
import time
import zlib

import h5py
import numpy as np
import pytest
import torch

import penstock as ps
from penstock.errors import (
    BudgetExceeded,
    Changed,
    ConfigError,
    Corrupt,
    DataError,
    DecodeFailed,
    Missing,
    OutOfRange,
    PenstockError,
    SchemaMismatch,
    TransformFailed,
    Truncated,
    Unsafe,
)

ROWS, BATCH = 40, 4

# What a reader can do next, or what was expected: one of these is in every message.
WAYS_OUT = re.compile(
    r"expected|fetch it again|name the|name those|leave|pass |save |open the dataset again|restore|looked in|check|"
    r"give both|the dataset has|the file has|rows, 0 to|use device=|use output=|needs output=|pip install|known:|"
    r"make its|raise memory|convert it|rename it|ask for",
    re.IGNORECASE,
)


def alive():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock-reader")]


def healthy():
    """A loader that has nothing to do with the fault."""
    values = np.arange(60, dtype=np.float32).reshape(20, 3)
    with ps.Loader(ps.from_arrays(x=values), batch_size=6, memory="32MiB", threads=2, output="numpy") as loader:
        return np.array_equal(np.concatenate([batch["x"].copy() for batch in loader]), values)


@pytest.fixture(autouse=True)
def _the_process_goes_on():
    assert alive() == []
    yield
    assert alive() == []
    assert healthy()
    assert alive() == []


def assert_told(error, *told):
    message = str(error)
    for text in told:
        assert text in message, f"{text!r} is not in {message!r}"
    assert WAYS_OUT.search(message), f"no way out in {message!r}"


# Files.


def hdf5(path, values, name="betas", **options):
    with h5py.File(path, "w") as file:
        file.create_dataset(name, data=values, **options)
    return path


def betas(rows=ROWS, width=6, dtype=np.float32):
    return np.arange(rows * width).reshape(rows, width).astype(dtype)


def no_match(folder):
    return str(folder / "betas*.hdf5"), "betas*.hdf5"


def no_file(folder):
    return str(folder / "betas.hdf5"), "betas.hdf5"


def a_folder(folder):
    return str(folder), str(folder)


def no_paths(folder):
    return [], "list of paths"


def no_file_among_others(folder):
    hdf5(folder / "one.h5", betas())
    return [folder / "one.h5", folder / "two.h5"], "two.h5"


def another_dtype(folder):
    for session in (1, 2, 3):
        hdf5(folder / f"s{session}.h5", betas(dtype=np.float64 if session == 2 else np.float32))
    return str(folder / "s*.h5"), "s2.h5"


def another_shape(folder):
    for session in (1, 2, 3):
        hdf5(folder / f"s{session}.h5", betas(width=7 if session == 3 else 6))
    return str(folder / "s*.h5"), "s3.h5"


def another_field(folder):
    for session in (1, 2):
        hdf5(folder / f"s{session}.h5", betas(), name="betas" if session == 1 else "voxels")
    return str(folder / "s*.h5"), "s2.h5"


def cut_hdf5(folder):
    path = hdf5(folder / "cut.h5", betas(width=1000))
    os.truncate(path, os.path.getsize(path) // 2)
    return path, "cut.h5"


def cut_in_the_first_bytes(folder):
    path = hdf5(folder / "cut.h5", betas())
    os.truncate(path, 20)
    return path, "cut.h5"


def not_hdf5(folder):
    (folder / "page.h5").write_text("<html>404 Not Found</html>")
    return folder / "page.h5", "page.h5"


def empty_hdf5(folder):
    (folder / "empty.h5").write_bytes(b"")
    return folder / "empty.h5", "empty.h5"


def empty_npy(folder):
    (folder / "empty.npy").write_bytes(b"")
    return folder / "empty.npy", "empty.npy"


def not_npy(folder):
    (folder / "page.npy").write_text("<html>404 Not Found</html>")
    return folder / "page.npy", "page.npy"


def cut_npy(folder):
    np.save(folder / "cut.npy", betas())
    os.truncate(folder / "cut.npy", 500)
    return folder / "cut.npy", "cut.npy"


def cut_npy_header(folder):
    np.save(folder / "cut.npy", betas())
    os.truncate(folder / "cut.npy", 50)
    return folder / "cut.npy", "cut.npy"


def objects_npy(folder):
    np.save(folder / "objects.npy", np.array([{"a": 1}, None], object), allow_pickle=True)
    return folder / "objects.npy", "objects.npy"


def fortran_npy(folder):
    np.save(folder / "fortran.npy", np.asfortranarray(betas()))
    return folder / "fortran.npy", "fortran.npy"


def number_npy(folder):
    np.save(folder / "number.npy", np.float32(3))
    return folder / "number.npy", "number.npy"


def no_rows_npy(folder):
    np.save(folder / "none.npy", np.empty((0, 3)))
    return folder / "none.npy", "none.npy"


def no_datasets(folder):
    with h5py.File(folder / "groups.h5", "w") as file:
        file.create_group("a")
    return folder / "groups.h5", "groups.h5"


def only_words(folder):
    with h5py.File(folder / "words.h5", "w") as file:
        file["names"] = ["a", "b"]
    return folder / "words.h5", "words.h5"


def rows_differ(folder):
    with h5py.File(folder / "differ.h5", "w") as file:
        file["betas"], file["labels"] = betas(), np.arange(3)
    return folder / "differ.h5", "differ.h5"


def never_written(folder):
    with h5py.File(folder / "gaps.h5", "w") as file:
        made = file.create_dataset("betas", (ROWS, 6), np.float32, chunks=(1, 6), fillvalue=-1)
        made[:10] = betas(10)
    return folder / "gaps.h5", "gaps.h5"


def never_written_at_all(folder):
    with h5py.File(folder / "gaps.h5", "w") as file:
        file.create_dataset("betas", (ROWS, 6), np.float32)
    return folder / "gaps.h5", "gaps.h5"


def another_kind(folder):
    (folder / "table.csv").write_text("a,b\n1,2\n")
    return folder / "table.csv", "table.csv"


OPENED = [
    (no_match, Missing),
    (no_file, Missing),
    (no_paths, Missing),
    (no_file_among_others, Missing),
    (a_folder, ConfigError),
    (another_dtype, SchemaMismatch),
    (another_shape, SchemaMismatch),
    (another_field, SchemaMismatch),
    (cut_hdf5, Truncated),
    (cut_in_the_first_bytes, (Truncated, Corrupt)),
    (not_hdf5, Corrupt),
    (empty_hdf5, (Truncated, Corrupt)),
    (empty_npy, Truncated),
    (not_npy, Corrupt),
    (cut_npy, Truncated),
    (cut_npy_header, (Truncated, Corrupt)),
    (objects_npy, Unsafe),
    (fortran_npy, ConfigError),
    (number_npy, SchemaMismatch),
    (no_rows_npy, ConfigError),
    (no_datasets, Missing),
    (only_words, Missing),
    (rows_differ, SchemaMismatch),
    (never_written, Missing),
    (never_written_at_all, Missing),
    (another_kind, ConfigError),
]


@pytest.mark.case(9, 11, 12)
@pytest.mark.parametrize(("make", "kind"), OPENED, ids=[make.__name__ for make, _ in OPENED])
def test_files_that_cannot_be_opened(tmp_path, make, kind):
    path, named = make(tmp_path)
    with pytest.raises(kind) as refused:
        ps.open(path)
    assert named in str(refused.value)
    if make not in (no_paths, no_rows_npy):  # what is wrong is all there is to say
        assert_told(refused.value, named)


@pytest.mark.parametrize("make", [not_npy, cut_npy_header, objects_npy])
def test_nobody_is_advised_to_unpickle(tmp_path, make):
    with pytest.raises(PenstockError) as refused:
        ps.open(make(tmp_path)[0])
    assert "allow_pickle" not in str(refused.value)


@pytest.mark.case(11)
def test_a_mismatch_says_what_differs(tmp_path):
    with pytest.raises(SchemaMismatch) as refused:
        ps.open(another_dtype(tmp_path)[0])
    assert_told(refused.value, "s1.h5", "s2.h5", "'betas'", "float64", "float32")


def test_the_good_files_beside_a_bad_one_can_be_read(tmp_path):
    another_dtype(tmp_path)
    good = ps.open([tmp_path / "s1.h5", tmp_path / "s3.h5"])
    assert np.array_equal(good[:]["betas"], np.concatenate([betas(), betas()]))


@pytest.mark.case(12)
def test_never_written_rows_are_had_by_asking(tmp_path):
    for make, written in ((never_written, 10), (never_written_at_all, 0)):
        filled = ps.open(make(tmp_path)[0], allow_fill=True)
        expected = np.full((ROWS, 6), -1 if written else 0, np.float32)
        expected[:written] = betas(written)
        loader = ps.Loader(filled, batch_size=BATCH, memory="64MiB", threads=2, output="numpy")
        assert np.array_equal(np.concatenate([batch["betas"].copy() for batch in loader]), expected)


@pytest.mark.parametrize("fields", [("nope",), ("betas", "nope"), ["nope"]])
def test_fields_that_are_not_there(tmp_path, fields):
    path = hdf5(tmp_path / "one.h5", betas())
    with pytest.raises((Missing, ConfigError)) as refused:
        ps.open(path, fields=fields)
    assert_told(refused.value, "one.h5", "'nope'", "'betas'")


def test_fields_given_as_one_text(tmp_path):
    path = hdf5(tmp_path / "one.h5", betas())
    with pytest.raises(ConfigError) as refused:
        ps.open(path, fields="betas")
    assert_told(refused.value, "fields='betas'")


# Arguments.


@pytest.fixture
def ds(tmp_path):
    return ps.open(hdf5(tmp_path / "good.h5", betas()))


@pytest.mark.parametrize("row", [ROWS, -ROWS - 1, 10**6])
def test_rows_that_are_not_there(ds, row):
    for ask in (lambda: ds[row], lambda: ds[[0, row]], lambda: ds.select([row])):
        with pytest.raises(OutOfRange) as refused:
            ask()
        assert_told(refused.value, f"row {row}", "0 to 39")


NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")

ARGUMENTS = [
    ({"batch_size": 0}, ConfigError, "batch_size=0"),
    ({"batch_size": -1}, ConfigError, "batch_size=-1"),
    ({"batch_size": "3"}, ConfigError, "batch_size='3'"),
    ({"batch_size": 2.0}, ConfigError, "batch_size=2.0"),
    ({"batch_size": None}, ConfigError, "batch_size=None"),
    ({"memory": "2 gigs"}, ConfigError, "memory='2 gigs'"),
    ({"memory": 0}, ConfigError, "memory=0"),
    ({"memory": -5}, ConfigError, "memory=-5"),
    ({"memory": 1.5}, ConfigError, "memory=1.5"),
    ({"memory": ""}, ConfigError, "memory=''"),
    ({"memory": "1KiB"}, BudgetExceeded, "memory=1.00 KiB"),
    ({"threads": 0}, ConfigError, "threads=0"),
    ({"threads": -2}, ConfigError, "threads=-2"),
    ({"threads": "4"}, ConfigError, "threads='4'"),
    ({"threads": 1.5}, ConfigError, "threads=1.5"),
    ({"threads": None}, ConfigError, "threads=None"),
    ({"rank": 0}, ConfigError, "world_size=None"),
    ({"world_size": 2}, ConfigError, "rank=None"),
    ({"rank": 2, "world_size": 2}, ConfigError, "rank=2"),
    ({"rank": -1, "world_size": 2}, ConfigError, "rank=-1"),
    ({"rank": 0, "world_size": 0}, ConfigError, "world_size=0"),
    ({"rank": "0", "world_size": 2}, ConfigError, "rank='0'"),
    ({"columns": ("nope",)}, ConfigError, "'nope'"),
    ({"columns": ("betas", "nope")}, ConfigError, "'nope'"),
    ({"columns": "betas"}, ConfigError, "columns='betas'"),
    ({"columns": ()}, ConfigError, "columns=()"),
    ({"device": "nowhere"}, ConfigError, "device='nowhere'"),
    pytest.param({"device": "cuda"}, ConfigError, "device='cuda'", marks=NO_CUDA),
    pytest.param({"device": "cuda:7"}, ConfigError, "device='cuda:7'", marks=NO_CUDA),
    ({"device": "cuda", "output": "numpy"}, ConfigError, "device='cuda'"),
    ({"output": "jax"}, ConfigError, "output='jax'"),
    ({"output": None}, ConfigError, "output=None"),
    ({"seed": -1}, ConfigError, "seed=-1"),
    ({"seed": 1.5, "shuffle": True}, ConfigError, "seed=1.5"),
    ({"seed": "7", "shuffle": True}, ConfigError, "seed='7'"),
    ({"tail": "keep"}, ConfigError, "tail='keep'"),
]


@pytest.mark.parametrize(("arguments", "kind", "named"), ARGUMENTS, ids=str)
def test_arguments_that_cannot_be_meant(ds, arguments, kind, named):
    with pytest.raises(kind) as refused:
        ps.Loader(ds, **{"batch_size": BATCH, "memory": "64MiB", **arguments})
    assert_told(refused.value, named)


def test_an_empty_selection_is_refused_or_has_no_batches(ds):
    try:
        assert list(ps.Loader(ds.select([]), batch_size=BATCH, memory="64MiB", output="numpy")) == []
    except PenstockError as refused:
        assert_told(refused)


def test_an_order_of_more_rows_than_there_are(ds):
    def everything():
        order = ps.Resampled(population=10**6, length=ROWS)
        return list(ps.Loader(ds, batch_size=BATCH, shuffle=order, memory="64MiB", output="numpy"))

    with pytest.raises((OutOfRange, ConfigError)) as refused:
        everything()
    assert_told(refused.value, "40 rows")


# In the middle of an epoch.


def numbers(tmp_path):
    np.save(tmp_path / "numbers.npy", np.arange(ROWS))
    return ps.open(tmp_path / "numbers.npy").rename(number="data")


def raising_at_25(batch):
    if (batch["number"] == 25).any():
        raise ZeroDivisionError("twenty-five")
    return {"x": batch["number"] * 2}


def wider_at_25(batch):
    return {"x": np.repeat(batch["number"][:, None] * 2, 2 if (batch["number"] == 25).any() else 1, axis=1)}


def float_at_25(batch):
    return {"x": batch["number"] * (2.0 if (batch["number"] == 25).any() else 2)}


def nothing_at_25(batch):
    return None if (batch["number"] == 25).any() else {"x": batch["number"] * 2}


def copied(batch):
    return {name: torch.as_tensor(values).numpy().copy() for name, values in batch.items()}


def failing_epoch(loader, kind):
    """Batches up to the error, copied, and the error."""
    delivered, batches = [], iter(loader)
    with pytest.raises(kind) as failed:
        delivered.extend(map(copied, batches))
    assert alive() == [], "threads are gone when the error arrives"
    with pytest.raises(StopIteration):
        next(batches)
    return delivered, failed.value


FUNCTIONS = [
    (raising_at_25, TransformFailed, ["ZeroDivisionError", "twenty-five"]),
    (wider_at_25, SchemaMismatch, ["'x'", "Make its output shape"]),
    (float_at_25, SchemaMismatch, ["'x'", "float64", "int64"]),
    (nothing_at_25, TransformFailed, ["NoneType", "dict of arrays"]),
]


@pytest.mark.parametrize("output", ["numpy", "torch"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("function", "kind", "told"), FUNCTIONS, ids=[function.__name__ for function, _, _ in FUNCTIONS]
)
def test_functions_that_fail(tmp_path, function, kind, told, threads, output):
    mapped = numbers(tmp_path).map(function)
    loader = ps.Loader(mapped, batch_size=BATCH, memory="64MiB", threads=threads, output=output)
    for epoch in range(2):
        delivered, error = failing_epoch(loader, kind)
        assert len(delivered) == 6
        got = np.concatenate([batch["x"].reshape(-1) for batch in delivered])
        assert np.array_equal(got, np.arange(24) * 2)
        for text in (function.__name__, *told):
            assert text in str(error)
        assert any(f"batch 6 of epoch {epoch}" in note for note in error.__notes__)
    loader.close()


def test_a_function_that_failed_is_left_out_and_the_epoch_is_whole(tmp_path):
    whole = numbers(tmp_path)
    without = whole.select([row for row in range(ROWS) if row != 25]).map(raising_at_25)
    loader = ps.Loader(without, batch_size=BATCH, memory="64MiB", output="numpy")
    assert sum(len(batch["x"]) for batch in loader) == ROWS - 1


LAYOUTS = {
    "gzip": ({"chunks": (1, 600), "compression": "gzip"}, DecodeFailed),
    "gzip and shuffle": ({"chunks": (1, 600), "compression": "gzip", "shuffle": True}, DecodeFailed),
    "chunks of several rows": ({"chunks": (BATCH, 600), "compression": "gzip"}, DecodeFailed),
    "chunks of half a row": ({"chunks": (1, 300), "compression": "gzip"}, DecodeFailed),
    "checksums": ({"chunks": (1, 600), "fletcher32": True}, Corrupt),
}


def damaged(path, options, row=25):
    """A file whose bytes for one row were flipped."""
    values = np.random.default_rng(0).standard_normal((ROWS, 600)).astype(np.float32)
    hdf5(path, values, **options)
    with h5py.File(path) as file:
        first = (row // options["chunks"][0] * options["chunks"][0], 0)
        chunk = file["betas"].id.get_chunk_info_by_coord(first)
    with open(path, "r+b") as file:
        file.seek(chunk.byte_offset + chunk.size // 2)
        flipped = bytes(byte ^ 0xFF for byte in file.read(40))
        file.seek(chunk.byte_offset + chunk.size // 2)
        file.write(flipped)
    return values


@pytest.mark.parametrize(("options", "kind"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [None, "float64"])
def test_damaged_chunks(tmp_path, options, kind, dtype):
    values = damaged(tmp_path / "damaged.h5", options)
    opened = ps.open(tmp_path / "damaged.h5")
    if dtype:
        opened, values = opened.cast("betas", dtype), values.astype(dtype)
    loader = ps.Loader(opened, batch_size=BATCH, memory="64MiB", threads=2, output="numpy")
    delivered, error = failing_epoch(loader, kind)
    assert len(delivered) == 6
    assert np.array_equal(np.concatenate([batch["betas"] for batch in delivered]), values[:24])
    assert_told(error, "damaged.h5", "betas", "damaged there")
    left = [row for row in range(ROWS) if not 24 <= row < 28]
    rest = ps.Loader(opened.select(left), batch_size=BATCH, memory="64MiB", threads=2, output="numpy")
    assert np.array_equal(np.concatenate([batch["betas"].copy() for batch in rest]), values[left])


# Files that change while they are read.

WIDE = 20_000  # rows of 80 kB are read one by one, and a small budget reads few ahead


def wide_file(folder, kind, **options):
    values = np.random.default_rng(1).standard_normal((ROWS, WIDE)).astype(np.float32)
    if kind == "npy":
        np.save(folder / "wide.npy", values)
        return folder / "wide.npy", values
    return hdf5(folder / "wide.h5", values, **options), values


def truncate(path):
    os.truncate(path, os.path.getsize(path) // 2)


def replace(path):
    with open(f"{path}.new", "wb") as file:
        file.write(bytes(os.path.getsize(path)))
    os.replace(f"{path}.new", path)


def remove(path):
    os.remove(path)


KINDS = {
    "npy": ("npy", {}),
    "hdf5": ("hdf5", {}),
    "hdf5 chunks": ("hdf5", {"chunks": (1, WIDE), "compression": "gzip", "compression_opts": 1}),
    "hdf5 through h5py": ("hdf5", {"chunks": (3, WIDE // 2)}),
}
AFTER_OPENING = [(truncate, (Changed, Truncated)), (replace, Changed), (remove, Missing)]


@pytest.mark.case(10)
@pytest.mark.parametrize(("change", "kind"), AFTER_OPENING, ids=["truncated", "replaced", "removed"])
@pytest.mark.parametrize(("file_kind", "options"), KINDS.values(), ids=KINDS)
def test_files_that_change_in_the_middle_of_an_epoch(tmp_path, file_kind, options, change, kind):
    path, values = wide_file(tmp_path, file_kind, **options)
    opened = ps.open(path)
    name = next(iter(opened.fields))
    smallest = ps.Loader(opened, batch_size=2, memory="1GiB", threads=1, output="numpy").plan.smallest_bytes
    loader = ps.Loader(opened, batch_size=2, memory=smallest, threads=1, output="numpy")
    batches = iter(loader)
    delivered = [next(batches)[name].copy() for _ in range(3)]
    change(path)
    time.sleep(0.05)  # a look at a file holds good for a moment
    with pytest.raises(kind) as failed:
        delivered.extend(batch[name].copy() for batch in batches)
    got = np.concatenate(delivered)
    assert np.array_equal(got, values[: len(got)]), "what was delivered is what was opened"
    assert path.name in str(failed.value)
    assert alive() == []


@pytest.mark.case(10)
@pytest.mark.parametrize("width", [3, WIDE], ids=["small rows", "large rows"])
@pytest.mark.parametrize(("change", "kind"), AFTER_OPENING, ids=["truncated", "replaced", "removed"])
def test_files_that_change_between_opening_and_reading(tmp_path, width, change, kind):
    np.save(tmp_path / "rows.npy", np.zeros((ROWS, width)))
    opened = ps.open(tmp_path / "rows.npy")
    change(tmp_path / "rows.npy")
    loader = ps.Loader(opened, batch_size=BATCH, memory="64MiB", threads=2, output="numpy")
    delivered, error = failing_epoch(loader, kind)
    assert delivered == []
    assert_told(error, "rows.npy")


def test_the_new_file_is_had_by_opening_again(tmp_path):
    np.save(tmp_path / "rows.npy", np.zeros((ROWS, 3)))
    opened = ps.open(tmp_path / "rows.npy")
    np.save(tmp_path / "new.npy", np.ones((5, 3)))
    os.replace(tmp_path / "new.npy", tmp_path / "rows.npy")
    with pytest.raises(Changed) as refused:
        opened[0]
    assert_told(refused.value, "rows.npy", "replaced")
    assert ps.open(tmp_path / "rows.npy")[:]["data"].sum() == 15


@pytest.mark.parametrize("header", [b"\x00{", b"{" * 50, b"{'descr': '<f4', 'shape': (", b"-" * 110, b"1+" * 55])
def test_a_damaged_npy_header(tmp_path, header):
    path = tmp_path / "a.npy"
    np.save(path, np.zeros((4, 5), np.float32))
    raw = path.read_bytes()
    path.write_bytes(raw[:10] + header + raw[10 + len(header) :])
    with pytest.raises(DataError, match=r"a\.npy"):
        ps.open(path)


GZIP = {"chunks": (2, 30), "compression": "gzip"}


def flip_a_byte(path):
    with h5py.File(path) as file:
        chunk = file["betas"].id.get_chunk_info(1)
    raw = bytearray(path.read_bytes())
    raw[chunk.byte_offset + chunk.size // 2] ^= 0x10
    path.write_bytes(raw)


def inflate_to(size):
    def rewrite(path):
        with h5py.File(path, "r+") as file:
            file["betas"].id.write_direct_chunk((2, 0), zlib.compress(bytes(size)))

    return rewrite


@pytest.mark.parametrize(
    ("layout", "damage"),
    [
        (GZIP, flip_a_byte),
        ({**GZIP, "fletcher32": True}, flip_a_byte),
        ({"chunks": (2, 30), "fletcher32": True}, flip_a_byte),
        (GZIP, inflate_to(100)),
        (GZIP, inflate_to(10_000_000)),
    ],
    ids=["gzip flipped", "gzip + fletcher32 flipped", "fletcher32 flipped", "inflates to less", "inflates to more"],
)
def test_a_damaged_chunk_is_named(tmp_path, layout, damage):
    path = tmp_path / "session.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("betas", data=np.random.default_rng(0).normal(size=(8, 30)).cumsum(axis=1), **layout)
    damage(path)
    ds = ps.open(path)
    with pytest.raises(DataError, match=r"session\.h5: betas\[2:4\], chunk \(2, 0\) at offset [0-9,]+ of"):
        ds[2]
    with ps.Loader(
        ds, batch_size=3, shuffle=True, on_error="skip", memory="64MiB", columns=("__index__", "betas")
    ) as dl:
        assert sorted(row for rows, _ in dl for row in rows.tolist()) == [0, 1, 4, 5, 6, 7]
        assert sorted(sample.row for sample in dl.stats().left_out) == [2, 3]
