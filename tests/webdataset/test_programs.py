"""The patterns in which well-known training programs use ``webdataset``, retyped: the same samples as with the package.

Each takes the package, the shards and the number of workers, and gives what one rank gets in one epoch.
"""

import importlib
import io
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest

from penstock import webdataset as ours

torch = pytest.importorskip("torch")

SHARDS, PER_SHARD, BATCH = 8, 10, 5
SAMPLES = SHARDS * PER_SHARD


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(SHARDS):
        with ours.TarWriter(str(folder / f"{shard:05d}.tar"), encoder=False) as writer:
            for number in range(shard * PER_SHARD, (shard + 1) * PER_SHARD):
                stream = io.BytesIO()
                image.new("RGB", (8, 6), (number, 0, 0)).save(stream, "JPEG")
                about = json.dumps({"caption": f"number {number}", "uid": number}).encode()
                array = io.BytesIO()
                np.save(array, np.full(3, number))
                writer.write({"__key__": f"{shard:05d}{number % PER_SHARD:04d}", "jpg": stream.getvalue(),
                              "txt": b"number %d" % number, "cls": b"%d" % number, "json": about,
                              "voxels.npy": array.getvalue()})  # fmt: skip
    return str(folder / f"{{00000..{SHARDS - 1:05d}}}.tar")


def number_of(text: str) -> int:
    return int(text.split()[-1])


def pixels(picture: Any) -> Any:
    return torch.from_numpy(np.asarray(picture).copy())


def go_on(error: Exception) -> bool:
    return True


def has_both(sample: dict[str, Any]) -> bool:
    return "txt" in sample and "jpg" in sample


def group_without_errors(data: Iterator[Any], keys: Callable[[str], Any]) -> Iterator[dict[str, Any]]:
    """As programs have it that were written before shards had a mark at their end."""
    sample: dict[str, Any] | None = None
    for member in data:
        key, field = keys(member["fname"])
        if key is None:
            continue
        if sample is None or key != sample["__key__"] or field in sample:
            if sample is not None:
                yield sample
            sample = {"__key__": key, "__url__": member["__url__"]}
        sample[field] = member["data"]
    if sample is not None:
        yield sample


def members_to_samples(source: Iterator[Any], wds: Any) -> Iterator[dict[str, Any]]:
    steps = wds.tariterators
    no_mark = (
        {} if wds is ours else {"eof_value": None}
    )  # the package marks the end with what such programs cannot read
    members = steps.tar_file_expander(steps.url_opener(source, handler=go_on), handler=go_on, **no_mark)
    return group_without_errors(members, steps.base_plus_ext)


def contrastive(wds: Any, urls: str, workers: int) -> list[Any]:
    """open_clip: shards shuffled by a shared epoch, split, own grouping, an epoch per worker, ``WebLoader``."""

    class Shuffle(wds.PipelineStage):  # type: ignore[misc]
        def run(self, source: Iterator[Any]) -> Any:
            return wds.filters._shuffle(source, 2000, 500, random.Random(7))

    ds = wds.DataPipeline(
        wds.SimpleShardList(urls),
        Shuffle(),
        wds.split_by_node,
        wds.split_by_worker,
        partial(members_to_samples, wds=wds),
        wds.shuffle(bufsize=50, initial=10),
        wds.select(has_both),
        wds.decode("pilrgb", handler=go_on),
        wds.rename(image="jpg;png", text="txt"),
        wds.map_dict(image=pixels, text=number_of),
        wds.to_tuple("image", "text"),
        wds.batched(BATCH, partial=False),
    )
    ranks = wds.utils.pytorch_worker_info()[1]
    ds = ds.with_epoch(SAMPLES // ranks // max(1, workers) // BATCH)
    loader = wds.WebLoader(ds, batch_size=None, shuffle=False, num_workers=workers)
    loader.num_batches = 3
    return [int(each) for _, texts in loader for each in texts]


def classification(wds: Any, urls: str, workers: int) -> list[Any]:
    """timm: the pipeline is made in the worker; ``islice`` shares shards out, ``getfirst`` finds the picture."""

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        return {"jpg": wds.filters.getfirst(sample, "jpg;png;webp"), "cls": int(sample["cls"])}

    def split(source: Iterator[Any]) -> Iterator[Any]:
        rank, ranks, worker, number = wds.utils.pytorch_worker_info()
        return islice(source, rank * number + worker, None, ranks * number)

    class Lazy(torch.utils.data.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            names = wds.shardlists.expand_urls(urls)
            stages = [wds.SimpleShardList(names), split, wds.tarfile_to_samples(handler=go_on)]
            shuffle = wds.shuffle(bufsize=20, initial=5, rng=random.Random(3))
            ds = wds.DataPipeline(*stages, shuffle, wds.map(decode, handler=go_on), wds.rename(target="cls"))
            return (sample["target"] for sample in ds)

    return [int(each) for batch in torch.utils.data.DataLoader(Lazy(), BATCH, num_workers=workers) for each in batch]


def distillation(wds: Any, urls: str, workers: int) -> list[Any]:
    """diffusers: shards drawn with replacement, own grouping, torch's collation: so many batches per worker."""
    from torch.utils.data import default_collate

    ds = wds.DataPipeline(
        wds.ResampledShards(urls),
        partial(members_to_samples, wds=wds),
        wds.shuffle(20),
        wds.decode("pil", handler=wds.ignore_and_continue),
        wds.rename(image="jpg;png;jpeg;webp", text="text;txt;caption", handler=wds.warn_and_continue),
        wds.map(lambda sample: {name: sample[name] for name in ("image", "text")}),
        wds.map_dict(image=pixels),
        wds.to_tuple("image", "text"),
        wds.batched(BATCH, partial=False, collation_fn=default_collate),
    ).with_epoch(3)
    loader = wds.WebLoader(ds, batch_size=None, num_workers=workers)
    return [tuple(batch[0].shape) for batch in loader]


def benchmark(wds: Any, urls: str, workers: int) -> list[Any]:
    """CLIP_benchmark: all shards on each rank, an ``ImageHandler`` for some extensions, attributes on the dataset."""
    ds = wds.WebDataset(urls, cache_dir=None, nodesplitter=lambda source: source, shardshuffle=False)
    ds = ds.decode(wds.autodecode.ImageHandler("pil", extensions=["webp", "png", "jpg", "jpeg"]))
    ds = ds.to_tuple(["webp", "png", "jpg", "jpeg"], "cls").map_tuple(pixels, None)
    ds.classes = ["a"]
    loader = torch.utils.data.DataLoader(ds.batched(BATCH), batch_size=None, num_workers=workers)
    return [(each, ds.classes[0]) for _, labels in loader for each in labels.tolist()]


def embeddings(wds: Any, urls: str, workers: int) -> list[Any]:
    """DALLE2-pytorch: a class of two, filters of its own made by ``pipelinefilter``, everything on each worker."""

    def insert(samples: Iterator[Any], offset: int, handler: Any = wds.handlers.reraise_exception) -> Iterator[Any]:
        for sample in samples:
            sample["emb"] = number_of(sample["txt"]) + offset
            yield sample

    class Embedded(wds.DataPipeline, wds.compat.FluidInterface):  # type: ignore[misc]
        def __init__(self, urls: str) -> None:
            super().__init__()
            self.append(wds.SimpleShardList(urls))
            self.append(wds.filters.shuffle(1000))
            self.append(wds.tarfile_to_samples(handler=go_on))
            self.append(wds.decode("pilrgb", handler=go_on))
            self.append(wds.filters.pipelinefilter(insert)(offset=1))
            self.append(wds.map(self.prepare))
            self.append(wds.to_tuple("jpg", "emb"))

        def prepare(self, sample: Any) -> Any:
            sample["jpg"] = pixels(sample["jpg"])
            return sample

    loader = torch.utils.data.DataLoader(Embedded(urls).shuffle(7), BATCH, num_workers=workers)
    assert isinstance(loader.dataset, wds.DataPipeline)
    return [int(each) for _, numbers in loader for each in numbers]


def resharding(wds: Any, urls: str, workers: int) -> list[Any]:
    """DataComp: own grouping as a filter, ``_shuffle`` of a plain iterator, names of ``gopen`` that it builds on."""

    class Pipe(importlib.import_module(f"{wds.__name__}.gopen").Pipe):  # type: ignore[misc]
        """For addresses that are not asked for here."""

    to_samples = wds.filters.pipelinefilter(members_to_samples)
    wds.gopen_schemes.setdefault("s3", wds.gopen_schemes["http"])
    ds = wds.DataPipeline(wds.SimpleShardList(wds.shardlists.expand_urls(urls)), to_samples(wds=wds))
    return [json.loads(sample["json"])["uid"] for sample in wds.filters._shuffle(iter(ds), 20, 20)]


def writing(wds: Any, urls: str, workers: int) -> list[Any]:
    """img2dataset: a ``TarWriter`` on a file object of the caller's, text and JSON as text."""
    stream = io.BytesIO()
    writer = wds.TarWriter(stream)
    for number in range(5):
        writer.write({"__key__": f"{number:09d}", "jpg": b"jpeg", "txt": "text", "json": json.dumps({"n": number})})
    writer.close()
    stream.seek(0)
    return [
        (member["fname"], member["data"]) for member in wds.tariterators.tar_file_iterator(stream) if member["fname"]
    ]


def decoder(wds: Any, urls: str, workers: int) -> list[Any]:
    """MindEye: tensors, renamed, in batches; an epoch per worker of shards that are drawn, then all shards."""
    train = wds.WebDataset(urls, resampled=True, nodesplitter=lambda source: source, shardshuffle=False)
    train = train.shuffle(50, initial=50, rng=random.Random(42)).decode("torch")
    train = train.rename(images="jpg;png", voxels="voxels.npy").to_tuple("voxels", "images")
    train = train.batched(BATCH, partial=True).with_epoch(3)
    shapes = [tuple(images.shape) for _, images in torch.utils.data.DataLoader(train, None, num_workers=workers)]
    valid = wds.WebDataset(urls, resampled=False, nodesplitter=lambda source: source, shardshuffle=False)
    valid = valid.decode("torch").to_tuple("voxels.npy", "jpg").batched(BATCH, partial=False)
    loader = torch.utils.data.DataLoader(valid, None, num_workers=workers)
    return [*shapes, *(int(row[0]) for voxels, _ in loader for row in voxels)]


def captions(wds: Any, urls: str, workers: int) -> list[Any]:
    """LAVIS: a handler at every stage, ``map`` to a dict, shards drawn without end."""
    skip = {"handler": wds.warn_and_continue}
    ds = wds.DataPipeline(
        wds.ResampledShards(urls),
        wds.tarfile_to_samples(**skip),
        wds.shuffle(30, **skip),
        wds.decode("pilrgb", **skip),
        wds.to_tuple("jpg", "json", **skip),
        wds.map_tuple(pixels, **skip),
        wds.map(lambda sample: {"image": sample[0], "text": sample[1]["caption"]}, **skip),
    )
    known = [len(each) for each in (ds, [1, 2]) if type(each) is not wds.DataPipeline]  # its runner counts the others
    assert known == [2]
    assert not hasattr(ds, "__len__")
    loader = torch.utils.data.DataLoader(ds, BATCH, num_workers=workers)
    return [(tuple(batch["image"].shape), len(batch["text"])) for batch in islice(loader, 7)]


def retrieval(wds: Any, urls: str, workers: int) -> list[Any]:
    """clip-retrieval: a list of names, ``select`` and ``map`` with handlers, batches by torch's loader."""
    names = wds.shardlists.expand_urls(urls)
    ds = wds.WebDataset(names, cache_size=10**10, handler=wds.handlers.warn_and_continue, shardshuffle=False,
                        nodesplitter=wds.split_by_node)  # fmt: skip

    def prepare(sample: dict[str, Any]) -> dict[str, Any]:
        return {"key": sample["__key__"], "text": sample["txt"].decode()}

    ds = ds.select(has_both).map(prepare, handler=wds.handlers.warn_and_continue)
    loader = torch.utils.data.DataLoader(ds, BATCH, num_workers=workers)
    return [number_of(each) for batch in loader for each in batch["text"]]


PROGRAMS = [
    *(contrastive, classification, distillation, benchmark, embeddings, resharding, writing, decoder, captions),
    retrieval,
]


def check(program: Any, peer: Any, shards: str, workers: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(ranks):
        if ranks > 1:
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(ranks))
        theirs = program(peer, shards, workers)
        assert theirs, "the program does something"
        assert Counter(program(ours, shards, workers)) == Counter(theirs)


@pytest.mark.parametrize("program", PROGRAMS)
def test_in_this_process(peer: Any, shards: str, program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check(program, peer, shards, 0, 1, monkeypatch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(("workers", "ranks"), [(0, 2), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_on_workers_and_ranks(
    peer: Any, shards: str, program: Any, workers: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(program, peer, shards, workers, ranks, monkeypatch)
