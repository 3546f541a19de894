"""The names of ``webdataset.tariterators``: shards -> open streams -> members -> samples, one step at a time.

``tarfile_samples`` does all of it, and more quickly. The steps are for programs that put one of their own in between.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from penstock.base.text_column import decoded
from penstock.errors import ConfigError, PenstockError
from penstock.files.compression import DecompressedStream
from penstock.files.files import Files
from penstock.formats.tar.samples import split_name
from penstock.formats.tar.walk import Walk
from penstock.webdataset.dataset import tarfile_samples, tarfile_to_samples
from penstock.webdataset.handlers import Handler, NoContent, RepeatedField, as_shard_error, reraise_exception
from penstock.webdataset.samples import Sample
from penstock.webdataset.shards import Shard, expand, opened
from penstock.webdataset.splitting import share_of

__all__ = [
    "base_plus_ext",
    "group_by_keys",
    "meta_prefix",
    "meta_suffix",
    "shardlist",
    "tar_file_expander",
    "tar_file_iterator",
    "tarfile_samples",
    "tarfile_to_samples",
    "url_opener",
    "valid_sample",
]

meta_prefix = meta_suffix = "__"
trace = False

Member = dict[str, Any]


class EndOfShard(dict[str, Any]):
    """Comes behind the members of a shard, so that samples of different shards do not mix: an empty dict.

    Programs that were written when there was none look for a member's name in it, and find one of no sample.
    """

    def __missing__(self, name: str) -> Any:
        return b"" if name == "data" else ""


def base_plus_ext(path: str) -> tuple[str | None, str | None]:
    """``a/b.seg.png`` -> ``a/b`` and ``seg.png``; two None if it has no extension."""
    found = split_name(path.encode("utf-8", "surrogateescape"))
    return (None, None) if found is None else (decoded(found[0]), decoded(found[1]))


def valid_sample(sample: Any) -> bool:
    """Whether it is a dict with anything in it that is not marked as bad."""
    return isinstance(sample, dict) and bool(sample) and not sample.get("__bad__", False)


def shardlist(urls: Any, *, shuffle: bool = False) -> Iterator[Shard]:
    """The shards a pattern or list stands for."""
    if shuffle:
        raise ConfigError("shardlist(shuffle=True): use SimpleShardList(urls, seed=…), the same in all processes")
    return iter(expand(urls))


def url_opener(data: Iterable[Shard], handler: Handler = reraise_exception, **kw: Any) -> Iterator[Shard]:
    """Each shard with a ``stream`` of its bytes, which is closed when the next shard is asked for."""
    files = Files()
    for shard in data:
        if not isinstance(shard, dict) or "url" not in shard:
            raise ConfigError(f"url_opener: a shard is a dict with a 'url', not {shard!r:.100}")
        try:
            lending = opened(shard, files)
            stream = lending.__enter__()
        except Exception as error:
            if handler(_as_shard_error(error)):
                continue
            return
        try:
            yield {**shard, "stream": stream}
        finally:
            lending.__exit__(None, None, None)


def tar_file_iterator(
    fileobj: Any,
    skip_meta: str | None = r"__[^/]*__($|/)",
    handler: Handler = reraise_exception,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
) -> Iterator[Member]:
    """The members of an open tar: dicts of ``fname`` and ``data``."""
    walk = Walk(DecompressedStream(fileobj, str(getattr(fileobj, "name", "<stream>"))))
    for entry in walk:
        name = decoded(entry.name)
        try:
            if skip_meta is not None and re.match(skip_meta, name):
                continue
            name = name if rename_files is None else rename_files(name)
            if select_files is not None and not select_files(name):
                continue
            if not entry.is_file:
                raise NoContent(walk.explain(entry))
        except Exception as error:
            if handler(error):
                continue
            return
        yield {"fname": name, "data": walk.content(entry)}


def tar_file_expander(
    data: Iterable[Shard],
    handler: Handler = reraise_exception,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
    eof_value: Any = EndOfShard(),  # noqa: B008
) -> Iterator[Member]:
    """The members of open shards, with their ``__url__``; of a shard that is shared out, this process's samples."""
    for source in data:
        try:
            told = {"__url__": source["url"]}
            if source.get("local_path") is not None:
                told["__local_path__"] = source["local_path"]
            members = tar_file_iterator(
                source["stream"], handler=handler, select_files=select_files, rename_files=rename_files
            )
            for member in _shared_out(members, source):
                yield {**member, **told}
            if eof_value is not None:
                yield eof_value
        except Exception as error:
            if not handler(_as_shard_error(error)):
                return


def _as_shard_error(error: Exception) -> Exception:
    return as_shard_error(error) if isinstance(error, PenstockError) else error


def _shared_out(members: Iterator[Member], shard: Shard) -> Iterator[Member]:
    share, number, key = share_of(shard), -1, None
    for member in members:
        found = base_plus_ext(member["fname"])[0]
        if found is not None and found != key:
            number, key = number + 1, found
        if share.has(number):
            yield member


def group_by_keys(
    data: Iterable[Member],
    keys: Callable[[str], tuple[str | None, str | None]] = base_plus_ext,
    lcase: bool = True,
    suffixes: Collection[str] | None = None,
    handler: Handler = reraise_exception,
) -> Iterator[Sample]:
    """Samples of members that follow one another and have the same key."""
    sample: Sample = {}
    for member in data:
        try:
            key, field = (None, None) if not member else keys(member["fname"])
            if (not member or (key is not None and key != sample.get("__key__"))) and valid_sample(sample):
                yield sample
                sample = {}
            if key is None or field is None:
                continue
            field = field.lower() if lcase else field
            if not sample:
                sample = {"__key__": key}
                sample.update((name, member[name]) for name in ("__url__", "__local_path__") if name in member)
            if field in sample:
                raise RepeatedField(f"{member['fname']}: sample {key!r} has the field {field!r} twice")
            if suffixes is None or field in suffixes:
                sample[field] = member["data"]
        except Exception as error:
            if not handler(error):
                break
    if valid_sample(sample):
        yield sample
