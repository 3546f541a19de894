"""The names and modules of the ``webdataset`` package: all there, and with the same results as its own."""

import importlib
import io
import os
import pickle
import random
import types
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import webdataset as wds
from penstock.errors import ConfigError, Unsafe

MODULES = (
    *("autodecode", "cache", "compat", "extradatasets", "filters", "gopen", "handlers", "mix", "pipeline", "pytorch"),
    *("shardlists", "tariterators", "tenbin", "utils", "writer"),
)

# What the modules of the package keep for themselves: pieces of one file format, settings by environment, and
# decorations that nothing here uses.
LEFT_OUT = {
    "autodecode": {"default_decoder"},
    "cache": {"default_cache_dir", "default_cache_size", "verbose_cache"},
    "filters": {"dict2tuple", "tuple2dict"},
    "gopen": {"PIPE"},
    "pipeline": {"add_length_method"},
    "shardlists": {"check_pid_is_running", "envlookup", "get_pid_from_filename", "without_last_extension"},
    "tenbin": {
        *("bytedata", "bytelen", "check_acceptable_input_type", "check_infos", "decode_chunks", "decode_header"),
        *("decode_list", "encode_chunks", "encode_header", "encode_list", "long_to_short", "magic", "magic_bytes"),
        *("magic_str", "read_chunk", "roundup", "short_to_long", "str64", "unstr64", "write_chunk"),
    },
    "writer": {
        *("add_handlers", "bytestr", "cbor_dumps", "encode_based_on_extension1", "make_handlers"),
    },
}


def test_every_public_name_is_there(peer: Any) -> None:
    assert [name for name in dir(peer) if not name.startswith("_") and not hasattr(wds, name)] == []


@pytest.mark.parametrize("name", MODULES)
def test_every_module_is_there(peer: Any, name: str) -> None:
    theirs, ours = (importlib.import_module(f"{package}.{name}") for package in ("webdataset", "penstock.webdataset"))
    own = {
        each
        for each, value in vars(theirs).items()
        if not each.startswith("__")
        and not isinstance(value, types.ModuleType)
        and getattr(value, "__module__", theirs.__name__) == theirs.__name__
    }
    assert {each for each in own if not hasattr(ours, each)} == LEFT_OUT.get(name, set())


SAMPLES = [{"__key__": f"k{number}", "a.txt": b"x" * number, "cls": number, "b": None} for number in range(20)]
TUPLES = [(number, np.full(2, number), "x" * number) for number in range(20)]

FILTERS: dict[str, Callable[[Any], Any]] = {
    "_shuffle by a seed": lambda f: f._shuffle(iter(range(50)), 10, 5, seed=3),
    "_shuffle by an rng": lambda f: f._shuffle(iter(range(50)), 10, 5, random.Random(3)),
    "_select": lambda f: f._select(iter(range(9)), lambda x: x % 2),
    "_map": lambda f: f._map(iter(range(9)), lambda x: x * 2 if x % 3 else None),
    "_map with a handler": lambda f: f._map(iter(range(9)), lambda x: 1 // x, handler=lambda error: True),
    "_rename": lambda f: f._rename(iter(SAMPLES), text="c;a.txt", keep=False),
    "_rename_keys": lambda f: f._rename_keys(iter(SAMPLES), text="*.txt", keep_unselected=True),
    "_extract_keys": lambda f: f._extract_keys(iter(SAMPLES), "*.txt", "cls"),
    "_to_tuple": lambda f: f._to_tuple(iter(SAMPLES), "a.txt cls"),
    "_to_tuple, None allowed": lambda f: f._to_tuple(iter(SAMPLES), "cls", "b", none_is_error=False),
    "_map_dict": lambda f: f._map_dict([dict(each) for each in SAMPLES], cls=lambda x: x + 1),
    "_map_tuple": lambda f: f._map_tuple(iter(TUPLES), lambda x: x + 1, None),
    "_batched": lambda f: ([np.asarray(each).tolist() for each in batch] for batch in f._batched(iter(TUPLES), 6)),
    "_batched, a float": lambda f: (len(batch[0]) for batch in f._batched(iter(TUPLES), 12 / 2, partial=False)),
    "_batched, a half": lambda f: (len(batch[0]) for batch in f._batched(iter(TUPLES), 2.5)),
    "_batched, listed": lambda f: (len(batch) for batch in f._batched(iter(TUPLES), 6, collation_fn=None)),
    "_unlisted": lambda f: f._unlisted(iter([[1, 2], [3]])),
    "_unbatched": lambda f: f._unbatched(iter([([1, 2], [3, 4])])),
    "_associate": lambda f: f._associate([dict(each) for each in SAMPLES], {"k3": {"more": 1}}),
    "_associate by a function": lambda f: f._associate([dict(each) for each in SAMPLES], lambda key: {"more": key}),
    "_xdecode": lambda f: f._xdecode(
        [{"__key__": "k", "a.txt": b"x", "n.bin": b"\1"}], bin=lambda stream: stream.read(1)
    ),
    "_xdecode, some left": lambda f: f._xdecode([{"a.foo": b"x"}], must_decode=False),
    "getfirst": lambda f: [f.getfirst({"b": 1, "c": 2}, "a;b;c"), f.getfirst({}, "a", 7, missing_is_error=False)],
    "parse_field_spec": lambda f: f.parse_field_spec("jpg;png cls"),
    "transform_with": lambda f: f.transform_with([1, 2, 3], [str, None]),
    "pipeline": lambda f: f.pipeline([1, 2], lambda source: (x + 1 for x in source), list),
    "a filter of one's own": lambda f: f.pipelinefilter(lambda source, by: (x * by for x in source))(3)([1, 2]),
}


@pytest.mark.parametrize("case", FILTERS)
def test_filters(peer: Any, case: str) -> None:
    theirs, ours = (
        FILTERS[case](importlib.import_module(f"{package}.filters")) for package in ("webdataset", wds.__name__)
    )
    assert list(ours) == list(theirs)


def test_orders_by_a_seed(peer: Any) -> None:
    """Where a seed defines an order, it is the same one."""

    def orders(package: Any) -> Iterator[Any]:
        names = [f"{number}.tar" for number in range(40)]
        shards = package.DataPipeline(package.SimpleShardList(names, seed=17))
        yield from ([each["url"] for each in shards] for _ in range(2))
        shuffled = package.DataPipeline(package.SimpleShardList(names), package.detshuffle(10, seed=5))
        yield from ([each["url"] for each in shuffled] for _ in range(3))
        yield shuffled.stage(1).epoch
        yield list(package.DataPipeline(lambda: iter(range(30)), package.shuffle(8, seed=5)))
        drawn = package.ResampledShards(names, 25, seed=4, worker_seed=lambda: 3, deterministic=True)
        yield from ([each["url"] for each in drawn] for _ in range(2))

    assert list(orders(wds)) == list(orders(peer))


def test_an_epoch_that_is_set_decides_about_the_next_pass() -> None:
    stage = wds.detshuffle(10, seed=5, epoch=3)
    passes = wds.DataPipeline(lambda: iter(range(50)), stage)
    first = list(passes)
    assert stage.epoch == 4
    list(passes)
    stage.epoch = 3
    assert list(passes) == first == list(wds.detshuffle(10, seed=5, epoch=3).run(iter(range(50))))


def test_lists_that_draw_differ_outside_of_a_pipeline() -> None:
    lists = [wds.ResampledShards([str(number) for number in range(1000)]) for _ in range(2)]
    drawn = [[each["url"] for each in islice(source, 10)] for source in (*lists, lists[0])]
    assert drawn[0] != drawn[1]
    assert drawn[0] != drawn[2]


class TestTarIterators:
    """The steps from shards to samples, which programs put steps of their own between."""

    def samples(self, package: Any, pattern: str, eof: bool) -> list[Any]:
        steps = importlib.import_module(f"{package.__name__}.tariterators")
        streams = steps.url_opener(iter([{"url": each} for each in wds.expand_urls(pattern)]))
        files = list(steps.tar_file_expander(streams, **({} if eof else {"eof_value": None})))
        return [*(list(files) if eof else []), *steps.group_by_keys(iter(files))]

    @pytest.mark.parametrize("eof", [True, False])
    def test_the_same_as_theirs(self, peer: Any, numbered: Any, eof: bool) -> None:
        pattern = numbered([3, 0, 2])
        assert self.samples(wds, pattern, eof) == self.samples(peer, pattern, eof)

    def test_programs_from_before_there_was_an_end_mark(self, numbered: Any) -> None:
        steps = wds.tariterators
        members = steps.tar_file_expander(steps.url_opener(wds.SimpleShardList(numbered([2, 3]))))
        named = [steps.base_plus_ext(member["fname"])[0] for member in members]
        assert len([key for key in named if key is not None]) == 2 * 5

    @pytest.mark.parametrize("case", ["missing", "cut", "link"])
    def test_errors_go_to_the_handler(self, write_tar: Any, numbered: Any, tmp_path: Path, case: str) -> None:
        good = numbered([2])
        bad = str(tmp_path / "bad.tar")
        if case == "cut":
            whole = Path(write_tar("whole.tar", [("a.txt", b"x" * 5000), ("b.txt", b"x" * 5000)])).read_bytes()
            Path(bad).write_bytes(whole[:7000])
        if case == "link":
            import tarfile

            with tarfile.open(bad, "w") as tar:
                member = tarfile.TarInfo("a.txt")
                member.type, member.linkname = tarfile.SYMTYPE, "elsewhere"
                tar.addfile(member)
        heard: list[Exception] = []
        steps = wds.tariterators
        shards = [{"url": bad}, *wds.SimpleShardList(good)]

        def listen(error: Exception) -> bool:
            heard.append(error)
            return True

        streams = steps.url_opener(iter(shards), handler=listen)
        found = list(steps.group_by_keys(steps.tar_file_expander(streams, handler=listen)))
        assert [sample["__key__"] for sample in found][-2:] == ["000000", "000001"]
        assert len(heard) == 1
        assert case == "link" or isinstance(heard[0], OSError | importlib.import_module("tarfile").ReadError)
        with pytest.raises(type(heard[0])):
            list(steps.tar_file_expander(steps.url_opener(iter(shards))))


def test_mixing(peer: Any) -> None:
    for package in (wds, peer):
        assert list(package.mix.round_robin_longest(iter("ab"), iter("c"))) == ["a", "c", "b"]
        assert list(package.mix.round_robin_shortest(iter("ab"), iter("c"))) == ["a", "c", "b"]
    assert sorted(wds.mix.random_samples([iter("ab"), iter("c")], longest=True)) == ["a", "b", "c"]


def test_repeatedly(peer: Any) -> None:
    for package in (wds, peer):
        assert len(list(package.repeatedly(range(3), nepochs=7))) == 21
        assert len(list(package.utils.repeatedly(range(3), nbatches=10))) == 10
        assert len(list(package.utils.repeatedly([[[1, 1], [2, 2]]] * 3, nsamples=10))) == 5
        assert package.utils.pytorch_worker_info() == (0, 1, 0, 1)
        assert package.utils.make_seed(1, 2, 3) == 1 * 31 * 31 + 2 * 31 + 3


def test_tensors_as_bytes(peer: Any, tmp_path: Path) -> None:
    arrays = [np.arange(6, dtype="f4").reshape(2, 3), np.zeros((0, 4), "u1"), np.arange(3)]
    assert bytes(wds.tenbin.encode_buffer(arrays)) == bytes(peer.tenbin.encode_buffer(arrays))
    wds.tenbin.save(str(tmp_path / "a.ten"), *arrays)
    for each, expected in zip(wds.tenbin.load(str(tmp_path / "a.ten")), arrays, strict=True):
        np.testing.assert_array_equal(each, expected)


def test_own_stages_and_classes(numbered: Any) -> None:
    class Every(wds.PipelineStage):
        def __init__(self, n: int) -> None:
            self.n = n

        def run(self, source: Iterator[Any]) -> Iterator[Any]:
            return islice(source, 0, None, self.n)

    class Pipeline(wds.DataPipeline, wds.compat.FluidInterface):
        def __init__(self, urls: str) -> None:
            super().__init__()
            self.append(wds.SimpleShardList(urls))
            self.append(wds.tarfile_to_samples())
            self.append(Every(2))

    class Alone(wds.FluidInterface):
        def __init__(self, *stages: Any) -> None:
            self.stages = stages

        def compose(self, *stages: Any) -> "Alone":
            return Alone(*self.stages, *stages)

    ds = Pipeline(numbered([4, 3])).decode().to_tuple("cls").map_tuple(str)
    assert list(ds) == [("0",), ("2",), ("4",), ("6",)]
    assert len(Alone().shuffle(3).map(str).stages) == 2
    assert list(wds.MockDataset(1, 3).map(str)) == ["1"] * 3 == list(wds.with_epoch(["1"], 3))
    sent = pickle.loads(pickle.dumps(wds.DataPipeline(wds.SimpleShardList("a-{0..3}.tar"), wds.detshuffle(3))))
    assert len(list(sent)) == 4


def test_samples_that_are_kept(numbered: Any) -> None:
    ds = wds.WebDataset(numbered([3])).mcached()
    first = list(ds)
    assert list(ds) == first
    assert [each is other for each, other in zip(ds, first, strict=True)] == [True] * 3


class TestOpening:
    def test_files_and_other_schemes(self, tmp_path: Path, write_tar: Any) -> None:
        with wds.gopen(f"{tmp_path}/x", "wb") as stream:
            stream.write(b"abc")
        with wds.gopen(f"file:{tmp_path}/x") as stream:
            assert stream.read() == b"abc"
        write_tar("a.tar", [("k.txt", b"hello")])
        with pytest.raises(ConfigError, match=r"gopen_schemes\['abc'\] ="):
            wds.gopen("abc://host/a.tar")

    def test_an_address_that_the_caller_opens(self, tmp_path: Path, write_tar: Any) -> None:
        path = write_tar("a.tar", [("k.txt", b"hello")])
        asked = []

        def opener(url: str, mode: str, bufsize: int) -> Any:
            asked.append((url, mode))
            return open(path if mode == "rb" else tmp_path / "out.tar", mode)

        wds.gopen_schemes["pipe"] = opener
        try:
            (sample,) = wds.WebDataset("pipe:cat a.tar")
            assert sample["txt"] == b"hello"
            with wds.TarWriter("pipe:cat > out.tar") as writer:
                writer.write({"__key__": "k", "txt": "hello"})
        finally:
            wds.gopen_schemes["pipe"] = wds.writer.gopen.gopen_pipe
        assert asked == [("pipe:cat a.tar", "rb"), ("pipe:cat > out.tar", "wb")]
        assert next(iter(wds.WebDataset(str(tmp_path / "out.tar"))))["txt"] == b"hello"
        with pytest.raises(ConfigError, match="pipe:"):
            wds.WebDataset("pipe:cat a.tar")

    def test_what_is_refused_says_what_to_do(self) -> None:
        with pytest.raises(ConfigError, match=r"gopen_schemes\['pipe'\] ="):
            wds.gopen("pipe:echo")
        with pytest.raises(Unsafe, match="no command is run"):
            wds.writer.gopen.Pipe("echo", mode="r")
        for refused in (wds.autodecode.unpickle_loads, wds.torch_loads):
            with pytest.raises(Unsafe, match=r"pickle\.loads"):
                refused(pickle.dumps(1))
        with pytest.raises(Unsafe, match="pickle"):
            wds.torch_dumps([1])
        with pytest.raises(Unsafe, match="cache_dir="):
            wds.WebDataset("a.tar").lmdb_cached("x")
        with pytest.raises(Unsafe, match="evaluated"):
            wds.utils.safe_eval("x")

    def test_a_stricter_caller(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(wds.utils, "enforce_security", True)
        (tmp_path / "x").write_bytes(b"")
        for call, words in ((lambda: wds.gopen(str(tmp_path / "x")), "cannot open local files"),
                            (lambda: wds.autodecode.unpickle_loads(b""), "Unpickling is not allowed")):  # fmt: skip
            with pytest.raises(ValueError, match=words):
                call()


def test_folders_of_shards(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.tar").touch()
        os.utime(tmp_path / f"{number}.tar", (number, number))
    (tmp_path / "left.tar._99999999_").touch()
    lists = wds.shardlists.DirectoryShardList(f"{tmp_path}/", select="oldest", mode="keep", poll=None)
    assert [os.path.basename(shard["url"]).split("._")[0] for shard in lists] == ["0.tar", "1.tar", "2.tar", "3.tar"]
    assert sorted(os.listdir(tmp_path)) == [f"{number}.tar._done_" for number in range(4)] + ["left.tar._done_"]
    with pytest.raises(ConfigError, match="slash"):
        wds.shardlists.DirectoryShardList(str(tmp_path))


def test_several_lists_of_shards() -> None:
    spec = {
        "prefix": "p/",
        "datasets": [
            {"buckets": "b", "shards": "a-{0..3}.tar"},
            {"shards": ["c-{0..9}.tar"], "choose": 3},
            {"shards": "d-{0..1}.tar", "resample": 5},
        ],
    }
    ds = wds.DataPipeline(wds.shardspec(spec))
    epochs = [[shard["url"] for shard in ds] for _ in range(2)]
    for urls in epochs:
        assert sorted(url for url in urls if "/a-" in url) == [f"p/b/a-{number}.tar" for number in range(4)]
        assert len({url for url in urls if "/c-" in url}) == 3
        assert sum("/d-" in url for url in urls) == 5
    assert epochs[0] != epochs[1]
    with pytest.raises(ConfigError, match="safe_load"):
        wds.shardspec("train.yaml")


def test_copies_in_a_folder(tmp_path: Path, write_tar: Any) -> None:
    path = write_tar("a.tar", [("k.txt", b"hello")])
    for opener in (wds.cache.StreamingOpen(), wds.cache.FileCache(str(tmp_path / "cache"))):
        (found,) = opener([{"url": path, "more": 1}])
        assert found["local_path"] == path
        assert found["more"] == 1
        with found["stream"] as stream:
            assert stream.read() == Path(path).read_bytes()
    for number in range(6):
        (tmp_path / "cache").mkdir(exist_ok=True)
        (tmp_path / "cache" / str(number)).write_bytes(bytes(100))
    order = {str(tmp_path / "cache" / str(number)): number for number in range(6)}
    wds.LRUCleanup(tmp_path / "cache", 250, keyfn=lambda name: order[name], interval=None).cleanup()
    assert sorted(os.listdir(tmp_path / "cache")) == ["4", "5"]


class TestSound:
    def test_by_torchaudio(self, monkeypatch: pytest.MonkeyPatch) -> None:
        library: Any = types.ModuleType("torchaudio")
        library.load = lambda stream, format: (stream.read(), format)  # noqa: A006
        monkeypatch.setitem(__import__("sys").modules, "torchaudio", library)
        assert wds.torch_audio(".a.wav", b"x") == (b"x", "wav")
        assert wds.torch_audio(".txt", b"x") is None

    def test_without_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "torchaudio", None)
        with pytest.raises(ConfigError, match="pip install torchaudio"):
            wds.torch_audio(".wav", b"x")


def test_printing(numbered: Any) -> None:
    out = io.StringIO()
    list(wds.WebDataset(numbered([3])).compose(wds.info(fmt="{__key__}", n=2, stream=out)))
    assert out.getvalue().split() == ["000000", "000001"]


def test_nothing_where_something_must_come(peer: Any) -> None:
    for package in (wds, peer):
        for stage in (package.shardlists.non_empty, package.compat.check_empty):
            assert list(stage(iter([1, 2]))) == [1, 2]
            with pytest.raises(ValueError):
                list(stage(iter([])))
