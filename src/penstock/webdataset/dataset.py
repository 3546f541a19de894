"""``WebDataset``: shards in, samples out, in the order of the files unless asked otherwise."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.base import checks
from penstock.base.sizes import parse_size
from penstock.errors import ConfigError
from penstock.files.compression import MAX_EXPANSION
from penstock.files.files import remote_files
from penstock.read.kinds import MAX_MEMBER_BYTES
from penstock.webdataset.decoders import Decoder, Given
from penstock.webdataset.handlers import Handler, reraise_exception
from penstock.webdataset.pipeline import DataPipeline, Source, Stage
from penstock.webdataset.run import Run
from penstock.webdataset.samples import Reading, Sample, read_samples
from penstock.webdataset.shards import Shard, expand
from penstock.webdataset.shuffle import shuffle_samples
from penstock.webdataset.splitting import single_node_only, split_by_worker
from penstock.webdataset.verbs import map_samples

if TYPE_CHECKING:
    from penstock.remote.ranges import RemoteOptions

Splitter = Callable[[Iterable[Shard]], Iterable[Shard]]

DEFAULT_SHARD_SHUFFLE = 100


class SimpleShardList(Source):
    """Shards in the order they are named; shuffled by ``seed`` if there is one."""

    def __init__(self, urls: Any, seed: int | None = None) -> None:
        self.shards = expand(urls)
        self.seed = seed

    def begin(self, run: Run) -> Iterator[Shard]:
        """Every shard once."""
        shards = [dict(shard) for shard in self.shards]
        if self.seed is not None:
            run.rng(self.seed).shuffle(shards)
        return iter(shards)

    @property
    def urls(self) -> list[str]:
        """The names of the shards."""
        return [shard["url"] for shard in self.shards]

    def __len__(self) -> int:
        return len(self.shards)


class ResampledShards(Source):
    """Shards drawn with replacement, without end (or ``nshards`` times), anew for each epoch, rank and worker."""

    def __init__(self, urls: Any, nshards: int | None = None, seed: int | None = None) -> None:
        self.shards = expand(urls)
        self.nshards, self.seed = nshards, seed
        if any("stream" in shard for shard in self.shards):
            raise ConfigError("resampled=True: a file object can be read once, so shards to draw from must be files")

    def begin(self, run: Run) -> Iterator[Shard]:
        """Draw ``nshards`` shards, or shards without end."""
        rng = (run if self.seed is None else replace(run, seed=self.seed)).rng()
        drawn = 0
        while self.nshards is None or drawn < self.nshards:
            drawn += 1
            yield dict(rng.choice(self.shards))


class WebDataset(DataPipeline):
    """Samples of tar shards: dicts of bytes by extension, with ``__key__`` and ``__url__``; verbs process them further.

    urls:          a pattern (``"train-{000..017}.tar"``, several joined by ``::``), paths, file objects, ``"-"``
    resampled:     draw shards with replacement, without end; see ``with_epoch``
    shardshuffle:  how many shards to draw from when shuffling them; None or False for the order given
    nodesplitter:  how ranks share the shards; ``split_by_node``, or a function of your own
    workersplitter: how the workers of torch's loader share them
    handler:       called if a shard or member cannot be read; see ``handlers``
    seed:          decides every random choice, together with the epoch, the rank and the worker
    select_files:  a function of a member's name: False leaves it out, unread
    rename_files:  a function from a member's name to another
    empty_check:   whether shards without any sample are an error
    max_member_bytes: larger members are refused
    cache_dir:     a folder for whole copies of shards on other machines, shared by all processes that name it; without
                   one they are streamed
    cache_bytes:   the size limit of that folder (``"200GB"``); ``cache_size`` is another name for it
    remote:        timeouts and retries for servers: ``penstock.remote.RemoteOptions``
    """

    def __init__(
        self,
        urls: Any,
        handler: Handler = reraise_exception,
        mode: str | None = None,
        resampled: bool = False,
        repeat: bool = False,
        shardshuffle: bool | int | None = None,
        cache_size: int = -1,
        cache_dir: str | os.PathLike[str] | None = None,
        url_to_name: Any = None,
        detshuffle: bool = False,
        nodesplitter: Splitter | None = single_node_only,
        workersplitter: Splitter | None = split_by_worker,
        select_files: Callable[[str], bool] | None = None,
        rename_files: Callable[[str], str] | None = None,
        empty_check: bool = True,
        verbose: bool = False,
        seed: int | None = 0,
        max_member_bytes: int = MAX_MEMBER_BYTES,
        max_expansion: int = MAX_EXPANSION,
        cache_bytes: int | str | None = None,
        remote: "RemoteOptions | None" = None,
    ) -> None:
        super().__init__(seed=0 if seed is None else seed)
        resampled, empty_check = checks.flag("resampled", resampled), checks.flag("empty_check", empty_check)
        cache_size = checks.whole("cache_size", cache_size, least=None)
        for name, function in (("handler", handler), ("select_files", select_files), ("rename_files", rename_files)):
            if not callable(function) and (function is not None or name == "handler"):
                raise ConfigError(f"{name}={checks.shown(function)}: expected a function")
        max_member_bytes = parse_size(max_member_bytes, argument="max_member_bytes")
        if cache_bytes is None and cache_size > 0 and cache_dir is not None:
            cache_bytes = cache_size
        files = remote_files(cache_dir or None, cache_bytes, remote, max_expansion=max_expansion)
        reading = Reading(handler, select_files, rename_files, max_member_bytes, files=files)
        source: SimpleShardList | ResampledShards
        if resampled or mode == "resampled":
            # Every rank and worker draws for itself: there is nothing to share out.
            source = ResampledShards(urls)
            splitters = [nodesplitter] if nodesplitter is not single_node_only else []
        else:
            source = SimpleShardList(urls)
            splitters = [nodesplitter, workersplitter]
        self.pipeline += [source, *filter(None, splitters)]
        buffer = _shard_buffer(shardshuffle)
        if buffer and isinstance(source, SimpleShardList):
            self.append(Stage(shuffle_samples, buffer, initial=buffer))
        self.append(Stage(read_samples, reading, source.shards if empty_check else None))


def _shard_buffer(shardshuffle: bool | int | None) -> int:
    if shardshuffle is None or isinstance(shardshuffle, bool):
        return DEFAULT_SHARD_SHUFFLE if shardshuffle else 0
    return checks.whole("shardshuffle", shardshuffle, expected="True, False, or how many shards to draw from")


def tarfile_samples(
    shards: Iterable[Shard],
    handler: Handler = reraise_exception,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
) -> Iterator[Sample]:
    """The samples of shards, as a stage of a ``DataPipeline``."""
    return read_samples(shards, Run(), Reading(handler, select_files, rename_files, tell_path=False))


def tarfile_to_samples(**how: Any) -> Stage:
    """``tarfile_samples`` as a function of an iterator of shards."""
    return Stage(read_samples, Reading(tell_path=False, **how))


def decode(*handlers: Given, handler: Handler = reraise_exception, **how: Any) -> Stage:
    """``WebDataset.decode`` as a stage of a ``DataPipeline``."""
    return Stage(map_samples, Decoder(handlers, **how), handler=handler)


def shardspec(urls: str | Sequence[str]) -> SimpleShardList:
    """Expand a pattern to a list of shards."""
    return SimpleShardList(urls)
