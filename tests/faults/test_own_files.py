"""Files that penstock wrote for itself, damaged: saved tables, manifests, notes of a conversion.

Whatever becomes of them, what is delivered is right, or an error of ours says which file it is; opening or converting
again then gives what is right.
"""

import shutil
import time

import h5py
import numpy as np
import pytest
from PIL import Image
from tests.faults.mutations import mutate, mutate_text

import penstock as ps
from penstock.conversion import tasks
from penstock.errors import ConvertFailed, PenstockError
from penstock.webdataset import ShardWriter

ROWS = 30
VALUES = np.random.default_rng(3).integers(1, 50, (ROWS, 8), dtype=np.int16)
CPU_S = 5.0


def hdf5(folder):
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", data=VALUES, chunks=(1, 2), compression="gzip")
    return folder / "a.h5"


def tar(folder):
    with ShardWriter(str(folder / "a-%d.tar"), maxcount=ROWS, index_dir=False) as writer:
        for row, values in enumerate(VALUES):
            writer.write({"__key__": f"{row:03d}", "x.npy": values, "cls": row})
    return folder / "a-0.tar"


def pictures(folder):
    for row in range(6):
        (folder / "pictures" / str(row % 2)).mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(row).integers(0, 255, (20, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "pictures" / str(row % 2) / f"{row}.png")
    return folder / "pictures"


SOURCES = {"hdf5": hdf5, "tar": tar, "pictures": pictures}


def delivered(path, **options):
    ds = ps.open(path, **options)
    with ps.Loader(ds, batch_size=4, memory="64MiB", threads=2, output="numpy") as loader:
        found = [{name: np.array(values) for name, values in batch.items()} for batch in loader]
    return {name: np.concatenate([batch[name] for batch in found]).tobytes() for name in ds.fields}


def damaged(data, rng, how):
    return mutate_text(data, rng) if how == "words" else mutate(data, rng, [(0, 400)])


def check_tables(folder, kind, seeds, read_policy):
    read_policy(save_table_from_chunks=1)
    path, tables = SOURCES[kind](folder), folder / "tables"
    expected = delivered(path, index_dir=tables)
    saved = {each: each.read_bytes() for each in tables.iterdir()}
    assert saved, "nothing was saved"
    for seed in seeds:
        rng = np.random.default_rng([seed, *kind.encode()])
        table = sorted(saved)[int(rng.integers(len(saved)))]
        table.write_bytes(damaged(saved[table], rng, "bytes" if rng.random() < 0.8 else "words"))
        began = time.process_time()
        try:
            assert delivered(path, index_dir=tables) == expected, f"{kind}, seed {seed}: other data"
        except PenstockError as error:
            assert str(table) in str(error), f"{kind}, seed {seed}: {error}"  # noqa: PT017
        assert delivered(path, index_dir=tables) == expected, f"{kind}, seed {seed}: the damage stays"
        assert time.process_time() - began < CPU_S
        for each, data in saved.items():
            each.write_bytes(data)


@pytest.mark.case(24)
@pytest.mark.parametrize("kind", SOURCES)
def test_damaged_tables_are_noticed(tmp_path, kind, read_policy):
    check_tables(tmp_path, kind, range(20), read_policy)


@pytest.mark.slow
@pytest.mark.case(24)
@pytest.mark.parametrize("kind", SOURCES)
def test_three_hundred_damaged_tables(tmp_path, kind, read_policy, any_seed):
    check_tables(tmp_path, kind, range(1000 * (any_seed + 1), 1000 * (any_seed + 1) + 300), read_policy)


def check_manifests(folder, seeds):
    """The data are whole: they come, or the manifest is said to be damaged, or to differ."""
    path = hdf5(folder)
    expected = delivered(path, index_dir=False)
    manifest = folder / "penstock-manifest.json"
    ps.write_manifest(path, manifest)
    whole, refused = manifest.read_bytes(), 0
    for seed in seeds:
        rng = np.random.default_rng([seed, 7])
        manifest.write_bytes(damaged(whole, rng, "words" if rng.random() < 0.5 else "bytes"))
        began = time.process_time()
        try:
            assert delivered(path, index_dir=False, manifest=manifest) == expected
        except PenstockError as error:
            refused += 1
            assert manifest.name in str(error), f"seed {seed}: {error}"  # noqa: PT017
        assert time.process_time() - began < CPU_S
    assert refused > len(seeds) / 2


@pytest.mark.case(24)
def test_damaged_manifests_are_refused(tmp_path):
    check_manifests(tmp_path, range(20))


@pytest.mark.slow
@pytest.mark.case(24)
def test_three_hundred_damaged_manifests(tmp_path, any_seed):
    check_manifests(tmp_path, range(1000 * (any_seed + 1), 1000 * (any_seed + 1) + 300))


class Interrupted(Exception):
    pass


def tree(folder):
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def check_conversions(folder, goal, seeds, monkeypatch):
    """Notes of an interrupted conversion, or what lies beside a finished one."""
    source = ps.open(hdf5(folder), index_dir=False)
    made, begun = folder / "made", folder / "begun"
    options = {"executor": "serial", "memory": "64MiB", "shard_bytes": 200}
    for each in (made, begun):
        each.mkdir()
    ps.convert(source, made / goal, **options)
    run, count = tasks.run_task, 0

    def stops(job, task):
        nonlocal count
        count += 1
        if count == 3:
            raise Interrupted
        return run(job, task)

    with monkeypatch.context() as patch:
        patch.setattr("penstock.conversion.attempt.run_task", stops)
        with pytest.raises(Interrupted):
            ps.convert(source, begun / goal, **options)
    expected = tree(made)
    for seed in seeds:
        rng = np.random.default_rng([seed, *goal.encode()])
        again = folder / "again"
        shutil.copytree(begun if rng.random() < 0.7 else made, again)
        notes = sorted(each for each in again.rglob("*.json") if "zarr.json" not in each.name)
        note = notes[int(rng.integers(len(notes)))]
        note.write_bytes(damaged(note.read_bytes(), rng, "words" if rng.random() < 0.5 else "bytes"))
        try:
            ps.convert(source, again / goal, **options)
        except (ConvertFailed, ps.errors.ConfigError):
            ps.convert(source, again / goal, **options, restart=True, overwrite=True)
        found = tree(again)
        assert {name: data for name, data in found.items() if name not in beside(goal)} == {
            name: data for name, data in expected.items() if name not in beside(goal)
        }, f"seed {seed}, {note.name}"
        assert ps.verify(again / goal, manifest=again / f"{goal}.manifest.json").sound or note.name in beside(goal)
        shutil.rmtree(again)


def beside(goal):
    """What may stay damaged: it says nothing that is delivered."""
    return f"{goal}.manifest.json", f"{goal}.provenance.json"


GOALS = ["out.zarr", "out.npy", "out.h5"]


@pytest.mark.case(24)
@pytest.mark.parametrize("goal", GOALS)
def test_damaged_notes_of_a_conversion(tmp_path, goal, monkeypatch):
    check_conversions(tmp_path, goal, range(6), monkeypatch)


@pytest.mark.slow
@pytest.mark.case(24)
@pytest.mark.parametrize("goal", GOALS)
def test_a_hundred_damaged_notes_of_a_conversion(tmp_path, goal, monkeypatch, any_seed):
    check_conversions(tmp_path, goal, range(1000 * (any_seed + 1), 1000 * (any_seed + 1) + 100), monkeypatch)
