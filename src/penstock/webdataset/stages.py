"""A function from samples to samples, kept together with its arguments until a pass begins.

Such a function takes an iterator of samples and the pass it belongs to, then its own arguments. A stage can be sent to
worker processes if its arguments can.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import update_wrapper
from typing import Any

from penstock.webdataset.runs import Run

Verb = Callable[..., Iterator[Any]]


class Stage:
    """One such function, with its arguments."""

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


class Source:
    """What begins a pipeline and wants to know the pass."""

    def begin(self, run: Run) -> Iterator[Any]:
        """Its output in one pass."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return self.begin(Run())


class Curried:
    """Makes stages of one function: ``batched(32)`` is what a pipeline is composed of."""

    def __init__(self, function: Verb) -> None:
        update_wrapper(self, function)
        self.function = function

    def __call__(self, /, *args: Any, **options: Any) -> Stage:
        return Stage(self.function, *args, **options)


def apply_function(samples: Iterator[Any], run: Run, function: Verb, /, *args: Any, **options: Any) -> Iterator[Any]:
    """The caller's own function, which knows nothing of passes."""
    return function(samples, *args, **options)
