"""Members of tar archives that are no arrays of one shape: text, JSON, pictures of unequal size, a caller's own."""

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import penstock as ps
from penstock import errors
from penstock.testing import check_store

CAPTIONS = ["", "a dog", "ein Hund läuft", "犬が走る", "🐕" * 40, "x" * 3000, "end"]


def npy(values: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


def npz(**arrays: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def picture(number: int, height: int, width: int, kind: str = "PNG") -> bytes:
    rng = np.random.default_rng(number)
    smooth = np.cumsum(rng.integers(-9, 10, (height, width, 3)), axis=1) + rng.integers(0, 256, 3)
    stream = io.BytesIO()
    Image.fromarray(smooth.astype(np.uint8)).save(stream, kind)
    return stream.getvalue()


def write(path: Path, samples: Sequence[Mapping[str, bytes]], first: int = 0) -> Path:
    with tarfile.open(path, "w") as archive:
        for number, members in enumerate(samples, first):
            for field, content in members.items():
                info = tarfile.TarInfo(f"{number:03d}.{field}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return path


def objects(values: Sequence[Any]) -> np.ndarray:
    made = np.empty(len(values), object)
    for number, value in enumerate(values):
        made[number] = value
    return made


def said(number: int) -> Any:
    return [None, {"caption": CAPTIONS[number % 7], "boxes": [[number, 1.5]] * number}, [], number, "text"][number % 5]


@pytest.fixture
def spoken(tmp_path: Path) -> Path:
    """Two shards whose longest texts differ."""
    for shard in range(2):
        numbers = range(shard * 4, 7 if shard else 4)
        samples = [
            {"txt": CAPTIONS[n].encode(), "json": json.dumps(said(n)).encode(), "cls": b"%d" % n, "bin": b"\0" * n}
            for n in numbers
        ]
        write(tmp_path / f"s-{shard}.tar", samples, shard * 4)
    return tmp_path / "s-*.tar"


@pytest.mark.filterwarnings("ignore::penstock.FieldsLeftOut")
def test_text_json_and_bytes_are_what_the_archive_holds(spoken: Path) -> None:
    want = {
        "txt": objects(CAPTIONS),
        "json": objects([said(n) for n in range(7)]),
        "cls": np.arange(7),
        "bin": objects([b"\0" * n for n in range(7)]),
    }
    check_store(lambda: ps.open(spoken, fields=list(want)).store, want)
    assert list(ps.open(spoken).fields) == ["txt", "json", "cls"]
    assert ps.open(spoken)[3] == {"txt": CAPTIONS[3], "json": said(3), "cls": 3}
    assert ps.open(spoken)[2:4]["txt"] == CAPTIONS[2:4]
    assert ps.open(spoken).fields["txt"].most_bytes > 3000, "the longest text of any shard"


@pytest.mark.filterwarnings("ignore::penstock.FieldsLeftOut")
@pytest.mark.parametrize("output", ["torch", "numpy"])
def test_batches_hold_lists(spoken: Path, output: Any) -> None:
    seen = {}
    with ps.Loader(ps.open(spoken), batch_size=3, shuffle=True, memory="64MiB", output=output) as loader:
        for batch in loader:
            assert isinstance(batch["txt"], list)
            assert isinstance(batch["cls"], torch.Tensor if output == "torch" else np.ndarray)
            seen.update(zip(batch["cls"].tolist(), zip(batch["txt"], batch["json"], strict=True), strict=True))
    assert seen == {n: (CAPTIONS[n], said(n)) for n in range(7)}


@pytest.mark.filterwarnings("ignore::penstock.FieldsLeftOut")
def test_lists_alone_need_no_array(spoken: Path) -> None:
    with ps.Loader(ps.open(spoken), batch_size=2, columns=("txt", "__key__"), memory="64MiB") as loader:
        kept = list(loader)
    assert [text for texts, _ in kept for text in texts] == CAPTIONS
    assert [key for _, keys in kept for key in keys] == [f"{n:03d}" for n in range(7)]


@pytest.mark.filterwarnings("ignore::penstock.FieldsLeftOut")
def test_torchs_own_loader_takes_them(spoken: Path) -> None:
    loader = torch.utils.data.DataLoader(ps.open(spoken).only("txt", "cls"), batch_size=4, num_workers=1)
    assert [text for batch in loader for text in batch["txt"]] == CAPTIONS


@pytest.mark.filterwarnings("ignore::penstock.FieldsLeftOut")
def test_a_map_is_given_them_and_may_pass_them_on(spoken: Path) -> None:
    ds = ps.open(spoken).map(lambda batch: {"txt": batch["txt"], "long": np.array([len(t) for t in batch["txt"]])})
    assert ds[:]["txt"] == CAPTIONS
    assert ds[:]["long"].tolist() == [len(text) for text in CAPTIONS]
    with pytest.raises(errors.TransformFailed, match="Python objects"):
        ps.open(spoken).map(lambda batch: {"txt": objects([text.upper() for text in batch["txt"]])})


@pytest.mark.filterwarnings("ignore::penstock.FieldsLeftOut")
@pytest.mark.parametrize("call", ["cast", "select_within"])
def test_numbers_alone_are_converted(spoken: Path, call: str) -> None:
    with pytest.raises(errors.ConfigError, match="text"):
        getattr(ps.open(spoken), call)("txt", "float32")


@pytest.mark.parametrize(
    ("field", "bad"),
    [("txt", b"\xff\xfe"), ("json", b"{"), ("json", b"[" * 100_000), ("npz", b"PK"), ("a.npz", b""), ("json", b"")],
    ids=["utf8", "half", "deep", "npz", "empty", "nothing"],
)
def test_what_cannot_be_read_is_named_and_can_be_skipped(tmp_path: Path, field: str, bad: bytes) -> None:
    good = {"txt": b"yes", "json": b"[1]", "npz": npz(x=np.ones(3))}[field.split(".")[-1]]
    path = write(
        tmp_path / "a.tar", [{field: good, "cls": b"0"}, {field: bad, "cls": b"1"}, {field: good, "cls": b"2"}]
    )
    with pytest.raises(errors.DecodeFailed, match=rf"a\.tar: 001\.{field} at offset"):
        ps.open(path)[1]
    with ps.Loader(ps.open(path), batch_size=3, on_error="skip", memory="64MiB") as loader:
        (batch,) = loader
        assert batch["cls"].tolist() == [0, 2]
        assert len(batch[field]) == 2
        assert loader.stats().left_out[0].key == "001"


def test_npz_gives_arrays_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", [{"npz": npz(x=np.arange(n), y=np.float32(n))} for n in range(4)])
    got = ps.open(path)[:]["npz"]
    assert [sorted(each) for each in got] == [["x", "y"]] * 4
    assert all(np.array_equal(each["x"], np.arange(n)) and each["y"] == n for n, each in enumerate(got))


def test_npz_that_explodes_is_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.savez_compressed(stream, x=np.zeros(10_000_000))
    path = write(tmp_path / "a.tar", [{"npz": stream.getvalue()}])
    with pytest.raises(errors.LimitExceeded, match=r"declares 80,000,128; at most .* are unpacked"):
        ps.open(path)[0]


def test_npz_of_objects_is_not_unpickled(tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.savez(stream, x=np.array([{}, []], object))
    path = write(tmp_path / "a.tar", [{"npz": stream.getvalue()}])
    with pytest.raises(errors.Unsafe, match="unpickling"):
        ps.open(path)[0]


@pytest.mark.parametrize("extension", ["pyd", "pickle", "pkl", "pth"])
def test_pickles_are_refused_unless_their_bytes_are_wanted(tmp_path: Path, extension: str) -> None:
    path = write(tmp_path / "a.tar", [{extension: b"cos\nsystem\n(S'false'\ntR.", "cls": b"1"}])
    with pytest.warns(ps.FieldsLeftOut, match=f"{extension}.*pickled"):
        assert list(ps.open(path).fields) == ["cls"]
    with pytest.raises(errors.Unsafe, match="would run"):
        ps.open(path, fields=[extension])
    assert ps.open(path, fields=[extension], decoders={extension: "bytes"})[0][extension].startswith(b"cos")


def test_arrays_of_many_shapes_come_in_lists(tmp_path: Path) -> None:
    arrays = [np.arange(n * 2.0).reshape(2, n) for n in range(5)]
    path = write(tmp_path / "a.tar", [{"seg.npy": npy(each), "one.npy": npy(np.ones(3))} for each in arrays])
    with pytest.raises(errors.SchemaMismatch):
        ps.open(path)[:]
    ds = ps.open(path, decoders={"seg.npy": "array"})
    got = ds[:]
    assert all(np.array_equal(one, other) for one, other in zip(got["seg.npy"], arrays, strict=True))
    assert got["one.npy"].shape == (5, 3)


# A caller's own decoders.


def read_floats(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<f4").reshape(2, -1)


def read_words(data: bytes) -> list[str]:
    return data.decode().split()


def test_a_decoder_of_ones_own_gives_arrays_or_lists(tmp_path: Path) -> None:
    arrays = [np.full((2, 3), n, "<f4") for n in range(5)]
    path = write(
        tmp_path / "a.tar", [{"raw": each.tobytes(), "words.txt": b"a b " * n} for n, each in enumerate(arrays)]
    )
    ds = ps.open(path, decoders={"raw": read_floats, ".words.txt": read_words})
    check_store(lambda: ds.store, {"raw": np.stack(arrays), "words.txt": objects([["a", "b"] * n for n in range(5)])})
    with ps.Loader(ds, batch_size=5, memory="64MiB") as loader:
        (batch,) = loader
    assert batch["raw"].shape == (5, 2, 3)


def test_a_decoder_of_ones_own_may_fail(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", [{"raw": b"\0" * 24}, {"raw": b"\0" * 23}, {"raw": b"\0" * 32}])
    ds = ps.open(path, decoders={"raw": read_floats})
    with pytest.raises(errors.DecodeFailed, match=r"001\.raw at offset .*the decoder read_floats raised ValueError"):
        ds[1]
    with pytest.raises(errors.SchemaMismatch, match=r"002\.raw.*shape \(2, 4\).*\(2, 3\).*'000'"):
        ds[2]


@pytest.mark.parametrize("decoders", [{"raw": "nonsense"}, {"raw": 3}])
def test_decoders_are_checked(tmp_path: Path, decoders: dict[str, Any]) -> None:
    path = write(tmp_path / "a.tar", [{"raw": b""}])
    with pytest.raises(errors.ConfigError, match="decoders"):
        ps.open(path, decoders=decoders)


# Pictures of unequal size.

SIZES = [(40, 60), (64, 48), (100, 100), (33, 90), (200, 31)]


@pytest.fixture
def unequal(tmp_path: Path) -> Path:
    return write(tmp_path / "p.tar", [{"png": picture(n, *size)} for n, size in enumerate(SIZES)])


def pillows(path: Path) -> list[Image.Image]:
    with tarfile.open(path) as archive:
        return [Image.open(io.BytesIO(archive.extractfile(each).read())).convert("RGB") for each in archive]


ORACLES = {
    "resize": lambda image, size: image.resize(size[::-1], Image.Resampling.BILINEAR),
    "cover": lambda image, size: ImageOps.fit(image, size[::-1], Image.Resampling.BILINEAR),
}


@pytest.mark.parametrize("size", [(32, 32), (24, 50), (120, 110)], ids=str)
@pytest.mark.parametrize("fit", ORACLES)
def test_pictures_are_brought_to_one_size_as_pillow_does(unequal: Path, fit: Any, size: tuple[int, int]) -> None:
    want = np.stack([np.asarray(ORACLES[fit](image, size)) for image in pillows(unequal)])
    check_store(lambda: ps.open(unequal, size=size, fit=fit).store, {"png": want})


def test_the_middle_is_cut_out(unequal: Path) -> None:
    want = []
    for image in pillows(unequal):
        left, top = (image.width - 30) // 2, (image.height - 20) // 2
        want.append(np.asarray(image.crop((left, top, left + 30, top + 20))))
    check_store(lambda: ps.open(unequal, size=(20, 30), fit="crop").store, {"png": np.stack(want)})
    with pytest.raises(errors.SchemaMismatch, match=r"000\.png .*is 40 x 60, too small .*fit=.cover"):
        ps.open(unequal, size=50, fit="crop")[0]


def test_unequal_sizes_without_one_declared_are_an_error_that_names_both(unequal: Path) -> None:
    with pytest.raises(errors.SchemaMismatch, match=r"001\.png.*64 x 48.*40 x 60.*size=\(height, width\).*'000'"):
        ps.open(unequal)[:]


def test_the_largest_is_found_once_and_kept(unequal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.read import pictures

    first = ps.open(unequal, size=32, index_dir=tmp_path / "index")
    monkeypatch.setattr(pictures, "count_pixels", lambda data: pytest.fail("read again"))
    again = ps.open(unequal, size=32, index_dir=tmp_path / "index")
    assert first.store.scratch_bytes(1) == again.store.scratch_bytes(1) > 24 * 100 * 100


def test_a_picture_beyond_the_limit_is_refused_before_it_is_decoded(unequal: Path) -> None:
    ds = ps.open(unequal, size=32, max_pixels=5000)
    assert ds[0]["png"].shape == (32, 32, 3)
    with pytest.raises(errors.LimitExceeded, match=r"002\.png.*10,000 pixels.*max_pixels=5,000"):
        ds[2]


@pytest.mark.parametrize(
    "options", [{"size": 0}, {"size": (3,)}, {"size": "big"}, {"size": (3, -1)}, {"size": 3, "fit": "stretch"}]
)
def test_sizes_are_checked(unequal: Path, options: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigError, match=r"size=|fit="):
        ps.open(unequal, **options)


# Samples by name.


@pytest.mark.filterwarnings("ignore::penstock.FieldsLeftOut")
def test_samples_are_found_by_their_keys(spoken: Path) -> None:
    ds = ps.open(spoken)
    assert list(ds.keys) == [f"{n:03d}" for n in range(7)]
    assert ds.keys[-1] == "006"
    assert ds.keys[2:4] == ["002", "003"]
    assert ds.keys.find("005") == 5
    assert ds["005"]["txt"] == CAPTIONS[5]
    assert "005" in ds.keys
    assert "nobody" not in ds.keys
    with pytest.raises(errors.Missing, match=r"no sample 'nobody' among 7: they are called '000' to '006'"):
        ds["nobody"]


@pytest.mark.filterwarnings("ignore::penstock.FieldsLeftOut")
def test_keys_follow_whatever_is_made_of_a_dataset(spoken: Path) -> None:
    ds = ps.open(spoken)
    assert ds.select([5, 2, 5]).keys.find("002") == 1
    assert ds.select(range(1, 7, 2)).keys.find("003") == 1
    assert "002" not in ds.select(range(1, 7, 2)).keys
    assert ds.only("cls").rename(label="cls").cast("label", "int16").keys.find("004") == 4
    assert ps.join(a=(ds.only("cls"), [6, 5]), b=np.arange(2)).keys.find("005") == 1
    assert ps.concat([ds, ds]).keys.find("001") == 1


def test_places_are_no_keys_to_find() -> None:
    ds = ps.from_arrays(x=np.arange(3))
    assert len(ds.keys) == 3
    with pytest.raises(errors.Missing):
        ds["1"]


def write_members(path, members):
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def as_npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@pytest.mark.parametrize("order", ["FFF", "FCF"])
@pytest.mark.parametrize("shape", [(2, 3), (4, 3, 2)])
def test_arrays_in_fortran_order(tmp_path, order, shape):
    arrays = [np.arange(np.prod(shape), dtype="f4").reshape(shape) + 100 * number for number in range(3)]
    members = [(f"{n}.npy", as_npy(np.array(each, order=order[n]))) for n, each in enumerate(arrays)]
    ds = ps.open(write_members(tmp_path / "a.tar", members), index_dir=False)
    assert ds.fields["npy"].shape == shape
    np.testing.assert_array_equal(ds[:]["npy"], arrays)
    with ps.Loader(ds, batch_size=3, memory="32MiB", output="numpy") as batches:
        np.testing.assert_array_equal(next(iter(batches))["npy"], arrays)


@pytest.mark.parametrize("options", [{}, {"fields": ("txt",)}, {"on_error": "skip"}])
def test_an_empty_shard_among_others(tmp_path, options):
    paths = [
        write_members(tmp_path / f"{number}.tar", members)
        for number, members in enumerate([[], [("a.txt", b"one")], [], [("b.txt", b"two")]])
    ]
    ds = ps.open(paths, **options)
    assert ds[:]["txt"] == ["one", "two"]
    assert [str(paths[number]) in str(why) for number, why in zip((0, 2), ds.left_out, strict=True)] == [True, True]
    with ps.Loader(ds, batch_size=2, memory="32MiB") as batches:
        list(batches)
        assert "0.tar: no samples" in str(batches.report())
    with pytest.raises((errors.Missing, errors.ConfigError), match="no samples"):
        ps.open([paths[0], paths[2]], **options)


def test_a_key_that_several_shards_share(tmp_path):
    paths = [
        write_members(tmp_path / f"{number}.tar", [("001.txt", b"%d" % number), (f"x{number}.txt", b"x")])
        for number in range(3)
    ]
    ds = ps.open(paths)
    with pytest.raises(
        errors.ConfigError, match=r"'001' is the name of samples in 3 files: row 0 .*0\.tar; also .*1\.tar"
    ):
        ds["001"]
    assert "001" in ds.keys
    assert "002" not in ds.keys
    assert (ds.keys.find("x1"), ds[2]["txt"]) == (3, "1")
