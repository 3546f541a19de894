"""Verbs that few programs use: print samples, join tables to them, decode by pattern, keep them in memory."""

import io
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import IO, Any

from penstock.errors import Unsafe
from penstock.webdataset.handlers import MissingField
from penstock.webdataset.run import Run
from penstock.webdataset.samples import Sample


def print_samples(
    samples: Iterator[Any],
    run: Run,
    /,
    fmt: str | None = None,
    n: int = 3,
    every: int = -1,
    width: int = 50,
    stream: Any = None,
    name: str = "",
) -> Iterator[Any]:
    """Print the first ``n`` samples that pass, and one of ``every``; by a format of their fields if there is one."""
    for number, sample in enumerate(samples, 1):
        if number <= n or (every > 0 and number % every == 0):
            out = stream or sys.stderr
            lines = [f"--- {name}", *(f"{field} {value!r:.{width}}" for field, value in sample.items())]
            print(fmt.format(**sample) if fmt else "\n".join(lines), file=out)
        yield sample


def add_fields(
    samples: Iterator[Sample], run: Run, /, associator: Mapping[str, Sample] | Callable[[str], Sample], **options: Any
) -> Iterator[Sample]:
    """Add what belongs to each key, by a function or from a dict."""
    for sample in samples:
        key = sample["__key__"]
        sample.update(associator(key) if callable(associator) else associator.get(key, {}))
        yield sample


def read_bytes(stream: IO[bytes]) -> bytes:
    """All of a stream."""
    return stream.read()


def read_text(stream: IO[bytes]) -> str:
    """All of a stream, as text."""
    return stream.read().decode("utf-8")


def refuse_pickle(stream: IO[bytes]) -> Any:
    """Refused."""
    raise Unsafe("only unpickling could read it, which runs code from the file; give a function of your own for it")


DEFAULT_STREAM_DECODERS = [("*.bin", read_bytes), ("*.txt", read_text), ("*.pyd", refuse_pickle)]


def find_stream_decoder(decoders: Sequence[tuple[str, Any]], name: str) -> Any:
    """The last of some (pattern, function) that a field's name matches, with or without a dot before it."""
    base = name.rpartition("/")[2].lower()
    found = (
        function for pattern, function in reversed(decoders) if fnmatch(base, pattern) or fnmatch(f".{base}", pattern)
    )
    return next(found, None)


def decode_matching(
    samples: Iterator[Sample],
    run: Run,
    /,
    *patterns: tuple[str, Any],
    must_decode: bool = True,
    defaults: Sequence[tuple[str, Any]] = tuple(DEFAULT_STREAM_DECODERS),
    **functions: Any,
) -> Iterator[Sample]:
    """Fields by functions of a stream of their bytes; False in the place of a function leaves them as they are."""
    decoders = [*defaults, *patterns, *((f"*.{name}", function) for name, function in functions.items())]

    def decoded(name: str, value: Any) -> Any:
        function: Any = False if name.startswith("__") else find_stream_decoder(decoders, name)
        if function is None and must_decode:
            raise MissingField(f"xdecode: no function for the field {name!r}; must_decode=False leaves it as it is")
        return function(io.BytesIO(value) if isinstance(value, bytes) else value) if function else value

    for sample in samples:
        yield {name: decoded(name, value) for name, value in sample.items()}


class Cached:
    """A stage that keeps all samples of the first whole pass in memory, and gives them out again in later ones."""

    def __init__(self) -> None:
        self.cached: list[Any] | None = None

    def run(self, source: Iterable[Any]) -> Iterator[Any]:
        """The samples."""
        if self.cached is not None:
            yield from self.cached
            return
        kept = []
        for sample in source:
            kept.append(sample)
            yield sample
        self.cached = kept


class LMDBCached:
    """Refused: samples in a database would have to be pickled, and unpickled by whoever opens it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        raise Unsafe(
            "LMDBCached would unpickle what it finds in a file, which runs code from the file. WebDataset(cache_dir=…) "
            "keeps shards on disk, Cached() keeps samples in memory, and ShardWriter writes samples to shards"
        )
