"""The verbs as methods: each returns another pipeline with one stage more."""

import os
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any, Self

from penstock.base import checks
from penstock.read.pictures import MAX_PIXELS
from penstock.webdataset import verbs
from penstock.webdataset.collate import default_collation_fn
from penstock.webdataset.decoders import Decoder, FieldDecoder, Given
from penstock.webdataset.handlers import Handler, reraise_exception
from penstock.webdataset.shuffle import shuffle_samples
from penstock.webdataset.verbs import Verb

Function = Callable[[Any], Any]


class Fluent:
    """The verbs as methods."""

    def _then(self, verb: Verb, /, *args: Any, **options: Any) -> Self:
        """Another pipeline with one stage more."""
        raise NotImplementedError

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
        """Draw from the next ``size`` samples at random, beginning when ``initial`` have come.

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

        only:        the fields to decode; the rest stays bytes
        partial:     leave alone what is not bytes any more
        max_pixels:  what a picture may declare; more is refused before it is decoded
        """
        return self.map(Decoder(handlers, pre, post, only, partial=partial, max_pixels=max_pixels), handler=handler)

    def map(self, f: Function, handler: Handler = reraise_exception) -> Self:
        """``f`` of each sample, without those of which it is None."""
        return self._then(verbs.map_samples, f, handler=handler)

    def select(self, predicate: Callable[[Any], bool]) -> Self:
        """The samples of which it is true."""
        return self._then(verbs.select_samples, predicate)

    def rsample(self, p: float = 0.5) -> Self:
        """Each sample with probability ``p``."""
        return self._then(verbs.draw_samples, p)

    def slice(self, *bounds: int | None) -> Self:
        """``slice(stop)`` or ``slice(start, stop, step)``, in each worker."""
        return self._then(verbs.slice_samples, *bounds)

    def log_keys(self, logfile: str | os.PathLike[str] | None = None) -> Self:
        """Write the key of each sample that passes to the end of a file."""
        return self._then(verbs.log_samples, logfile)

    # Fields.

    def rename(self, handler: Handler = reraise_exception, keep: bool = True, **names: str | Sequence[str]) -> Self:
        """``rename(images="jpg;png")``: whichever there is, under the new name."""
        return self._then(verbs.rename_fields, handler=handler, keep=keep, **names)

    def rename_keys(
        self,
        *pairs: tuple[str, str],
        keep_unselected: bool = False,
        must_match: bool = True,
        duplicate_is_error: bool = True,
        **patterns: str,
    ) -> Self:
        """``rename_keys(image="*.jpg")``: fields that match a pattern, under the new name."""
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
        """``to_tuple("jpg;png", "cls")`` or ``to_tuple("jpg;png cls")``: tuples of those verbs."""
        how = {"handler": handler, "missing_is_error": missing_is_error, "none_is_error": none_is_error}
        return self._then(verbs.fields_to_tuple, *names, **how)

    def to_dict(self, *names: str, handler: Handler = reraise_exception) -> Self:
        """``to_dict("image", "label")``: the elements of tuples under these names; of dicts, these fields alone."""
        return self._then(verbs.fields_to_dict, *names, handler=handler)

    def map_dict(self, handler: Handler = reraise_exception, **functions: Function) -> Self:
        """``map_dict(jpg=augment)``: each named field through its function."""
        return self._then(verbs.map_fields, handler=handler, **functions)

    def map_tuple(self, *functions: Function | None, handler: Handler = reraise_exception) -> Self:
        """``map_tuple(augment, None)``: each element through its function."""
        return self._then(verbs.map_elements, *functions, handler=handler)

    # Batches.

    def batched(
        self,
        batchsize: int,
        collation_fn: Callable[[list[Any]], Any] | None = default_collation_fn,
        partial: bool = True,
    ) -> Self:
        """So many samples at a time, stacked; the last batch may have fewer if ``partial``."""
        return self._then(verbs.batch_samples, batchsize, collation_fn=collation_fn, partial=partial)

    def unbatched(self) -> Self:
        """Batches back into samples."""
        return self._then(verbs.unbatch_samples)

    def listed(self, batchsize: int, partial: bool = True) -> Self:
        """Lists of so many samples, as they are."""
        return self._then(verbs.batch_samples, batchsize, collation_fn=None, partial=partial)

    def unlisted(self) -> Self:
        """Lists back into samples."""
        return self._then(verbs.unlist_samples)
