"""The names of ``webdataset.shardlists``."""

import glob
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field
from itertools import count, islice
from typing import Any

from penstock.base import checks
from penstock.base.dataclass import dataclass
from penstock.errors import ConfigError
from penstock.formats.paths import expand_braces
from penstock.webdataset.dataset import ResampledShards, SimpleShardList
from penstock.webdataset.interface.filters import pipelinefilter
from penstock.webdataset.run import Run
from penstock.webdataset.shards import MAX_SHARDS, Shard, expand_urls
from penstock.webdataset.shards import with_environment as envsubst
from penstock.webdataset.splitting import single_node_only, split_by_node, split_by_worker
from penstock.webdataset.stage import Curried, FirstStage

__all__ = [
    "DirectoryShardList",
    "MSSource",
    "MultiShardSample",
    "ResampledShardList",
    "ResampledShards",
    "SimpleShardList",
    "envsubst",
    "expand",
    "expand_source",
    "expand_urls",
    "non_empty",
    "pipelinefilter",
    "resampled",
    "resampled_",
    "shardspec",
    "single_node_only",
    "split_by_node",
    "split_by_worker",
]

ResampledShardList = ResampledShards


def expand(s: str) -> str:
    """A path with ``~`` and the environment's variables filled in."""
    return os.path.expanduser(os.path.expandvars(s))


def expand_source(source: Any, max_urls: int = MAX_SHARDS) -> list[Any]:
    """The names that a pattern stands for, or a list of those that are given."""
    if isinstance(source, str):
        return expand_urls(source)
    if isinstance(source, Iterable):
        return source if isinstance(source, list) else list(islice(source, max_urls))
    raise ConfigError(f"{checks.shown(source)}: expected a pattern of shards, or their names")


def _draw_shards(shards: Iterator[Any], run: Run, /, n: int | None = None) -> Iterator[Any]:
    items, rng = list(shards), run.rng()
    for _ in count() if n is None else range(n):
        yield rng.choice(items)


def resampled_(src: Iterable[Any], n: int | None = None) -> Iterator[Any]:
    """Items drawn with replacement, ``n`` times or for ever."""
    return _draw_shards(iter(src), Run(), n)


resampled = Curried(_draw_shards)


def non_empty(src: Iterable[Any]) -> Iterator[Any]:
    """The items; an error if there are none."""
    anything = False
    for item in src:
        anything = True
        yield item
    if not anything:
        raise ConfigError(
            "nothing came through this stage, which makes that an error; leave it out if nothing may come"
        )


@dataclass
class MSSource:
    """One of several lists of shards."""

    name: str = ""
    perepoch: int = -1
    resample: int = -1
    urls: list[str] = field(default_factory=list)


class MultiShardSample(FirstStage):
    """Shards of several lists: all of them, ``choose`` of them, or ``resample`` draws, in another order per epoch.

    The lists are a dict: ``{"prefix": …, "datasets": [{"name": …, "buckets": …, "shards": …, "choose": …}]}``.
    """

    def __init__(self, fname: Any) -> None:
        if not isinstance(fname, dict):
            raise ConfigError(
                f"{checks.shown(fname)}: lists of shards in YAML are not read here; pass the dict that it stands for, "
                f"such as yaml.safe_load(open(path))"
            )
        prefix = expand(fname.get("prefix", ""))
        self.sources = [_source(each, prefix, fname.get("buckets", "")) for each in fname["datasets"]]
        self.seed: int | None = None

    def set_epoch(self, seed: int) -> None:
        """Let the order follow from this number alone."""
        self.seed = seed

    def begin(self, run: Run) -> Iterator[Shard]:
        """The shards of one epoch; the same in all processes, which share them out behind this."""
        rng = run.rng(run.seed) if self.seed is None else random.Random(self.seed)  # noqa: S311
        urls: list[str] = []
        for source in self.sources:
            if source.resample > 0:
                urls += rng.choices(source.urls, k=source.resample)
            else:
                urls += rng.sample(source.urls, source.perepoch if source.perepoch > 0 else len(source.urls))
        rng.shuffle(urls)
        return ({"url": url} for url in urls)


def _source(given: dict[str, Any], prefix: str, buckets: Any) -> MSSource:
    unknown = set(given) - {"buckets", "name", "shards", "resample", "choose"}
    if unknown:
        raise ConfigError(f"datasets: unknown entries {', '.join(sorted(unknown))}")
    bucket = given.get("buckets", buckets)
    if isinstance(bucket, list) and len(bucket) > 1:
        raise ConfigError(f"buckets={bucket}: one bucket per dataset; list the others as datasets of their own")
    bucket = expand(bucket[0] if isinstance(bucket, list) and bucket else bucket or "")
    patterns = [given["shards"]] if isinstance(given["shards"], str) else given["shards"]
    urls = [prefix + os.path.join(bucket, url) for pattern in patterns for url in expand_braces(expand(pattern))]
    resample, choose = given.get("resample", -1), given.get("choose", -1)
    if choose > len(urls) or (choose > 0 and resample > 0):
        raise ConfigError(f"choose={choose}, resample={resample}: give one of them; there are {len(urls)} shards")
    return MSSource(given.get("name", f"@{bucket}"), choose, resample, urls)


_TAKEN = re.compile(r"(.*)\._(\d+)_")


class DirectoryShardList(FirstStage):
    """Shards that appear in a folder, each taken by one process: renamed while it is read, then as ``mode`` says.

    mode:    "unlink" removes it, "keep" names it ``._done_``, "resample" gives it its name back
    select:  "random" or "oldest"
    poll:    seconds between looks while there is nothing; None to end then
    timeout: seconds after which to end in any case
    """

    def __init__(
        self,
        path: str,
        pattern: str = "*.{tar,tgz,tar.tgz}",
        poll: float | None = 1,
        timeout: float = 1e12,
        mode: str = "resample",
        select: str = "random",
        fate: Any = None,
    ) -> None:
        if not path.endswith("/") or not os.path.isdir(path):
            raise ConfigError(f"{path!r}: expected a folder, written with a slash at its end")
        self.path, self.pattern, self.poll, self.timeout, self.fate = path, pattern, poll, timeout, fate
        self.mode = checks.one_of("mode", mode or "resample", ("unlink", "keep", "resample"))
        self.select = checks.one_of("select", select, ("random", "oldest"))

    def begin(self, run: Run) -> Iterator[Shard]:
        """One shard after another, for as long as any come."""
        rng, end = run.rng(), time.monotonic() + self.timeout
        choose: Callable[[list[str]], str] = rng.choice if self.select == "random" else _oldest
        while time.monotonic() < end:
            found = sorted(path for each in expand_braces(self.path + self.pattern) for path in glob.glob(each))
            taken = _take(choose, found)
            if taken is not None:
                yield {"url": taken}
                self.recycle(taken)
                self.cleanup_files_without_processes()
            elif self.poll is None:
                return
            else:
                time.sleep(self.poll)

    def recycle(self, activename: str) -> None:
        """What becomes of a shard that was read."""
        name = activename.rpartition(".")[0]
        if self.mode == "unlink":
            os.unlink(activename)
        else:
            os.rename(activename, f"{name}._done_" if self.mode == "keep" else name)

    def cleanup_files_without_processes(self) -> None:
        """The same for shards that a process took which is no more."""
        for path in glob.glob(os.path.join(glob.escape(self.path), "*._*_")):
            found = _TAKEN.fullmatch(path)
            if found and not _is_running(int(found[2])):
                self.recycle(path)


def _take(choose: Callable[[list[str]], str], found: list[str]) -> str | None:
    if not found:
        return None
    try:
        path = choose(found)
        os.rename(path, f"{path}._{os.getpid()}_")
    except FileNotFoundError:  # another process was quicker
        return None
    return f"{path}._{os.getpid()}_"


def _oldest(paths: list[str]) -> str:
    return min(paths, key=lambda path: os.stat(path).st_mtime_ns)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def shardspec(spec: Any) -> FirstStage:
    """The shards that a pattern stands for."""
    if isinstance(spec, dict) or (isinstance(spec, str) and spec.endswith((".yaml", ".yml"))):
        return MultiShardSample(spec)
    return SimpleShardList(spec)
