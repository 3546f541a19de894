"""From shards to samples: members whose names agree up to the first dot are the fields of one sample.

``train/0017.nsdgeneral.npy`` is the field ``nsdgeneral.npy`` of sample ``train/0017``. A sample is a dict of its
fields' bytes by extension in small letters, with ``__key__`` and ``__url__``, and ``__local_path__`` where the shard is
a file.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ConfigError, LimitExceeded
from penstock.extents import FileId
from penstock.fileio import Files
from penstock.handles import identify
from penstock.kinds import MAX_MEMBER_BYTES
from penstock.packing import Readable
from penstock.urls import is_remote, shown
from penstock.webdataset.faults import CorruptShard, RepeatedField, TruncatedShard
from penstock.webdataset.handlers import Handler, reraise_exception
from penstock.webdataset.later import Later
from penstock.webdataset.names import Shard
from penstock.webdataset.runs import Run
from penstock.webdataset.sources import local_path, opened
from penstock.webdataset.splitting import share_of
from penstock.webdataset.tarstream import BLOCK, Member, read_members

Sample = dict[str, Any]


@dataclass(frozen=True)
class Reading:
    """How members become samples."""

    handler: Handler = reraise_exception
    select_files: Callable[[str], bool] | None = None
    rename_files: Callable[[str], str] | None = None
    max_member_bytes: int = MAX_MEMBER_BYTES
    tell_path: bool = True
    later: bool = False
    """Whether content is only pointed at, where that can be done."""
    files: Files = field(default_factory=Files)
    """What reads shards on other machines, and what was only pointed at."""


class _Stop(Exception):
    """A handler said to end here."""


def read_samples(
    shards: Iterable[Shard], run: Run, reading: Reading, known: Sequence[Shard] | None = None
) -> Iterator[Sample]:
    """The samples of all shards, one shard after another.

    ``known`` are all there are, also those for other processes: if none of them has a sample, that is an error, and not
    an endless search where shards are drawn again and again.
    """
    dry = 0
    anything = False
    for shard in shards:
        dry += 1
        try:
            for sample in _samples_of(shard, reading, run):
                dry, anything = 0, True
                yield sample
        except _Stop:
            return
        except Exception as error:
            if not run.excuse(reading.handler, error):
                return
        if known and dry > len(known):
            _check_not_empty(known, reading, run)
            dry = 0
    if known and not anything:
        _check_not_empty(known, reading, run)


def _check_not_empty(known: Sequence[Shard], reading: Reading, run: Run) -> None:
    """Nothing came here; see whether there is anything at all."""
    for shard in known:
        if "stream" in shard:
            continue
        try:
            with opened(shard, reading.files) as source:
                if any(_named(member, reading) for member in _members_of(source, shown(shard["url"]), reading)):
                    return
        except Exception:  # noqa: S112  # the handler has seen it
            continue
    alone = run.place.ranks * run.place.workers == 1
    if alone or not any("stream" in shard for shard in known):
        rest = f" and {len(known) - 1:,} more shards" if len(known) > 1 else ""
        left_out = 0 if run.counts is None else run.counts.left_out
        excused = f"; {left_out:,} errors were passed over by handler=" if left_out else ""
        raise ConfigError(f"no samples in {shown(known[0]['url'])}{rest}{excused}; empty_check=False if that is meant")


def _members_of(source: Readable, name: str, reading: Reading) -> Iterator[Member]:
    return read_members(source, name, reading.files.max_expansion)


def _samples_of(shard: Shard, reading: Reading, run: Run) -> Iterator[Sample]:
    share, number = share_of(shard), -1
    name = shown(shard["url"])
    begin: Sample = {"__url__": name}
    path = local_path(shard) if reading.tell_path else None
    if path is not None:
        begin["__local_path__"] = path
    sample: Sample = {}
    key, wanted = None, False
    file = _pointed_at(shard, reading.files) if reading.later else None
    with opened(shard, reading.files) as source:
        try:
            for member in _members_of(source, name, reading):
                named = _named(member, reading)
                if named is None:
                    continue
                if named[0] != key:
                    if wanted:
                        yield sample
                    number, key = number + 1, named[0]
                    wanted, sample = share.has(number), {"__key__": key, **begin}
                if wanted:
                    wanted = _add(sample, named[1], member, reading, run, file)
        except (TruncatedShard, CorruptShard) as error:
            # The sample at hand may lack fields, so it is not handed out.
            lost = "no sample" if key is None else f"{number:,} whole samples, and {key!r}, which may lack fields,"
            raise type(error)(f"{error} ({lost} came before)") from error
    if wanted:
        yield sample


def _named(member: Member, reading: Reading) -> tuple[str, str] | None:
    """Key and field of a member; None if it is none of a sample's."""
    name = member.name
    first = name.partition("/")[0]
    if len(first) >= 4 and first.startswith("__") and first.endswith("__"):  # notes about the shard
        return None
    if reading.rename_files is not None:
        name = reading.rename_files(name)
    if reading.select_files is not None and not reading.select_files(name):
        return None
    return split_name(name)


def split_name(name: str) -> tuple[str, str] | None:
    """``a/b.c/d.seg.png`` -> ``a/b.c/d`` and ``seg.png``; None for files that are hidden or have no extension."""
    folder, slash, base = name.rpartition("/")
    stem, dot, extension = base.partition(".")
    return (folder + slash + stem, extension.lower()) if stem and dot else None


def _pointed_at(shard: Shard, files: Files) -> FileId | None:
    """The file that content can be read from later; None where it is not a file, or not there."""
    if "stream" not in shard and is_remote(shard["url"]):
        return files.copied(files.remote.admit(shard["url"]))
    path = local_path(shard)
    return identify(path) if path is not None and os.path.isfile(path) else None


def _content(member: Member, reading: Reading, file: FileId | None) -> bytes | Later:
    if file is None or not member.stream.plain:
        return member.read(reading.max_member_bytes)
    member.check(reading.max_member_bytes)
    return Later(file, member.offset + BLOCK, member.size)


def _add(sample: Sample, field: str, member: Member, reading: Reading, run: Run, file: FileId | None = None) -> bool:
    """Read a field into its sample; False if the sample is to be left out."""
    try:
        if field in sample:
            fields = ", ".join(each for each in sample if not each.startswith("__"))
            raise RepeatedField(
                f"{sample['__url__']}: sample {sample['__key__']!r} has the field {field!r} twice (member "
                f"{member.name!r} at byte {member.offset:,}; fields so far: {fields})"
            )
        sample[field] = _content(member, reading, file)
        return True
    except (RepeatedField, LimitExceeded) as error:
        if not run.excuse(reading.handler, error):
            raise _Stop from None
        return isinstance(error, RepeatedField)  # with the first of the two, as programs expect
