"""Batches whose memory is used again, and pictures that become floats in their batch: nothing of it is to be seen."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import webdataset as wds
from penstock.errors import SchemaMismatch

torch = pytest.importorskip("torch")
image = pytest.importorskip("PIL.Image")

SAMPLES, BATCH = 22, 4
LARGE = (60, 50)
"""A batch of such pictures is large enough to be kept; where smaller ones lie is chance."""


def picture(number: int, size: tuple[int, int] = (7, 5)) -> bytes:
    stream = io.BytesIO()
    noise = np.random.default_rng(number).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    image.fromarray(noise).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture
def shards(tmp_path: Path) -> str:
    with wds.ShardWriter(str(tmp_path / "s-%d.tar"), maxcount=8, encoder=False) as writer:
        for number in range(SAMPLES):
            writer.write({"__key__": f"{number:04d}", "png": picture(number), "cls": b"%d" % number})
    return str(tmp_path / "s-{0..2}.tar")


def batches(urls: str, mode: str, *, looked_at: bool) -> Any:
    ds = wds.WebDataset(urls).decode(mode)
    ds = ds.map(lambda sample: sample) if looked_at else ds
    return ds.rename(image="jpg;png").shuffle(5, seed=3).to_tuple("image", "cls").batched(BATCH)


@pytest.mark.parametrize("mode", ["torch", "torchrgb", "torchl", "torchrgba", "torchrgb8", "rgb", "rgb8"])
def test_the_same_as_when_a_function_looks_at_them(shards: str, mode: str) -> None:
    passed, looked_at = (list(batches(shards, mode, looked_at=each)) for each in (False, True))
    assert len(passed) == -(-SAMPLES // BATCH)
    for (one, labels), (other, expected) in zip(passed, looked_at, strict=True):
        assert type(one) is type(other)
        assert one.dtype == other.dtype
        assert bool((one == other).all())
        assert labels.tolist() == expected.tolist()
        assert not isinstance(one, torch.Tensor) or one.is_contiguous()


def test_a_function_of_the_callers_sees_tensors(shards: str) -> None:
    seen: list[Any] = []
    ds = wds.WebDataset(shards).decode("torch").to_tuple("png").map_tuple(lambda each: (seen.append(each), each)[1])
    list(ds.batched(BATCH))
    assert {type(each) for each in seen} == {torch.Tensor}
    own = wds.WebDataset(shards).decode("torch").to_tuple("png").batched(BATCH, collation_fn=list)
    assert type(next(iter(own))[0][0]) is torch.Tensor
    listed = wds.WebDataset(shards).decode("torch").to_tuple("png").listed(BATCH)
    assert type(next(iter(listed))[0][0]) is torch.Tensor


@pytest.mark.parametrize("keep", ["batches", "rows", "arrays"])
def test_what_is_kept_is_not_written_over(shards: str, keep: str) -> None:
    kept, copies = [], []
    for images, _ in batches(shards, "torch", looked_at=False):
        each = {"batches": images, "rows": images[1:2], "arrays": images.numpy()[0, 1:]}[keep]
        kept.append(each)
        copies.append(torch.as_tensor(each).clone())
        del images, each
    for each, copy in zip(kept, copies, strict=True):
        assert bool((torch.as_tensor(each) == copy).all())


def test_memory_is_used_again(tmp_path: Path) -> None:
    path = str(tmp_path / "large.tar")
    with wds.TarWriter(path, encoder=False) as writer:
        for number in range(SAMPLES):
            writer.write({"__key__": f"{number:04d}", "png": picture(number, LARGE), "cls": b"%d" % number})
    places = [images.data_ptr() for images, _ in batches(path, "torch", looked_at=False) if len(images) == BATCH]
    assert len(set(places)) <= 2 < len(places)


def test_pictures_that_do_not_fit_together(tmp_path: Path) -> None:
    with wds.TarWriter(str(tmp_path / "x.tar"), encoder=False) as writer:
        for number, size in enumerate([(7, 5), (7, 5), (6, 5)]):
            writer.write({"__key__": f"{number}", "png": picture(number, size)})
    with pytest.raises(SchemaMismatch, match=r"\(3, 5, 6\) and \(3, 5, 7\)"):
        list(wds.WebDataset(str(tmp_path / "x.tar")).decode("torch").to_tuple("png").batched(3))


def test_fields_far_apart_are_read_one_by_one(tmp_path: Path) -> None:
    with wds.TarWriter(str(tmp_path / "x.tar"), encoder=False) as writer:
        writer.write({"__key__": "k", "a": b"first", "b": bytes(300_000), "c": b"last"})
    (sample,) = wds.WebDataset(str(tmp_path / "x.tar"), select_files=lambda name: not name.endswith(".b"))
    assert (sample["a"], sample["c"]) == (b"first", b"last")
    (whole,) = wds.WebDataset(str(tmp_path / "x.tar"))
    assert (whole["a"], whole["b"], whole["c"]) == (b"first", bytes(300_000), b"last")
