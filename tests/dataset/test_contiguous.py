"""Rows laid out with another order of axes, converted and normalized on the way, against numpy doing the same."""

import h5py
import imagecodecs
import numpy as np
import pytest
import torch

import penstock as ps
from penstock.errors import ConfigError, SchemaMismatch
from penstock.read import convert
from penstock.testing import check_store
from penstock.webdataset import ShardWriter

SHAPE = (19, 23, 3)
ROWS = 12
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def pixels():
    noise = np.random.default_rng(3).integers(0, 256, (ROWS, *SHAPE))
    return np.stack([imagecodecs.jpeg8_decode(_jpeg(row)) for row in noise.astype(np.uint8)])


def _jpeg(row):
    return imagecodecs.jpeg8_encode(np.ascontiguousarray(row), level=90)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, pixels):
    noise = np.random.default_rng(3).integers(0, 256, (ROWS, *SHAPE)).astype(np.uint8)
    folder = tmp_path_factory.mktemp("pictures")
    np.save(folder / "image.npy", pixels)
    with h5py.File(folder / "chunks.h5", "w") as file:
        file.create_dataset("image", data=pixels, chunks=(5, 7, 11, 2), compression="gzip")
        file["number"] = np.arange(ROWS)
    for kind, encode in (("jpg", _jpeg), ("npy", lambda row: row)):
        with ShardWriter(str(folder / f"{kind}-%02d.tar"), maxcount=5) as writer:
            for number in range(ROWS):
                sample = {f"image.{kind}": encode((noise if kind == "jpg" else pixels)[number]), "number.cls": number}
                writer.write({"__key__": f"{number:06d}", **sample})
    return folder


OPENED = {
    "jpg in tar": lambda folder, _: ps.open(str(folder / "jpg-*.tar")).rename(image="image.jpg"),
    "npy in tar": lambda folder, _: ps.open(str(folder / "npy-*.tar")).rename(image="image.npy"),
    "npy": lambda folder, _: ps.open(folder / "image.npy").rename(image="data"),
    "chunks of several rows": lambda folder, _: ps.open(folder / "chunks.h5"),
    "memory": lambda _, pixels: ps.from_arrays(image=pixels, number=np.arange(ROWS)),
    "joined": lambda folder, pixels: ps.join(
        image=(ps.open(folder / "image.npy"), np.arange(ROWS)), other=pixels.sum(axis=(1, 2))
    ),
}
CHANGED = {
    "as stored": (lambda ds: ds, lambda image: image),
    "float32": (
        lambda ds: ds.cast("image", "float32", divisor=255),
        lambda image: image.astype("f4") / np.float32(255),
    ),
    "float16": (
        lambda ds: ds.cast("image", "float16", divisor=255),
        lambda image: (image.astype("f4") / np.float32(255)).astype("f2"),
    ),
    "float64": (lambda ds: ds.cast("image", "float64", scale=1 / 255, offset=-0.5), lambda image: image / 255 - 0.5),
    "per channel": (lambda ds: _normal(ds, "float32"), lambda image: _normalized(image)),
    "per channel, float16": (lambda ds: _normal(ds, "float16"), lambda image: _normalized(image).astype("f2")),
}


def _normal(ds, dtype):
    return ds.cast("image", "float32", divisor=255).normalize("image", MEAN, STD, dtype=dtype)


def _normalized(image):
    unit = np.float32(255)
    factor = np.float32(1) / (np.asarray(STD, "f4") * unit)
    return (image.astype("f4") - np.asarray(MEAN, "f4") * unit) * factor


@pytest.mark.parametrize("changed", CHANGED)
@pytest.mark.parametrize("opened", OPENED)
@pytest.mark.parametrize("block", [7, convert.BLOCK_ELEMENTS])
def test_as_numpy_lays_it_out(folder, pixels, monkeypatch, opened, changed, block):
    monkeypatch.setattr(convert, "BLOCK_ELEMENTS", block)
    change, expect = CHANGED[changed]
    plain = change(OPENED[opened](folder, pixels))
    expected = expect(pixels)
    if changed != "float64":
        assert np.array_equal(plain[:]["image"], expected)
    expected = np.ascontiguousarray(plain[:]["image"].transpose(0, 3, 1, 2))
    ds = plain.permute("image", 2, 0, 1, contiguous=True)
    assert ds.fields["image"].shape == (3, *SHAPE[:2])
    assert ds.fields["image"].dtype == expected.dtype
    assert np.array_equal(ds[:]["image"], expected)
    assert np.array_equal(ds[[3, 1, 3]]["image"], expected[[3, 1, 3]])
    if block == 7 and changed in ("float16", "per channel"):
        check_store(lambda: ds.delivered, {**ds[:], "image": expected})
    with ps.Loader(ds, batch_size=ROWS, memory="64MiB") as loader:
        (batch,) = loader
    assert batch["image"].is_contiguous()
    assert np.array_equal(batch["image"].numpy(), expected)


def test_two_epochs_in_threads_and_both_layouts(folder, pixels):
    ds = ps.open(str(folder / "jpg-*.tar")).cast("image.jpg", "float32", divisor=255)
    seen = []
    for contiguous in (False, True):
        columns = ("image.jpg", "__index__")
        laid = ds.permute("image.jpg", 2, 0, 1, contiguous=contiguous)
        with ps.Loader(laid, batch_size=5, shuffle=True, seed=4, memory="64MiB", columns=columns) as loader:
            seen.append([(image.clone(), index.clone()) for _ in range(2) for image, index in loader])
            assert all(image.is_contiguous() == contiguous for image, _ in loader)
    for (view, rows), (image, same) in zip(*seen, strict=True):
        assert torch.equal(rows, same)
        assert torch.equal(view, image)


def test_the_layout_is_no_other_data(folder):
    ds = ps.open(str(folder / "jpg-*.tar")).cast("image.jpg", "float32")
    view, laid = (ds.permute("image.jpg", 2, 0, 1, contiguous=contiguous) for contiguous in (False, True))
    assert view.fingerprint == laid.fingerprint != ds.fingerprint
    with ps.Loader(view, batch_size=4, memory="64MiB") as loader:
        next(iter(loader))
        state = loader.state_dict()
    with ps.Loader(laid, batch_size=4, memory="64MiB") as loader:
        loader.load_state_dict(state)
        assert len(list(loader)) == 2


def test_a_part_or_another_conversion_after_the_layout(folder, pixels):
    ds = ps.open(str(folder / "jpg-*.tar")).permute("image.jpg", 2, 0, 1, contiguous=True)
    expected = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    twice = ds.cast("image.jpg", "int16").cast("image.jpg", "float32", scale=0.5)
    assert np.array_equal(twice[:]["image.jpg"], expected * np.float32(0.5))
    back = ds.permute("image.jpg", 1, 2, 0, contiguous=True)
    assert np.array_equal(back[:]["image.jpg"], pixels)
    chosen = ps.concat([ds, ds]).select([13, 2]).only("image.jpg").rename(x="image.jpg")
    assert np.array_equal(chosen[:]["x"], expected[[1, 2]])
    with pytest.raises(ConfigError, match="select first, then permute"):
        ds.select_within("image.jpg", (slice(None), slice(0, 2), slice(None)))
    with pytest.raises(ConfigError, match="contiguous"):
        ds.permute("image.jpg", 2, 0, 1, contiguous="yes")


@pytest.mark.parametrize("shape", [(), (3,), (23, 3), (19, 1, 3), (19, 1, 1), SHAPE])
def test_tables_that_numpy_stretches(pixels, shape):
    rng = np.random.default_rng(8)
    mean, spread = rng.random(shape).astype("f4") * 100, rng.random(shape).astype("f4") * 50 + 1
    ds = ps.from_arrays(image=pixels).normalize("image", mean, spread)
    expected = (pixels.astype("f4") - mean) * (np.float32(1) / spread)
    assert np.array_equal(ds[:]["image"], expected)
    with pytest.raises(SchemaMismatch, match=r"mean has shape \(1, 19\)"):
        ps.from_arrays(image=pixels).normalize("image", np.zeros(19), np.ones(19))


def test_channels_per_group(pixels):
    groups = np.arange(ROWS) % 2
    mean, spread = np.array([[1, 2, 3], [40, 50, 60]], "f4"), np.array([[1, 2, 0], [4, 5, 6]], "f4")
    ds = ps.from_arrays(image=pixels).normalize("image", mean, spread, groups)
    with np.errstate(divide="ignore"):
        factor = np.where(spread > 0, np.float32(1) / spread, np.float32(0))
    expected = (pixels.astype("f4") - mean[groups][:, None, None]) * factor[groups][:, None, None]
    assert np.array_equal(ds[:]["image"], expected)
