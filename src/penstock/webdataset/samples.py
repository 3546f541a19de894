"""From shards to samples: members whose names agree up to the first dot are the fields of one sample.

``train/0017.nsdgeneral.npy`` is the field ``nsdgeneral.npy`` of sample ``train/0017``. A sample is a dict of its
fields' bytes by extension in lower case, with ``__key__`` and ``__url__``, and ``__local_path__`` where the shard is
a file.

Where a shard is an uncompressed file here, or has a copy here (``cache_dir=``), samples are found first and read when
they are given out. So a shuffle right behind holds offsets instead of content: 500 volumes take kilobytes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import Any

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.file_id import FileId
from penstock.base.text_column import decoded
from penstock.base.urls import is_remote, shown_name
from penstock.errors import ConfigError, DataError, LimitExceeded, SourceError
from penstock.files.compression import MAGIC_BYTES, DecompressedStream, name_compression
from penstock.files.files import Files
from penstock.formats.tar.header import LINKS
from penstock.formats.tar.samples import split_name
from penstock.formats.tar.walk import Entry, Walk, Window, walk
from penstock.read.kinds import MAX_MEMBER_BYTES
from penstock.webdataset.handlers import Handler, NoContent, RepeatedField, as_shard_error, reraise_exception
from penstock.webdataset.run import Run
from penstock.webdataset.shards import Shard, local_file, local_path, opened
from penstock.webdataset.splitting import share_of

Sample = dict[str, Any]

MOST_BETWEEN = 64 * 1024
"""Bytes that are read and not used, rather than to read twice."""


@dataclass(frozen=True)
class Reading:
    """How members become samples."""

    handler: Handler = reraise_exception
    select_files: Callable[[str], bool] | None = None
    rename_files: Callable[[str], str] | None = None
    max_member_bytes: int = MAX_MEMBER_BYTES
    tell_path: bool = True
    """Whether samples have a ``__local_path__``."""
    files: Files = field(default_factory=Files)

    def split(self, name: bytes) -> tuple[str, str] | None:
        """Key and field of a member; None if it belongs to no sample."""
        first = name.partition(b"/")[0]
        if len(first) >= 4 and first.startswith(b"__") and first.endswith(b"__"):  # notes about the shard
            return None
        if self.rename_files is not None:
            name = self.rename_files(decoded(name)).encode("utf-8", "surrogateescape")
        if self.select_files is not None and not self.select_files(decoded(name)):
            return None
        found = split_name(name)
        return None if found is None else (decoded(found[0]), decoded(found[1]).lower())


@dataclass(frozen=True)
class _Lent:
    """A file of which a handle is borrowed for each read: passes that are left halfway hold none."""

    file: FileId
    files: Files

    def read_into(self, offset: int, target: np.ndarray, /) -> None:
        with self.files.lend(self.file) as handle:
            handle.read_into(offset, target)


@dataclass(frozen=True, slots=True)
class Unread:
    """The content of a field that was not read yet."""

    file: FileId
    offset: int
    size: int

    def read(self, files: Files) -> bytes:
        """The bytes, if the file is still the one it was."""
        content = np.empty(self.size, np.uint8)
        _Lent(self.file, files).read_into(self.offset, content)
        return content.tobytes()


class SampleReader(Iterator[Sample]):
    """Samples with their content; ``found`` gives the same samples before their content is read."""

    def __init__(self, found: Iterator[Sample], run: Run, reading: Reading) -> None:
        self.found = found
        self._run, self._reading = run, reading
        self._loaded = _load(found, run, reading)

    def __next__(self) -> Sample:
        return next(self._loaded)

    def reorder(self, function: Callable[[Iterator[Sample]], Iterator[Sample]]) -> "SampleReader":
        """Samples in another order, still to be read."""
        return SampleReader(function(self.found), self._run, self._reading)


def _load(found: Iterator[Sample], run: Run, reading: Reading) -> Iterator[Sample]:
    def load(sample: Sample) -> Sample:
        unread = [value for value in sample.values() if isinstance(value, Unread)]
        if len(unread) > 1 and _lie_together(unread):
            return {**sample, **_read_together(sample, unread, reading.files)}
        return {
            name: value.read(reading.files) if isinstance(value, Unread) else value for name, value in sample.items()
        }

    try:
        yield from run.each(found, load, reading.handler, "reading")
    finally:
        reading.files.close()


def _lie_together(unread: Sequence[Unread]) -> bool:
    """Whether one read gets all of them, and little else."""
    span = max(each.offset + each.size for each in unread) - min(each.offset for each in unread)
    return span - sum(each.size for each in unread) <= MOST_BETWEEN and len({each.file for each in unread}) == 1


def _read_together(sample: Sample, unread: Sequence[Unread], files: Files) -> Sample:
    begin = min(each.offset for each in unread)
    content = np.empty(max(each.offset + each.size for each in unread) - begin, np.uint8)
    _Lent(unread[0].file, files).read_into(begin, content)
    return {
        name: content[value.offset - begin :][: value.size].tobytes()
        for name, value in sample.items()
        if isinstance(value, Unread)
    }


def read_samples(
    shards: Iterable[Shard], run: Run, reading: Reading, known: Sequence[Shard] | None = None
) -> SampleReader:
    """The samples of all shards, one shard after another.

    ``known`` are all shards, also those of other processes: if none of them has a sample, that is an error, and not an
    endless search where shards are drawn again and again.
    """
    return SampleReader(_find(shards, run, reading, known), run, reading)


class _Stop(Exception):
    """A handler decided to end here."""


def _find(shards: Iterable[Shard], run: Run, reading: Reading, known: Sequence[Shard] | None) -> Iterator[Sample]:
    shards_without = 0
    anything = False
    for shard in shards:
        shards_without += 1
        try:
            for sample in _samples_of(shard, reading, run):
                shards_without, anything = 0, True
                yield sample
        except _Stop:
            return
        except Exception as error:
            if not run.excuse(reading.handler, error):
                return
        if known and shards_without > len(known):
            _check_not_empty(known, reading, run)
            shards_without = 0
    if known and not anything:
        _check_not_empty(known, reading, run)


def _check_not_empty(known: Sequence[Shard], reading: Reading, run: Run) -> None:
    """Nothing came here; see whether there is anything at all."""
    for shard in known:
        if "stream" in shard:
            continue
        try:
            with _open_archive(shard, reading) as archive:
                if any(reading.split(entry.name) for entry in archive.entries):
                    return
        except Exception:  # noqa: S112  # the handler has seen it
            continue
    alone = run.place.ranks * run.place.workers == 1
    if alone or not any("stream" in shard for shard in known):
        rest = f" and {len(known) - 1:,} more shards" if len(known) > 1 else ""
        left_out = 0 if run.counts is None else run.counts.left_out
        excused = f"; {left_out:,} errors were passed over by handler=" if left_out else ""
        raise ConfigError(
            f"no samples in {shown_name(known[0]['url'])}{rest}{excused}; pass empty_check=False to allow that"
        )


class _Archive:
    """One shard while it is read: its entries, and their content."""

    def __init__(self, name: str, entries: Walk, file: FileId | None, path: str | None, reading: Reading) -> None:
        self.name, self.entries, self.reading = name, entries, reading
        self.path = path
        """Where it, or its copy, is on this machine."""
        self._file = file
        self._linked: dict[str, tuple[int, int]] | None = None
        self._left_out: dict[str, DataError] = {}

    def content(self, entry: Entry) -> bytes | Unread:
        if entry.is_file:
            self._check_size(entry, entry.length)
            if self._file is None:
                return self.entries.content(entry)
            return Unread(self._file, entry.offset, entry.length)
        if self._file is None or entry.kind not in LINKS:
            raise NoContent(
                f"{self.entries.explain(entry)}. Open the archive with penstock.open, which follows links, or write it "
                f"again with the files themselves (tar --dereference --hard-dereference)"
            )
        return self._follow(entry, self._file)

    def _follow(self, entry: Entry, file: FileId) -> Unread:
        """What a link leads to: the shard is walked a second time, as that may come later."""
        if self._linked is None:
            with self.reading.files.lend(file) as handle:
                table = walk(handle)
            self._linked = {name: (offset, length) for name, offset, length in table}
            self._left_out = {decoded(name): why for name, why in table.left_out}
        name = decoded(entry.name)
        if name not in self._linked:
            raise NoContent(str(self._left_out[name]))
        offset, length = self._linked[name]
        self._check_size(entry, length)
        return Unread(file, offset, length)

    def _check_size(self, entry: Entry, size: int) -> None:
        most = self.reading.max_member_bytes
        if size > most:
            raise LimitExceeded(
                f"{self.name}: member {decoded(entry.name)!r} has {size:,} bytes, more than max_member_bytes={most:,}; "
                f"give a larger one if that is intended"
            )


@contextmanager
def _open_archive(shard: Shard, reading: Reading) -> Iterator[_Archive]:
    name, files = shown_name(shard["url"]), reading.files
    file = local_file(shard, files)
    path = (
        local_path(shard) if file is None or files.cache is None or not is_remote(file.path) else files.cache.path(file)
    )
    if file is not None and not name_compression(files.head_of(file, MAGIC_BYTES)):
        yield _Archive(name, Walk(Window(_Lent(file, files))), file, path, reading)
        return
    with opened(shard, files) as source:
        yield _Archive(name, Walk(DecompressedStream(source, name, files.max_expansion)), None, path, reading)


def _samples_of(shard: Shard, reading: Reading, run: Run) -> Iterator[Sample]:
    share, number = share_of(shard), -1
    begin: Sample = {"__url__": shown_name(shard["url"])}
    sample: Sample = {}
    key, begins, wanted = None, 0, False
    try:
        with _open_archive(shard, reading) as archive:
            if reading.tell_path and archive.path is not None:
                begin["__local_path__"] = archive.path
            for entry in archive.entries:
                named = reading.split(entry.name)
                if named is None:
                    continue
                if named[0] != key or archive.entries.begin != begins:
                    if wanted:
                        yield sample
                    number, key, begins = number + 1, named[0], archive.entries.begin
                    wanted, sample = share.has(number), {"__key__": key, **begin}
                if wanted:
                    wanted = _add(sample, named[1], entry, archive, run)
    except (DataError, SourceError) as error:
        # The sample at hand may lack fields, so it is not given out.
        lost = "no sample" if key is None else f"{number:,} whole samples, and {key!r}, which may lack fields,"
        raise as_shard_error(error, f" ({lost} came before)") from error
    if wanted:
        yield sample


def _add(sample: Sample, field: str, entry: Entry, archive: _Archive, run: Run) -> bool:
    """Add a field to its sample; False if the sample is to be left out."""
    try:
        if field in sample:
            fields = ", ".join(each for each in sample if not each.startswith("__"))
            raise RepeatedField(
                f"{archive.name}: sample {sample['__key__']!r} has the field {field!r} twice (member "
                f"{decoded(entry.name)!r} at offset {entry.offset:,}; fields so far: {fields})"
            )
        sample[field] = archive.content(entry)
        return True
    except (RepeatedField, LimitExceeded, NoContent) as error:
        if not run.excuse(archive.reading.handler, error):
            raise _Stop from None
        return isinstance(error, RepeatedField)  # with the first of the two, as programs expect
