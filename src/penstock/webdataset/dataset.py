"""``WebDataset``: shards in, samples out, in the order of the files unless asked otherwise."""

import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from penstock.base import checks
from penstock.base.sizes import parse_size
from penstock.errors import ConfigError
from penstock.files.compression import MAX_EXPANSION
from penstock.files.files import remote_files
from penstock.read.kinds import MAX_MEMBER_BYTES
from penstock.webdataset.handlers import Handler, reraise_exception
from penstock.webdataset.interface.utils import make_seed
from penstock.webdataset.pipeline import DataPipeline
from penstock.webdataset.run import Run
from penstock.webdataset.samples import Reading, Sample, read_samples
from penstock.webdataset.shards import MAX_SHARDS, Shard, expand
from penstock.webdataset.shuffle import shuffle_samples
from penstock.webdataset.splitting import single_node_only, split_by_worker
from penstock.webdataset.stage import FirstStage, Stage

if TYPE_CHECKING:
    from penstock.remote.ranges import RemoteOptions

Splitter = Callable[[Iterable[Shard]], Iterable[Shard]]

DEFAULT_SHARD_SHUFFLE = 100


class SimpleShardList(FirstStage):
    """Shards in the order they are named, or in that of ``seed``; True stands for another order in each epoch."""

    def __init__(self, urls: Any, seed: int | None = None) -> None:
        self.shards = expand(urls)
        self.seed = seed

    def begin(self, run: Run) -> Iterator[Shard]:
        """Every shard once."""
        shards = [dict(shard) for shard in self.shards]
        if self.seed is True:
            run.rng(run.seed).shuffle(shards)
        elif self.seed is not None:
            random.Random(self.seed).shuffle(shards)  # noqa: S311
        return iter(shards)

    @property
    def urls(self) -> list[str]:
        """The names of the shards."""
        return [shard["url"] for shard in self.shards]

    def __len__(self) -> int:
        return len(self.shards)


_lists_made = count()


class ResampledShards(FirstStage):
    """Shards drawn with replacement, for ever (or ``nshards`` times): others in each epoch, rank and worker.

    urls:          as for ``WebDataset``
    seed:          what the draws follow from
    deterministic: draw as the ``webdataset`` package does: by ``worker_seed()``, the epoch and the seed alone.
                   Otherwise the draws also follow from the seed of the pipeline; outside of a pipeline, lists that a
                   program makes one after another draw differently
    worker_seed:   a function whose number tells workers apart
    """

    def __init__(
        self,
        urls: Any,
        nshards: int | None = None,
        seed: int | None = None,
        worker_seed: Callable[[], int] | None = None,
        deterministic: bool = False,
        max_urls: int = MAX_SHARDS,
        empty_check: bool = True,
    ) -> None:
        max_urls = checks.whole("max_urls", max_urls, least=1, most=sys.maxsize)
        nshards = None if nshards is None else checks.whole("nshards", nshards)
        deterministic = checks.flag("deterministic", deterministic)
        checks.flag("empty_check", empty_check)
        if worker_seed is not None:
            checks.function("worker_seed", worker_seed)
        if not isinstance(urls, str | os.PathLike) and not hasattr(urls, "read") and isinstance(urls, Iterable):
            urls = list(islice(urls, max_urls))
        self.shards = expand(urls)
        self.nshards, self.seed, self.worker_seed, self.deterministic = nshards, seed, worker_seed, deterministic
        self.epoch = -1
        self._number = next(_lists_made)
        if any("stream" in shard for shard in self.shards):
            raise ConfigError("resampled=True: a file object can be read once, so shards to draw from must be files")

    @property
    def urls(self) -> list[str]:
        """Their names."""
        return [shard["url"] for shard in self.shards]

    def __iter__(self) -> Iterator[Shard]:
        """One pass outside of a pipeline, and of its seed."""
        return self.begin(Run(seed=self._number, epoch=self.epoch + 1))

    def begin(self, run: Run) -> Iterator[Shard]:
        """As many draws as were asked for."""
        self.epoch = run.epoch
        rng = self._rng(run)
        for _ in count() if self.nshards is None else range(self.nshards):
            yield dict(self.shards[rng.randint(0, len(self.shards) - 1)])

    def _rng(self, run: Run) -> random.Random:
        of_worker = 1000 * run.place.rank + run.place.worker if self.worker_seed is None else self.worker_seed()
        if self.deterministic:
            return random.Random(make_seed(of_worker, run.epoch, self.seed or 0))  # noqa: S311
        return random.Random(f"{run.seed}/{self.seed}/{run.epoch}/{of_worker}/{run.place.rank}")  # noqa: S311


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
        for name, splitter in (("nodesplitter", nodesplitter), ("workersplitter", workersplitter)):
            if splitter is not None:
                checks.function(name, splitter)
        for name, value in (("repeat", repeat), ("detshuffle", detshuffle)):
            checks.flag(name, value)
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
