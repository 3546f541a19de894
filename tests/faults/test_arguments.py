"""Arguments of a wrong kind are refused, by name, before anything is read; numbers of numpy's are numbers."""

import json
import os

import h5py
import numpy as np
import pytest
import torch

import penstock as ps
from penstock import webdataset as wds
from penstock.errors import ConfigError
from penstock.nsd import synthesize
from penstock.remote import RemoteOptions

ROWS = 12
NO_FLAGS = ["no", "", [], [3, 1, 2], 2, 0.5, None, np.array([True, False])]
NO_NUMBERS = [True, 2.5, "2", "", [2], None, float("nan"), -1, 10.0, np.float64(2), np.array([1, 2]), object()]
NO_TEXTS = ["other", "", None, True, 1, ["raise"], np.array(["raise", "skip"])]


LOADER = {
    "batch_size": [*NO_NUMBERS, 0],
    "shuffle": [*NO_FLAGS, torch.utils.data.RandomSampler(range(3)), np.array([3, 1, 2])],
    "seed": [*NO_NUMBERS, 10**400, 10**5000],
    "memory": [True, 2.5, "two", "", [2], -1, 0, float("nan")],
    "threads": [*NO_NUMBERS, 0],
    "columns": ["x", 5, ["x", 5], [["x"]], True],
    "window": [True, 2.5, "two", [2], -1, 0, np.array([1, 2])],
    "on_error": NO_TEXTS,
    "max_errors": [value for value in NO_NUMBERS if value is not None],
    "nan": NO_TEXTS,
    "drop_last": NO_FLAGS,
    "tail": NO_TEXTS,
    "output": NO_TEXTS,
    "device": ["no such", 2.5, ["cpu"], True],
    "progress": NO_FLAGS,
}
CASES = [(name, value) for name, values in LOADER.items() for value in values]


def ids(value):
    return value if isinstance(value, str) else type(value).__name__


def dataset():
    return ps.from_arrays(x=np.arange(ROWS))


def one(**options):
    return ps.Loader(dataset(), **{"batch_size": 2, "memory": "64MiB", "output": "numpy", **options})


def several(**options):
    options = {"batch_size": 2, "memory": "64MiB", "output": "numpy", "mode": "together", **options}
    return ps.MultiLoader({"a": dataset()}, **options)


@pytest.mark.parametrize("make", [one, several])
@pytest.mark.parametrize(("name", "value"), CASES, ids=ids)
def test_loaders(make, name, value):
    output = {"output": "torch"} if name == "device" else {}
    with pytest.raises(ConfigError, match=name):
        make(**{**output, name: value})


@pytest.mark.parametrize("make", [one, several])
@pytest.mark.parametrize("value", NO_NUMBERS, ids=ids)
def test_ranks(make, value):
    with pytest.raises(ConfigError, match="rank"):
        make(rank=value, world_size=2)
    with pytest.raises(ConfigError, match="world_size"):
        make(rank=0, world_size=value)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (0, 0), (5, 1)])
def test_a_rank_that_there_is_not(rank, world_size):
    with pytest.raises(ConfigError, match="world_size"):
        one(rank=rank, world_size=world_size)


@pytest.mark.parametrize("given", [[3, 1, 2], torch.utils.data.RandomSampler(range(3)), range(3)], ids=ids)
def test_rows_given_as_an_order_are_told_where_they_belong(given):
    with pytest.raises(ConfigError, match=r"ds\.select\(rows\), shuffle=False.*penstock\.Order"):
        one(shuffle=given)


@pytest.mark.parametrize("ds", ["a.npy", None, [1, 2], np.arange(3)], ids=ids)
def test_what_is_no_dataset(ds):
    with pytest.raises(ConfigError, match=r"expected a dataset, as penstock\.open"):
        ps.Loader(ds, batch_size=2)
    with pytest.raises(ConfigError, match="expected"):
        ps.concat(ds)


MULTI = [("mode", value) for value in NO_TEXTS] + [("samples", value) for value in [*NO_TEXTS, 3, {"a": 2.5}]]


@pytest.mark.parametrize(("name", "value"), MULTI, ids=ids)
def test_several_datasets(name, value):
    with pytest.raises(ConfigError, match=name):
        several(**{name: value})


PLAIN = {
    "batch_size": np.int32(5), "seed": np.uint64(2**63), "threads": np.int8(2), "memory": np.int64(1 << 26),
    "window": np.int16(4), "max_errors": np.int64(0), "drop_last": np.True_, "shuffle": 1, "progress": 0,
    "rank": np.int64(1), "world_size": np.int64(2), "columns": (name for name in ["x"]),
}  # fmt: skip


@pytest.mark.parametrize("make", [one, several])
def test_numbers_of_numpy_are_numbers(make):
    plain = dict(PLAIN, columns=["x"]) if make is several else PLAIN
    with make(**plain) as loader:
        state = json.loads(json.dumps(loader.state_dict()))
        assert sum(1 for _ in loader) == len(loader)
        loader.load_state_dict(state)
    with make(batch_size=5, seed=2**63, shuffle=True) as same:
        same.load_state_dict(state)


OPEN = {
    "fields": ["data", 5, [5], [], ()],
    "row_axis": [True, 1.5, "0", None, {"data": 0.5}, 1, -1, {"data": 0}],
    "max_open_files": [value for value in NO_NUMBERS if value is not None],
    "allow_fill": NO_FLAGS,
    "allow_external": ["folder", 5, [5], b"x"],
    "swmr": NO_FLAGS,
    "on_error": NO_TEXTS,
    "index_dir": [True, 5, ["x"], ""],
    "cache_dir": [True, 5, ["x"], False, ""],
    "cache_bytes": [2.5, True, "many"],
    "manifest": [True, 5, ""],
    "size": [True, 2.5, "8", (8,), (8, 8.0), (0, 8), [8, True]],
    "fit": NO_TEXTS,
    "max_pixels": [*NO_NUMBERS, 0],
    "max_member_bytes": [True, 2.5, "many", None],
    "max_expansion": [*NO_NUMBERS, 0],
    "decoders": ["pfm", 5, [1], {5: len}],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in OPEN.items() for v in values], ids=ids)
def test_open(tmp_path, name, value):
    np.save(tmp_path / "a.npy", np.arange(ROWS))
    with pytest.raises(ConfigError, match=name):
        ps.open(tmp_path / "a.npy", **{name: value})


def test_axes_of_fields_that_are_not_there(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["betas"] = np.zeros((4, 6))
        file["names"] = ["text"] * 6
    with pytest.raises(ConfigError, match=r"row_axis: .*a\.h5 has no field 'beta' among 'betas'"):
        ps.open(tmp_path / "a.h5", row_axis={"beta": 1})
    with pytest.warns(ps.FieldsLeftOut):
        assert len(ps.open(tmp_path / "a.h5", row_axis={"betas": 1, "names": 0})) == 6


@pytest.mark.parametrize("path", [5, None, True, b"a.npy", {"a": 1}, [5], ["a.npy", None], 2.5], ids=ids)
def test_paths(path):
    with pytest.raises(ConfigError, match="path"):
        ps.open(path)
    with pytest.raises(ConfigError, match="path"):
        ps.open_raw(path, "int8")


def rows_and_columns():
    return ps.from_arrays(x=np.arange(24.0).reshape(ROWS, 2))


METHODS = {
    "rows in steps of nothing": lambda ds: ds[::0],
    "rows from a text": lambda ds: ds["a":],
    "gather mean": lambda ds: ds.gather([[0, 1]], mean="no"),
    "gather absent": lambda ds: ds.gather([[0, 1]], absent=True),
    "gather rows": lambda ds: ds.gather([[0.5, 1.7]]),
    "map": lambda ds: ds.map("x"),
    "pad to a truth": lambda ds: ds.pad("x", to=True),
    "pad to a float": lambda ds: ds.pad("x", to=4.0),
    "permute": lambda ds: ds.permute("x", False),
    "permute texts": lambda ds: ds.permute("x", "0"),
    "only": lambda ds: ds.only(["x"]),
    "rename": lambda ds: ds.rename(y=["x"]),
    "cast": lambda ds: ds.cast(["x"], "float32"),
    "orders": lambda ds: ps.Shuffled(2.5),
    "in order": lambda ds: ps.InOrder("3"),
    "resampled": lambda ds: ps.Resampled(True, 3),
    "blocks": lambda ds: ps.BlockShuffled(12, np.array([0, 6]), 1.5),
    "raw offset": lambda ds: ps.open_raw("a", "int8", offset=True),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_datasets_and_orders(method):
    with pytest.raises(ConfigError):
        method(rows_and_columns())


NO_FUNCTIONS = ["no", 2, [len], True]
NO_DICTS = ["no", 2, ["a"], {5: "x"}, True]
NO_OPTIONS = ["no", 2, {"retries": 3}, True]
NO_PATHS = [5, True, b"x", ["x"], {"a": 1}]
MANY = 10**400

OTHERS = {
    "convert": (
        lambda folder, **how: ps.convert(dataset(), **{"to": folder / "out.npy", "executor": "serial", **how}),
        {
            "to": [*NO_PATHS, None], "dry_run": NO_FLAGS, "overwrite": NO_FLAGS, "restart": NO_FLAGS,
            "verify": [*NO_FLAGS, "all"], "only_finish": NO_FLAGS, "progress": NO_FUNCTIONS, "announce": NO_FUNCTIONS,
            "attributes": [*NO_DICTS, {"x": 5}], "compression": [5, True, ["none"], np.array(["none"])],
        },
    ),
    "plan": (
        lambda folder, **how: ps.plan(dataset(), **{"batch_size": 2, "memory": "64MiB", "measure": 0, **how}),
        {"habits": [*NO_OPTIONS, 0, ""], "measure": ["0", None, -1, float("nan"), True, [1]], "files": [*NO_NUMBERS, 0],
         "threads": [10**18, MANY]},
    ),
    "plan of shapes": (
        lambda folder, **how: ps.plan({"x": ((10, 4), "f4")}, **{"batch_size": 2, "memory": "64MiB", **how}),
        {"habits": NO_OPTIONS, "files": [*NO_NUMBERS, 0], "threads": [*NO_NUMBERS, 0, 10**18, MANY]},
    ),
    "write_manifest": (
        lambda folder, **how: ps.write_manifest(**{"source": folder / "a.npy", "path": folder / "m.json", **how}),
        {"source": [5, True, b"a", {"a": 1}, None], "path": NO_PATHS, "progress": [*NO_FUNCTIONS, None]},
    ),
    "verify": (
        lambda folder, **how: ps.verify(folder / "a.npy", **how),
        {"manifest": NO_PATHS, "progress": [*NO_FUNCTIONS, None], "memory": [0, "", [], np.array([1, 2])]},
    ),
    "options": (
        lambda folder, **how: RemoteOptions(**how),
        {
            "retries": [*NO_NUMBERS], "redirects": [*NO_NUMBERS], "headers": [*NO_DICTS, {"A": 5}], "store": NO_DICTS,
            "redirect_hosts": ["host", 5, [5], True], "deadline_s": [True, 0, "5"],
        },
    ),
    "open remote": (lambda folder, **how: ps.open(folder / "a.npy", **how), {"remote": NO_OPTIONS}),
    "verbs remote": (lambda folder, **how: wds.WebDataset("a.tar", **how), {"remote": NO_OPTIONS, "cache_dir": [5]}),
    "WebDataset": (
        lambda folder, **how: wds.WebDataset("a.tar", **how),
        {"repeat": NO_FLAGS, "detshuffle": NO_FLAGS, "nodesplitter": NO_FUNCTIONS, "workersplitter": NO_FUNCTIONS},
    ),
    "ResampledShards": (
        lambda folder, **how: wds.ResampledShards("a.tar", **how),
        {
            "deterministic": NO_FLAGS, "empty_check": NO_FLAGS, "worker_seed": NO_FUNCTIONS,
            "nshards": [value for value in NO_NUMBERS if value is not None], "max_urls": [*NO_NUMBERS, 0],
        },
    ),
    "TarWriter": (
        lambda folder, **how: wds.TarWriter(**{"fileobj": folder / "a.tar", **how}),
        {
            "fileobj": [5, None, True, {"a": 1}], "keep_meta": NO_FLAGS, "mode": [*NO_NUMBERS, 10**9],
            "user": [5, None, ["a"]], "group": [5], "mtime": ["0", -1, float("nan"), True, [1]], "index_dir": NO_PATHS,
            "compress": [["gz"], 5.5, "rar"],
        },
    ),
    "ShardWriter": (
        lambda folder, **how: wds.ShardWriter(**{"pattern": f"{folder}/%d.tar", **how}),
        {
            "pattern": [5, None, "a.tar", ["%d"]], "maxcount": ["5", 0, None, True, [5], float("nan")],
            "maxsize": ["5GB", 0, None, True], "start_shard": NO_NUMBERS, "post": NO_FUNCTIONS, "opener": NO_FUNCTIONS,
        },
    ),
    "synthesize": (
        lambda folder, **how: synthesize(folder / "nsd", **how),
        {
            "nifti": NO_FLAGS, "stimuli": NO_FLAGS, "coco": NO_NUMBERS, "seed": NO_NUMBERS, "progress": NO_FUNCTIONS,
            "signal": ["1", None, -1, float("nan"), True],
        },
    ),
}  # fmt: skip
OTHER_CASES = [
    (what, name, value) for what, (_, given) in OTHERS.items() for name, values in given.items() for value in values
]


@pytest.mark.parametrize(("what", "name", "value"), OTHER_CASES, ids=ids)
def test_other_functions(tmp_path, what, name, value):
    np.save(tmp_path / "a.npy", np.arange(ROWS))
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ConfigError, match=r"\S"):
        OTHERS[what][0](tmp_path, **{name: value})
    assert sorted(os.listdir(tmp_path)) == before


def test_what_may_hold_a_password_is_not_shown():
    for name in ("headers", "store"):
        with pytest.raises(ConfigError) as refused:
            RemoteOptions(**{name: "Bearer hidden"})
        assert "hidden" not in str(refused.value)


def test_hosts_may_be_any_series_of_names():
    assert list(RemoteOptions(redirect_hosts=(host for host in ["a", "b"])).redirect_hosts) == ["a", "b"]


@pytest.mark.parametrize("make", [one, several])
def test_more_threads_than_any_machine_has(make):
    with pytest.raises(ConfigError, match=r"threads=.*from 1 to 10000"):
        make(threads=10**18)


def test_a_shape_that_is_none():
    for given in (5, "x", (5,), ((3, "a"), "f4"), ((3, 2.5), "f4")):
        with pytest.raises(ConfigError, match="expected a shape and a dtype"):
            ps.plan({"x": given}, batch_size=2)


VERBS = {
    "shuffle": lambda ds: ds.shuffle("many"),
    "shuffle by half": lambda ds: ds.shuffle(2.5),
    "initial": lambda ds: ds.shuffle(5, initial="x"),
    "batched": lambda ds: ds.batched("two"),
    "batched by truth": lambda ds: ds.batched(True),
    "batched, in part": lambda ds: ds.batched(2, partial="no"),
    "listed": lambda ds: ds.listed("2"),
    "slice": lambda ds: ds.slice(1.5),
    "slice by nothing": lambda ds: ds.slice(),
    "slice by none": lambda ds: ds.slice(0, 5, 0),
    "rsample": lambda ds: ds.rsample("half"),
    "rsample of nan": lambda ds: ds.rsample(float("nan")),
    "with_epoch": lambda ds: ds.with_epoch(2.5),
    "repeat": lambda ds: ds.repeat("twice"),
    "with_length": lambda ds: ds.with_length(2.5),
    "longest": lambda ds: wds.RoundRobin([ds], longest="no"),
    "longest draws": lambda ds: wds.RandomMix([ds], longest="no"),
    **{
        f"{name}={value!r}": lambda ds, name=name, value=value: wds.WebDataset("a.tar", **{name: value})
        for name, value in (
            *(("resampled", "no"), ("empty_check", "no"), ("shardshuffle", "no"), ("shardshuffle", 2.5)),
            *(("seed", "x"), ("handler", "warn"), ("select_files", "a"), ("max_member_bytes", 2.5)),
            *(("cache_size", "x"),),
        )
    },
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS.keys())
def test_verbs(verb):
    samples = wds.FluidWrapper([{"__key__": str(row), "x": row} for row in range(9)])
    with pytest.raises(ConfigError):
        list(verb(samples))


@pytest.mark.parametrize(
    "options", [{"to_tuple": "voxels"}, {"val_batch_size": 0}, {"batch_size": 2.5}, {"world_size": 2.5}], ids=str
)
def test_loaders_of_shards(options, tmp_path):
    path = str(tmp_path / "a.tar")
    with wds.TarWriter(path) as to:
        to.write({"__key__": "0", "nsdgeneral.npy": np.zeros(3, np.float32)})
    with pytest.raises(ConfigError, match=r"batch_size|to_tuple|world_size"):
        wds.get_dataloaders(**{"batch_size": 1, "to_tuple": ["voxels"], "train_url": path, "val_url": path} | options)


@pytest.mark.parametrize("value", [10**5000, "x" * 10_000, object()], ids=["long number", "long text", "object"])
def test_errors_are_short(value):
    with pytest.raises(ConfigError) as refused:
        one(batch_size=value if not isinstance(value, int) else -value)
    assert len(str(refused.value)) < 400
