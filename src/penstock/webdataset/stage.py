"""What a pipeline is made of: stages, which know the pass that they belong to, and sources, which begin one."""

from collections.abc import Iterable, Iterator
from functools import update_wrapper
from typing import Any

from penstock.webdataset.run import Run
from penstock.webdataset.verbs import Verb


class Stage:
    """A function from an iterator and a pass to an iterator, with its other arguments."""

    def __init__(self, function: Verb, /, *args: Any, **options: Any) -> None:
        self.function, self.args, self.options = function, args, options

    def start(self, samples: Iterable[Any], run: Run) -> Iterator[Any]:
        """Its output in one pass."""
        return self.function(iter(samples), run, *self.args, **self.options)

    def __call__(self, samples: Iterable[Any]) -> Iterator[Any]:
        return self.start(samples, Run())

    def __repr__(self) -> str:
        given = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.options.items())]
        return f"{self.function.__name__}({', '.join(given)})"


class FirstStage:
    """The first stage of a pipeline, if it needs to know the pass."""

    def begin(self, run: Run) -> Iterator[Any]:
        """Its output in one pass."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return self.begin(Run())


class Curried:
    """Makes a stage from a function and its arguments: ``batched(32)``."""

    def __init__(self, function: Verb) -> None:
        update_wrapper(self, function)
        self.function = function

    def __call__(self, /, *args: Any, **options: Any) -> Stage:
        return Stage(self.function, *args, **options)
