"""The names of ``webdataset.filters``: each verb as a stage (``shuffle``) and as a plain function (``_shuffle``)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce, update_wrapper
from typing import Any

from penstock.errors import ConfigError
from penstock.webdataset import rare_verbs, verbs
from penstock.webdataset.collate import combine_values, default_collation_fn
from penstock.webdataset.decoders import Decoder, Given
from penstock.webdataset.handlers import Handler, reraise_exception
from penstock.webdataset.interface.utils import PipelineStage, identity
from penstock.webdataset.rare_verbs import Cached, LMDBCached
from penstock.webdataset.rare_verbs import find_stream_decoder as find_decoder
from penstock.webdataset.rare_verbs import read_bytes as decode_bin
from penstock.webdataset.rare_verbs import read_text as decode_text
from penstock.webdataset.rare_verbs import refuse_pickle as decode_pickle
from penstock.webdataset.run import Run
from penstock.webdataset.samples import Sample
from penstock.webdataset.shuffle import SeededShuffle as detshuffle  # noqa: N813
from penstock.webdataset.shuffle import draw_one as pick
from penstock.webdataset.shuffle import shuffle_samples
from penstock.webdataset.stage import Curried, Stage
from penstock.webdataset.verbs import Verb

__all__ = [
    "Cached",
    "FilterFunction",
    "LMDBCached",
    "PipelineStage",
    "RestCurried",
    "associate",
    "batched",
    "combine_values",
    "compose",
    "compose2",
    "decode",
    "decode_bin",
    "decode_pickle",
    "decode_text",
    "default_collation_fn",
    "default_decoders",
    "detshuffle",
    "extract_keys",
    "find_decoder",
    "getfirst",
    "identity",
    "info",
    "log_keys",
    "map",
    "map_dict",
    "map_tuple",
    "parse_field_spec",
    "pick",
    "pipeline",
    "pipelinefilter",
    "rename",
    "rename_keys",
    "reraise_exception",
    "rsample",
    "select",
    "shuffle",
    "slice",
    "to_dict",
    "to_tuple",
    "transform_with",
    "unbatched",
    "unlisted",
    "xdecode",
]

default_decoders = rare_verbs.DEFAULT_STREAM_DECODERS


class FilterFunction(Stage):
    """A function of the caller's, from an iterator to an iterator, with its other arguments."""

    def __init__(self, f: Callable[..., Iterable[Any]], /, *args: Any, **kw: Any) -> None:
        super().__init__(verbs.apply_function, f, *args, **kw)
        self.f, self.kw = f, kw

    def __call__(self, samples: Iterable[Any]) -> Any:
        return self.f(samples, *self.args[1:], **self.kw)

    def __repr__(self) -> str:
        return f"<{getattr(self.f, '__name__', self.f)} {self.args[1:]} {self.kw}>"


class RestCurried:
    """Makes stages of one function of the caller's: all arguments but the first are given beforehand."""

    def __init__(self, f: Callable[..., Iterable[Any]]) -> None:
        self.f = f

    def __call__(self, /, *args: Any, **kw: Any) -> FilterFunction:
        return FilterFunction(self.f, *args, **kw)


def pipelinefilter(f: Callable[..., Iterable[Any]]) -> RestCurried:
    """A function from an iterator (and more) to an iterator -> a function that makes stages of it."""
    made = RestCurried(f)
    update_wrapper(made, f)
    return made


def _plain(verb: Verb) -> Callable[..., Iterator[Any]]:
    """A verb as a function of any samples, outside of a pipeline."""

    def function(data: Iterable[Any], /, *args: Any, **options: Any) -> Iterator[Any]:
        return verb(iter(data), Run(), *args, **options)

    return update_wrapper(function, verb)


def decode(*args: Given, handler: Handler = reraise_exception, **kw: Any) -> Stage:
    """``WebDataset.decode`` as a stage."""
    return Stage(verbs.map_samples, Decoder(args, **kw), handler=handler)


def _decode(data: Iterable[Sample], *args: Given, handler: Handler = reraise_exception, **kw: Any) -> Iterator[Sample]:
    return decode(*args, handler=handler, **kw)(data)


_associate, associate = _plain(rare_verbs.add_fields), Curried(rare_verbs.add_fields)
_batched, batched = _plain(verbs.batch_samples), Curried(verbs.batch_samples)
_extract_keys, extract_keys = _plain(verbs.pick_matching), Curried(verbs.pick_matching)
_info, info = _plain(rare_verbs.print_samples), Curried(rare_verbs.print_samples)
_log_keys, log_keys = _plain(verbs.log_samples), Curried(verbs.log_samples)
_map, map = _plain(verbs.map_samples), Curried(verbs.map_samples)
_map_dict, map_dict = _plain(verbs.map_fields), Curried(verbs.map_fields)
_map_tuple, map_tuple = _plain(verbs.map_elements), Curried(verbs.map_elements)
_rename, rename = _plain(verbs.rename_fields), Curried(verbs.rename_fields)
_rename_keys, rename_keys = _plain(verbs.rename_matching), Curried(verbs.rename_matching)
_rsample, rsample = _plain(verbs.draw_samples), Curried(verbs.draw_samples)
_select, select = _plain(verbs.select_samples), Curried(verbs.select_samples)
_shuffle, shuffle = _plain(shuffle_samples), Curried(shuffle_samples)
_slice, slice = _plain(verbs.slice_samples), Curried(verbs.slice_samples)
_to_dict, to_dict = _plain(verbs.fields_to_dict), Curried(verbs.fields_to_dict)
_to_tuple, to_tuple = _plain(verbs.fields_to_tuple), Curried(verbs.fields_to_tuple)
_unbatched, unbatched = _plain(verbs.unbatch_samples), Curried(verbs.unbatch_samples)
_unlisted, unlisted = _plain(verbs.unlist_samples), Curried(verbs.unlist_samples)
_xdecode, xdecode = _plain(rare_verbs.decode_matching), Curried(rare_verbs.decode_matching)


def getfirst(a: Sample, keys: str | Sequence[str], default: Any = None, missing_is_error: bool = True) -> Any:
    """The first field there is of ``"jpg;png"``, or of a list of names."""
    found = verbs.first_of(a, keys, required=missing_is_error)
    return default if found is None and not missing_is_error else found


def parse_field_spec(fields: str | Iterable[str]) -> list[list[str]]:
    """``"jpg;png cls"`` -> ``[["jpg", "png"], ["cls"]]``."""
    return [field.split(";") for field in (fields.split() if isinstance(fields, str) else fields)]


def transform_with(sample: Sequence[Any], transformers: Sequence[Callable[[Any], Any] | None] | None) -> Sequence[Any]:
    """Apply the first function to the first value, and so on; None leaves a value as it is."""
    if not transformers:
        return sample
    if len(transformers) > len(sample):
        raise ConfigError(f"transform_with: {len(transformers)} functions for {len(sample)} values")
    functions = [*transformers, *[None] * (len(sample) - len(transformers))]
    return [value if function is None else function(value) for value, function in zip(sample, functions, strict=True)]


def compose2(f: Callable[[Any], Any], g: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``g(f(x))``."""
    return lambda x: g(f(x))


def compose(*args: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Apply the functions one after another."""
    return reduce(compose2, args)


def pipeline(source: Any, *args: Callable[[Any], Any]) -> Any:
    """A source through the stages."""
    return compose(identity, *args)(source)
