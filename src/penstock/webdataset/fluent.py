"""The verbs as methods: each returns a new pipeline with one more stage."""

import os
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any, Self

from penstock.base import checks
from penstock.read.pictures import MAX_PIXELS
from penstock.webdataset import rare_verbs, verbs
from penstock.webdataset.collate import default_collation_fn
from penstock.webdataset.decoders import Decoder, FieldDecoder, Given
from penstock.webdataset.handlers import Handler, reraise_exception
from penstock.webdataset.shuffle import shuffle_samples
from penstock.webdataset.stage import Stage
from penstock.webdataset.verbs import Verb

Function = Callable[[Any], Any]


class RareFluent:
    """What few programs use as methods, for a class that has ``compose``."""

    def _then(self, verb: Verb, /, *args: Any, **options: Any) -> Self:
        """A new pipeline with one more stage."""
        return self.compose(Stage(verb, *args, **options))

    def compose(self, *stages: Any) -> Self:
        """A new pipeline with these stages added at the end."""
        raise NotImplementedError

    def xdecode(self, *patterns: Any, must_decode: bool = True, **functions: Function) -> Self:
        """``xdecode(png=read_png)``: fields by functions of a stream of their bytes, by extension."""
        return self._then(rare_verbs.decode_matching, *patterns, must_decode=must_decode, **functions)

    def mcached(self) -> Self:
        """Keep all samples of the first pass in memory, and give them out again in the next ones."""
        return self.compose(rare_verbs.Cached())

    def lmdb_cached(self, *args: Any, **options: Any) -> Self:
        """Refused: it would unpickle. ``cache_dir=`` keeps shards, ``mcached`` keeps samples in memory."""
        return self.compose(rare_verbs.LMDBCached(*args, **options))


class Fluent(RareFluent):
    """The verbs as methods, for a class that has ``compose``."""

    def then(self, function: Verb, /, *args: Any, **options: Any) -> Self:
        """Pass the samples through a function of your own, from an iterator to an iterator."""
        return self._then(verbs.apply_function, function, *args, **options)

    # Samples.

    def shuffle(
        self,
        size: int,
        initial: int = 100,
        rng: Random | None = None,
        seed: int | None = None,
        handler: Handler | None = None,
    ) -> Self:
        """Shuffle with a buffer of ``size`` samples; output begins when the buffer holds ``initial`` of them.

        Without ``rng`` the order follows from the dataset's seed, the epoch, the rank and the worker; or from ``seed``
        and the epoch, the same in all ranks and workers.
        """
        size, initial = checks.whole("shuffle: size", size, least=None), checks.whole("shuffle: initial", initial)
        if size < 1:
            return self
        return self._then(shuffle_samples, size, initial=initial, rng=rng, seed=seed)

    def decode(
        self,
        *handlers: Given,
        pre: Iterable[FieldDecoder] | None = None,
        post: Iterable[FieldDecoder] | None = None,
        only: str | Iterable[str] | None = None,
        partial: bool = False,
        handler: Handler = reraise_exception,
        max_pixels: int = MAX_PIXELS,
    ) -> Self:
        """Decode fields by their extension: pictures by mode (``"torch"``, ``"rgb8"``, ``"pil"``…), your own functions.

        only:        the fields to decode; others stay bytes
        partial:     skip values that are no longer bytes
        max_pixels:  pictures that declare more pixels are refused before they are decoded
        """
        return self.map(Decoder(handlers, pre, post, only, partial=partial, max_pixels=max_pixels), handler=handler)

    def map(self, f: Function, handler: Handler = reraise_exception) -> Self:
        """Apply ``f`` to each sample; samples for which it returns None are dropped."""
        return self._then(verbs.map_samples, f, handler=handler)

    def select(self, predicate: Callable[[Any], bool]) -> Self:
        """Keep the samples for which the function returns True."""
        return self._then(verbs.select_samples, predicate)

    def rsample(self, p: float = 0.5) -> Self:
        """Keep each sample with probability ``p``."""
        return self._then(verbs.draw_samples, p)

    def slice(self, *bounds: int | None) -> Self:
        """Keep some samples by position: ``slice(stop)`` or ``slice(start, stop, step)``, counted in each worker."""
        return self._then(verbs.slice_samples, *bounds)

    def log_keys(self, logfile: str | os.PathLike[str] | None = None) -> Self:
        """Append the key of each sample to a file."""
        return self._then(verbs.log_samples, logfile)

    # Fields.

    def rename(self, handler: Handler = reraise_exception, keep: bool = True, **names: str | Sequence[str]) -> Self:
        """``rename(images="jpg;png")``: the field jpg, or else png, gets the new name."""
        return self._then(verbs.rename_fields, handler=handler, keep=keep, **names)

    def rename_keys(
        self,
        *pairs: tuple[str, str],
        keep_unselected: bool = False,
        must_match: bool = True,
        duplicate_is_error: bool = True,
        **patterns: str,
    ) -> Self:
        """``rename_keys(image="*.jpg")``: the field that matches the pattern gets the new name."""
        how = {"keep_unselected": keep_unselected, "must_match": must_match, "duplicate_is_error": duplicate_is_error}
        return self._then(verbs.rename_matching, *pairs, **how, **patterns)

    def extract_keys(
        self, *patterns: str | Sequence[str], duplicate_is_error: bool = True, ignore_missing: bool = False
    ) -> Self:
        """``extract_keys("*.png;*.jpg", "*.cls")``: tuples of the fields that match."""
        how = {"duplicate_is_error": duplicate_is_error, "ignore_missing": ignore_missing}
        return self._then(verbs.pick_matching, *patterns, **how)

    def to_tuple(
        self,
        *names: str | Sequence[str],
        handler: Handler = reraise_exception,
        missing_is_error: bool = True,
        none_is_error: bool | None = None,
    ) -> Self:
        """``to_tuple("jpg;png", "cls")`` or ``to_tuple("jpg;png cls")``: tuples of these fields."""
        how = {"handler": handler, "missing_is_error": missing_is_error, "none_is_error": none_is_error}
        return self._then(verbs.fields_to_tuple, *names, **how)

    def to_dict(self, *names: str, handler: Handler = reraise_exception) -> Self:
        """``to_dict("image", "label")``: name the elements of tuples; of dicts, keep only these fields."""
        return self._then(verbs.fields_to_dict, *names, handler=handler)

    def map_dict(self, handler: Handler = reraise_exception, **functions: Function) -> Self:
        """``map_dict(jpg=augment)``: apply a function to each named field."""
        return self._then(verbs.map_fields, handler=handler, **functions)

    def map_tuple(self, *functions: Function | None, handler: Handler = reraise_exception) -> Self:
        """``map_tuple(augment, None)``: apply a function to each element; None leaves it as it is."""
        return self._then(verbs.map_elements, *functions, handler=handler)

    # Batches.

    def batched(
        self,
        batchsize: float,
        collation_fn: Callable[[list[Any]], Any] | None = default_collation_fn,
        partial: bool = True,
    ) -> Self:
        """Stack samples into batches; with ``partial``, the last batch may be smaller."""
        return self._then(verbs.batch_samples, batchsize, collation_fn=collation_fn, partial=partial)

    def unbatched(self) -> Self:
        """Split batches into samples again."""
        return self._then(verbs.unbatch_samples)

    def listed(self, batchsize: int, partial: bool = True) -> Self:
        """Collect samples into lists, without stacking them."""
        return self._then(verbs.batch_samples, batchsize, collation_fn=None, partial=partial)

    def unlisted(self) -> Self:
        """Split lists into samples again."""
        return self._then(verbs.unlist_samples)
