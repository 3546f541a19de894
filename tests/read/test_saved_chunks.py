"""Chunk tables kept on disk: used while they hold good, and never a reason why data cannot be read."""

import functools
import json
import multiprocessing
import operator
import os
import pickle
import shutil
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest

import penstock as ps
from penstock.errors import Corrupt, Missing
from penstock.files import saved as saved_tables
from penstock.files.handles import identify
from penstock.formats import hdf5
from penstock.formats.hdf5 import layout
from penstock.formats.hdf5.fallback import H5pyStore
from penstock.read import codecs, saved_chunks
from penstock.read.extents import NEVER_WRITTEN, KnownTable

NAME = "betas"


def voxel_major(path, shape, **options):
    """One time course a chunk."""
    values = np.random.default_rng(0).normal(size=shape).astype("<f4")
    with h5py.File(path, "w") as file:
        file.attrs["session"] = 1
        file.create_dataset(NAME, data=values, chunks=(shape[0], 1, 1, 1), **options)
    return values


@pytest.fixture
def folder(tmp_path):
    """Where tables are kept."""
    return tmp_path / "tables"


@pytest.fixture
def small(tmp_path, read_policy):
    """A file of 60 chunks, worth saving for once."""
    read_policy(save_table_from_chunks=1)
    path = tmp_path / "small.h5"
    voxel_major(path, (6, 5, 4, 3))
    return path


@pytest.fixture(scope="module")
def large_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("large") / "large.h5"
    return path, voxel_major(path, (24, 20, 22, 21))


@pytest.fixture
def large(tmp_path, large_file):
    """A file with as many chunks as are worth saving, and its values."""
    return Path(shutil.copy(large_file[0], tmp_path)), large_file[1]


@pytest.fixture
def walks(monkeypatch):
    """Counts how often a file's own index is walked through."""
    walked = []

    def counting(found):
        walked.append((found.dataset.name, found.axis))
        return original(found)

    original = layout.walk
    monkeypatch.setattr(layout, "walk", counting)
    return walked


def through_h5py(path):
    with h5py.File(path) as file:
        return file[NAME][()]


def saved(folder):
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def table_of(ds):
    return ds.store._arrays[NAME].table


def assert_opens(path, folder, **options):
    """Opened with saved tables or without, the values are those of the file."""
    ds = ps.open(path, index_dir=folder, **options)
    assert np.array_equal(ds[:][NAME], through_h5py(path))
    return ds


# A second opening.


def test_the_second_opening_walks_through_nothing(small, folder, walks):
    first = assert_opens(small, folder)
    assert len(walks) == 1
    assert saved(folder) == [Path(table_of(first)._saved.path).name]
    second = assert_opens(small, folder)
    assert len(walks) == 1
    assert isinstance(table_of(second), saved_chunks.SavedChunkTable)
    assert second.fingerprint == first.fingerprint


def test_a_saved_table_is_mapped_by_the_first_read(small, folder, monkeypatch):
    """Neither opening nor planning looks at tables: a dataset may have many files, and one batch needs few of them."""
    ps.open(small, index_dir=folder)
    mapped, original = [], saved_tables.SavedTable.columns
    monkeypatch.setattr(saved_tables.SavedTable, "columns", lambda self: (mapped.append(self.path), original(self))[1])
    part = ps.open(small, index_dir=folder).select_within(NAME, slice(1, 3))
    with ps.Loader(part, batch_size=2, shuffle=True, memory="64MiB") as loader:
        assert not mapped
        assert sum(len(batch[NAME]) for batch in loader) == 6
    assert len(mapped) == 1


def test_both_openings_know_the_same(small, folder):
    known = table_of(ps.open(small, index_dir=False))
    for table in (table_of(ps.open(small, index_dir=folder)) for _ in range(2)):
        for fact in ("shape", "longest", "stored_bytes", "missing", "end", "has_skipped"):
            assert getattr(table, fact) == getattr(known, fact), fact
        for block in range(known.shape[0]):
            for pieces in (slice(None), np.array([7, 3, 3])):
                for ours, theirs in zip(table.find(block, pieces), known.find(block, pieces), strict=True):
                    assert np.array_equal(ours, theirs)


@pytest.fixture
def without_h5py(monkeypatch):
    """From its call on, opening a file with h5py fails."""

    def refuse(*_):
        raise AssertionError("h5py opened the file")

    return lambda: monkeypatch.setattr(hdf5, "open_with_h5py", refuse)


@pytest.mark.parametrize("options", [{}, {"compression": "gzip", "shuffle": True}, {"fletcher32": True}], ids=str)
@pytest.mark.parametrize("axis", [0, 2])
def test_named_fields_are_opened_again_without_h5py(tmp_path, folder, read_policy, without_h5py, options, axis):
    read_policy(save_table_from_chunks=1)
    path = tmp_path / "named.h5"
    values = voxel_major(path, (6, 5, 4, 3), **options)
    with h5py.File(path, "r+") as file:
        file.create_dataset("other", data=np.zeros((6, 5, 4, 3)), chunks=(6, 5, 4, 3))
    asked = {"fields": [NAME, "other"], "index_dir": folder, "row_axis": axis}
    first = ps.open(path, **asked)
    without_h5py()
    second = ps.open(path, **asked)
    assert np.array_equal(second[:][NAME], np.moveaxis(values, axis, 0))
    assert second.fingerprint == first.fingerprint
    for name in asked["fields"]:
        ours, theirs = second.store._arrays[name], first.store._arrays[name]
        assert ours.describe() == theirs.describe()
        for fact in ("file", "spec", "stored_chunk", "remedy", "fill", "fill_text"):
            assert getattr(ours, fact) == getattr(theirs, fact), fact
    with pytest.raises(AssertionError, match="h5py opened the file"):
        ps.open(path, fields=["betas", "absent"], index_dir=folder)
    os.utime(path)
    with pytest.raises(AssertionError, match="h5py opened the file"):
        ps.open(path, **asked)


def test_h5py_reads_again_what_no_decoder_reads_any_more(tmp_path, folder, read_policy, monkeypatch):
    read_policy(save_table_from_chunks=1)
    path = tmp_path / "packed.h5"
    values = voxel_major(path, (6, 5, 4, 3), compression="gzip")
    ps.open(path, fields=[NAME], index_dir=folder)
    monkeypatch.setattr(codecs, "is_available", lambda codec: False)
    ds = ps.open(path, fields=[NAME], index_dir=folder)
    assert np.array_equal(ds[:][NAME], values)
    assert isinstance(ds.store, H5pyStore)


def test_chunks_that_were_never_written_are_named_each_time(tmp_path, folder, read_policy, without_h5py):
    read_policy(save_table_from_chunks=1)
    path = tmp_path / "holes.h5"
    with h5py.File(path, "w") as file:
        betas = file.create_dataset(NAME, (6, 4), "<i2", chunks=(3, 1), fillvalue=7)
        betas[:3] = 1
    asked = {"fields": [NAME], "index_dir": folder}
    told = []
    for _ in range(2):
        with pytest.raises(Missing, match=r"4 of 8 chunks are there\); .* fill value 7") as refused:
            ps.open(path, **asked)
        told.append(str(refused.value))
        without_h5py()
    assert told[0] == told[1]
    assert (ps.open(path, allow_fill=True, **asked)[:][NAME][3:] == 7).all()
    assert len(ps.open(path, on_error="skip", **asked)) == 6


def test_tables_of_earlier_versions_are_made_again(small, folder, walks, monkeypatch):
    save = saved_chunks.save
    monkeypatch.setattr(saved_chunks, "save", lambda *given, about, **options: save(*given, **options))
    ps.open(small, fields=[NAME], index_dir=folder)
    monkeypatch.setattr(saved_chunks, "save", save)
    del walks[:]
    for _ in range(2):
        assert_opens(small, folder, fields=[NAME])
    assert len(walks) == 1


def test_a_file_worth_saving_is_saved_as_it_comes(large, folder, walks):
    path, values = large
    for _ in range(2):
        assert np.array_equal(ps.open(path, index_dir=folder)[:][NAME], values)
    assert len(walks) == 1


def test_a_file_of_few_chunks_is_not_worth_it(tmp_path, folder):
    voxel_major(tmp_path / "few.h5", (6, 5, 4, 3))
    assert_opens(tmp_path / "few.h5", folder)
    assert saved(folder) == []


def test_each_axis_of_rows_has_a_table_of_its_own(small, folder, walks):
    values = through_h5py(small)
    for _ in range(2):
        for axis in range(4):
            got = ps.open(small, index_dir=folder, row_axis=axis)[:][NAME]
            assert np.array_equal(got, np.moveaxis(values, axis, 0))
    assert walks == [(f"/{NAME}", axis) for axis in range(4)]
    assert len(saved(folder)) == 4


def test_each_dataset_has_a_table_of_its_own(tmp_path, small, folder, walks):
    with h5py.File(small, "a") as file:
        file.create_dataset("other", data=-file[NAME][()], chunks=(2, 5, 2, 3))
    values = through_h5py(small)
    for _ in range(2):
        got = ps.open(small, index_dir=folder)[:]
        assert np.array_equal(got[NAME], values)
        assert np.array_equal(got["other"], -values)
    assert len(walks) == 2


def test_files_of_the_same_bytes_have_tables_of_their_own(small, folder, walks):
    copy = small.with_name("copy.h5")
    shutil.copy2(small, copy)
    for path in (small, copy, small, copy):
        assert_opens(path, folder)
    assert len(walks) == 2


def test_a_relative_path_finds_the_table_of_the_absolute_one(small, folder, walks, monkeypatch):
    assert_opens(small, folder)
    monkeypatch.chdir(small.parent)
    assert_opens(small.name, folder)
    assert len(walks) == 1


def test_a_growing_file_has_no_table_that_lasts(small, folder):
    assert_opens(small, folder, swmr=True)
    assert saved(folder) == []


# Other data under the same name.


def with_time(path, change):
    """Change a file so that its size and time stay as they were."""
    before = os.stat(path)
    change(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = os.stat(path)
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)


def longer(path):
    with h5py.File(path, "w") as file:
        file.create_dataset(NAME, data=np.ones((7, 5, 4, 3), "<f4"), chunks=(7, 1, 1, 1))


def later(path):
    with h5py.File(path, "a") as file:
        file[NAME][...] = 3
    os.utime(path, ns=(os.stat(path).st_atime_ns, os.stat(path).st_mtime_ns + 1))


def earlier(path):
    os.utime(path, ns=(0, 0))


def other_first_bytes(path):
    def change(path):
        with h5py.File(path, "a") as file:
            file.attrs.modify("session", 2)

    with_time(path, change)


def other_last_bytes(path):
    def change(path):
        with open(path, "r+b") as file:
            file.seek(-3, os.SEEK_END)
            file.write(b"\x01\x02\x03")

    with_time(path, change)


def moved_chunks(path):
    """The same file in every respect, but its chunks were written in another order."""

    def change(path):
        values = through_h5py(path)
        with h5py.File(path, "w") as file:
            file.attrs["session"] = 1
            dataset = file.create_dataset(NAME, values.shape, values.dtype, chunks=(values.shape[0], 1, 1, 1))
            for voxel in reversed(list(np.ndindex(values.shape[1:]))):
                dataset[(slice(None), *voxel)] = values[(slice(None), *voxel)]

    with_time(path, change)


@pytest.mark.parametrize(
    "change", [longer, later, earlier, other_first_bytes, other_last_bytes, moved_chunks], ids=lambda f: f.__name__
)
def test_a_rewritten_file_is_walked_through_anew(small, folder, walks, change):
    assert_opens(small, folder)
    before = small.read_bytes()
    change(small)
    if change in (other_first_bytes, other_last_bytes):
        ends = [small.read_bytes()[part] == before[part] for part in (slice(4096), slice(-4096, None))]
        assert ends == [change is other_last_bytes, change is other_first_bytes], "only one of its ends is another"
    assert_opens(small, folder)
    assert len(walks) == 2
    assert_opens(small, folder)
    assert len(walks) == 2, "the new table took the place of the old one"
    assert len(saved(folder)) == 1


# Damage.


def header_of(path):
    raw = path.read_bytes()[: saved_tables.COLUMNS_AT]
    return json.loads(raw[raw.index(b"{") :].split(b"\n")[0])


def with_header(path, text):
    """Put another text in the place of a saved table's header; what comes before and after stays."""
    raw = path.read_bytes()
    head = raw[: raw.index(b"{")] + text + b"\n"
    assert len(head) <= saved_tables.COLUMNS_AT
    path.write_bytes(head.ljust(saved_tables.COLUMNS_AT, b" ") + raw[saved_tables.COLUMNS_AT :])


def with_fact(name, value):
    """Damage to one entry of the header; the rest of it, its key included, is as it was saved."""

    def damage(path):
        header = header_of(path)
        part = header if name in header else header["header"]
        part[name] = value(part[name])
        with_header(path, json.dumps(header).encode())

    return damage


def without_fact(name):
    def damage(path):
        header = header_of(path)
        del (header if name in header else header["header"])[name]
        with_header(path, json.dumps(header).encode())

    return damage


def bytes_changed(change):
    return lambda path: path.write_bytes(change(path.read_bytes()))


def header_changed(text):
    return lambda path: with_header(path, text)


HEADER_DAMAGE = {
    "empty": bytes_changed(lambda raw: b""),
    "a few bytes": bytes_changed(lambda raw: raw[:10]),
    "the magic alone": bytes_changed(lambda raw: raw[: len(saved_tables.MAGIC)]),
    "the header cut": bytes_changed(lambda raw: raw[: len(saved_tables.MAGIC) + 40]),
    "no columns": bytes_changed(lambda raw: raw[: saved_tables.COLUMNS_AT]),
    "columns cut": bytes_changed(lambda raw: raw[:-1]),
    "columns longer": bytes_changed(lambda raw: raw + b"x"),
    "wrong magic": bytes_changed(lambda raw: b"P" + raw[1:]),
    "a later version": bytes_changed(lambda raw: raw.replace(b"columns 1", b"columns 2", 1)),
    "zeros": bytes_changed(lambda raw: bytes(len(raw))),
    "noise": bytes_changed(lambda raw: saved_tables.MAGIC + np.random.default_rng(0).bytes(len(raw))),
    "not JSON": header_changed(b"key = 1"),
    "no line": header_changed(b""),
    "half a header": header_changed(b'{"key": "ab'),
    "not text": header_changed(b'{"key": "\xff\xfe"}'),
    "foreign JSON": header_changed(b'{"name": "somebody else\'s", "version": 3}'),
    "a list": header_changed(b"[1, 2, 3]"),
    "a number": header_changed(b"7"),
    "null": header_changed(b"null"),
    "nested without end": header_changed(b"[" * 60_000),
    "another key": with_fact("key", lambda key: key[::-1]),
    "another size": with_fact("size", lambda size: size + 1),
    **{f"no {name}": without_fact(name) for name in ("key", "size", "shape", "columns", "longest", "missing", "end")},
    "shape of one axis": with_fact("shape", lambda shape: [60]),
    "shape of text": with_fact("shape", lambda shape: ["a", "b"]),
    "shape turned": with_fact("shape", lambda shape: shape[::-1]),
    "shape smaller": with_fact("shape", lambda shape: [1, shape[1] - 1]),
    "columns a list": with_fact("columns", lambda columns: []),
    "columns none": with_fact("columns", lambda columns: {}),
    "columns of objects": with_fact("columns", lambda columns: {name: ["O", 0] for name in columns}),
    "columns of another checksum": with_fact("columns", lambda columns: {"offsets": ["int64", 1]}),
    "longest infinite": with_fact("longest", lambda _: float("inf")),
    "longest smaller": with_fact("longest", lambda longest: longest - 1),
    "length another": with_fact("length", lambda length: length + 1),
    "some missing": with_fact("missing", lambda missing: missing + 1),
    "an end beyond the file": with_fact("end", lambda end: 10 * end),
    "stored bytes another": with_fact("stored_bytes", lambda size: size + 1),
}


@pytest.mark.parametrize("damage", HEADER_DAMAGE.values(), ids=HEADER_DAMAGE)
def test_a_damaged_header_is_as_if_it_were_not_there(small, folder, walks, damage):
    first = assert_opens(small, folder)
    (name,) = saved(folder)
    damage(folder / name)
    again = assert_opens(small, folder)
    assert len(walks) == 2
    assert again.fingerprint == first.fingerprint
    assert_opens(small, folder)
    assert len(walks) == 2, "a whole table took the place of the damaged one"
    assert saved(folder) == [name]


@pytest.mark.parametrize("at", [saved_tables.COLUMNS_AT, saved_tables.COLUMNS_AT + 100, -1])
def test_damaged_columns_are_refused_once(small, folder, walks, at):
    assert_opens(small, folder)
    (name,) = saved(folder)
    raw = bytearray((folder / name).read_bytes())
    raw[at] ^= 1
    (folder / name).write_bytes(raw)
    ds = ps.open(small, index_dir=folder)
    with pytest.raises(Corrupt) as refused:
        ds[:]
    for text in (str(folder / name), "saved table", "removed", "open the dataset again"):
        assert text in str(refused.value)
    assert saved(folder) == [], "so that it cannot be in the way again"
    assert_opens(small, folder)
    assert len(walks) == 2
    assert saved(folder) == [name]


def test_a_table_that_is_gone_before_it_is_needed(small, folder):
    assert_opens(small, folder)
    (name,) = saved(folder)
    ds = ps.open(small, index_dir=folder)
    (folder / name).unlink()
    with pytest.raises(Corrupt, match=r"saved table .*open the dataset again"):
        ds[:]
    assert_opens(small, folder)


def test_a_table_in_use_outlives_its_file(small, folder):
    ds = assert_opens(small, folder)
    shutil.rmtree(folder)
    assert np.array_equal(ds[::-1][NAME], through_h5py(small)[::-1])


# Where tables are kept.


def test_a_folder_that_cannot_be_made(small, tmp_path, walks):
    (tmp_path / "file").write_text("in the way")
    for _ in range(2):
        ds = assert_opens(small, tmp_path / "file" / "tables")
        assert isinstance(table_of(ds), KnownTable)
    assert len(walks) == 2


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is closed to this user")
def test_a_folder_that_cannot_be_written(small, folder):
    folder.mkdir(mode=0o500)
    assert_opens(small, folder)
    assert saved(folder) == []


@pytest.mark.parametrize("step", ["os.replace", "tempfile.mkstemp"])
def test_a_disk_that_is_full(small, folder, monkeypatch, step):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(step, full)
    assert_opens(small, folder)
    assert saved(folder) == [], "nothing half-written stays behind"


def test_nothing_is_written_where_that_is_not_wanted(small, tmp_path, walks, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    before = sorted(os.listdir(tmp_path))
    for _ in range(2):
        assert_opens(small, False)
    assert sorted(os.listdir(tmp_path)) == before
    assert len(walks) == 2


def test_the_cache_folder_of_the_environment(small, tmp_path, walks, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    for _ in range(2):
        assert_opens(small, None)
    assert len(walks) == 1
    assert len(saved(tmp_path / "cache" / "index")) == 1


@pytest.mark.skipif(os.name == "nt", reason="folders are named otherwise there")
def test_the_cache_folder_of_the_user(small, tmp_path, monkeypatch):
    monkeypatch.delenv("PENSTOCK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "of mine"))
    assert_opens(small, None)
    assert len(saved(tmp_path / "of mine" / "penstock" / "index")) == 1
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert saved_chunks.default_folder() == str(tmp_path / ".cache" / "penstock" / "index")


@pytest.mark.skipif(os.name == "nt", reason="modes mean little there")
def test_tables_are_private(small, folder):
    assert_opens(small, folder)
    (name,) = saved(folder)
    assert os.stat(folder).st_mode & 0o077 == 0
    assert os.stat(folder / name).st_mode & 0o077 == 0


# Many at once.


def test_threads_that_save_at_once_leave_one_whole_table(small, folder):
    file, table = identify(str(small)), table_of(ps.open(small, index_dir=False))
    together = threading.Barrier(8)
    found = []

    def save():
        together.wait()
        for _ in range(10):
            kept = saved_chunks.save(str(folder), file, f"{NAME} along 0", table, from_chunks=1)
            found.append(
                isinstance(kept, saved_chunks.SavedChunkTable) and np.array_equal(kept.find(0, slice(None))[0], whole)
            )

    whole = table.find(0, slice(None))[0]
    threads = [threading.Thread(target=save) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 80
    assert len(saved(folder)) == 1
    assert saved(folder)[0].endswith(".table")


def test_processes_that_save_at_once_leave_one_whole_table(large, folder, walks):
    path, values = large
    spawn = multiprocessing.get_context("spawn")
    meeting = spawn.Barrier(2)
    with spawn.Pool(2, operator.methodcaller("wait"), (meeting,)) as pool:
        opened = pool.map(functools.partial(ps.open, index_dir=folder), [path] * 4, chunksize=1)
    assert len(saved(folder)) == 1
    assert saved(folder)[0].endswith(".table"), "and nothing half-written"
    for ds in opened:
        assert isinstance(table_of(ds), saved_chunks.SavedChunkTable)
        assert np.array_equal(ds[[3, 0]][NAME], values[[3, 0]])
    assert np.array_equal(ps.open(path, index_dir=folder)[:][NAME], values)
    assert walks == []


def test_a_dataset_with_a_saved_table_reads_in_another_process(large, folder):
    path, values = large
    roi = values[0] > 1
    ds = ps.open(path, index_dir=folder).select_within(NAME, roi)
    ds[0]  # the mapping stays here
    sent = len(pickle.dumps(ps.open(path, index_dir=folder)))
    assert sent < 8 * roi.size, f"the table itself is not sent ({sent:,} bytes)"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        got = pool.apply(operator.getitem, (ds, [5, 2, 5]))
    assert np.array_equal(got[NAME], values[[5, 2, 5]][:, roi])


# What a table takes.


def test_memory_of_tables(small, folder, tmp_path):
    chunks = 60
    assert ps.open(small, index_dir=False).store.index_bytes == 8 * chunks, "all chunks have one length"
    packed = tmp_path / "packed.h5"
    voxel_major(packed, (600, 5, 4, 3), compression="gzip")
    known = ps.open(packed, index_dir=False).store
    assert isinstance(known._arrays[NAME].table.lengths, np.ndarray), "lengths differ"
    assert 8 * chunks < known.index_bytes <= 16 * chunks
    odd_one(tmp_path / "odd.h5")
    assert ps.open(tmp_path / "odd.h5", index_dir=False, allow_fill=True).store.index_bytes <= 16 * chunks
    for path in (small, packed):
        assert ps.open(path, index_dir=folder).store.index_bytes == 0, "the system may drop what is mapped"


# Tables with everything in them.


def odd_one(path):
    """Chunks compressed, not compressed though they should be, and never written: 20 of each."""
    rng = np.random.default_rng(3)
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset(
            NAME, (6, 5, 4, 3), "<i2", chunks=(6, 1, 1, 1), compression="gzip", shuffle=True, fillvalue=-7
        )
        for number, voxel in enumerate(np.ndindex(5, 4, 3)):
            values = rng.integers(-5, 5, 6).astype("<i2")
            if number % 3 == 0:
                dataset[(slice(None), *voxel)] = values
            elif number % 3 == 1:
                dataset.id.write_direct_chunk((0, *voxel), values.tobytes(), filter_mask=0b11)


@pytest.mark.parametrize("axis", range(4))
def test_chunks_never_written_and_filters_left_out_survive(small, tmp_path, folder, walks, axis):
    path = tmp_path / "odd.h5"
    odd_one(path)
    expected = np.moveaxis(through_h5py(path), axis, 0)
    for _ in range(2):
        ds = ps.open(path, index_dir=folder, allow_fill=True, row_axis=axis)
        table = table_of(ds)
        assert isinstance(table, saved_chunks.SavedChunkTable)
        assert (table.missing, table.has_skipped) == (20, True)
        assert np.array_equal(ds[:][NAME], expected)
        offsets, lengths, skipped = (np.concatenate(column) for column in zip(*_rows(table), strict=True))
        assert np.count_nonzero(offsets == NEVER_WRITTEN) == 20
        assert np.count_nonzero(skipped == 0b11) == 20
        assert set(lengths[skipped == 0b11].tolist()) == {12}
    assert len(walks) == 1


def _rows(table):
    return [table.find(block, slice(None)) for block in range(table.shape[0])]


def test_summing_up_a_large_table_takes_little_memory():
    import tracemalloc

    offsets = np.arange(1_000_000).reshape(1, -1) * 100
    offsets[0, 7] = -1
    tracemalloc.start()
    table = KnownTable(offsets, 90)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (table.missing, table.end) == (1, 99_999_990)
    assert peak < 1_000_000
