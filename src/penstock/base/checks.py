"""Arguments, checked where a caller gives them: values come back as plain Python, everything else is refused.

Numpy's numbers and booleans are accepted. True is not a number, and a text or a list is not a boolean.
"""

import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import Parameter, signature
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np

from penstock.errors import ConfigError, WrongArgument

P = ParamSpec("P")
R = TypeVar("R")

SHOWN_CHARACTERS = 200
"""Characters of a bad value that an error shows."""


def shown(value: object) -> str:
    """A value for an error, shortened; safe for numbers too long to print and objects whose ``repr`` fails."""
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


def is_whole(value: object) -> bool:
    """Whether it is a whole number, Python's or numpy's."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def whole(
    argument: str, value: Any, *, least: int | None = 0, most: int | None = None, expected: str = "a whole number"
) -> int:
    """A whole number."""
    if is_whole(value):
        number = operator.index(value)
        if (least is None or number >= least) and (most is None or number <= most):
            return number
    limits = "" if least is None else f", at least {least}" if most is None else f", from {least} to {most}"
    raise ConfigError(f"{argument}={shown(value)}: expected {expected}{limits}")


def is_flag(value: Any) -> bool:
    """Whether it is True or False, or one of the numbers that stand for them."""
    return isinstance(value, bool | np.bool_) or (is_whole(value) and 0 <= value <= 1)


def flag(argument: str, value: Any) -> bool:
    """True or False; 0 and 1 are accepted too."""
    if is_flag(value):
        return bool(value)
    raise ConfigError(f"{argument}={shown(value)}: expected True or False")


def one_of(argument: str, value: Any, choices: Iterable[str]) -> Any:
    """One of ``choices``."""
    texts = list(choices)
    if isinstance(value, str) and value in texts:
        return value
    *most, last = (f'"{text}"' for text in texts)
    raise ConfigError(f"{argument}={shown(value)}: expected {', '.join(most)} or {last}")


def names(argument: str, value: Any) -> tuple[str, ...]:
    """A tuple of texts."""
    if isinstance(value, str):
        raise ConfigError(f"{argument}={value!r}: expected a tuple of names, such as ({value!r},)")
    if isinstance(value, Iterable):
        found = tuple(value)
        if all(isinstance(name, str) for name in found):
            return found
    raise ConfigError(f"{argument}={shown(value)}: expected a tuple of names")


def path(argument: str, value: Any) -> str:
    """A path or an address, as a text."""
    if isinstance(value, str | os.PathLike) and (found := os.fspath(value)) and isinstance(found, str):
        return found
    raise ConfigError(f"{argument}={shown(value)}: expected a path")


def function(argument: str, value: Any) -> Any:
    """Something that can be called."""
    if callable(value):
        return value
    raise ConfigError(f"{argument}={shown(value)}: expected a function")


def number(argument: str, value: Any, *, expected: str = "a number") -> float:
    """A finite number, 0 or more."""
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if is_number and 0 <= value < math.inf:
        return value
    raise ConfigError(f"{argument}={shown(value)}: expected {expected}, 0 or more")


def by_name(argument: str, value: Any, expected: str) -> Mapping[str, Any]:
    """A dict whose keys are texts."""
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return value
    raise ConfigError(f"{argument}={shown(value)}: expected {expected}")


def path_or_off(argument: str, value: Any) -> str | Literal[False] | None:
    """A path, None for the default, or False for nowhere."""
    if value is None:
        return None
    return False if is_flag(value) and not value else path(argument, value)


def explains_arguments(
    instead: Mapping[str, str], check_first: Callable[[Any], object] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Refuse a call that does not fit the function's signature, with what to write instead.

    instead:      for argument names of other libraries, what to write here
    check_first:  called with the first argument before anything else is checked
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        expected = signature(function)
        name = function.__qualname__.removesuffix(".__init__")
        first = int(name != function.__qualname__)  # after self

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if check_first is not None and len(args) > first:
                check_first(args[first])
            for given in kwargs:
                if given not in expected.parameters:
                    way_out = instead.get(given) or _nearest(given, expected.parameters)
                    raise WrongArgument(f"{name} has no argument {given!r}: {way_out}")
            try:
                expected.bind(*args, **kwargs)
            except TypeError as error:
                raise WrongArgument(f"{name}: {error}. {_usage(name, expected.parameters, first)}") from None
            return function(*args, **kwargs)

        return call

    return decorate


def _nearest(given: str, known: Mapping[str, Parameter]) -> str:
    names = [name for name in known if name != "self"]
    near = nearest(given, names)
    return f"did you mean {near!r}?" if near else f"expected some of {', '.join(names)}"


def nearest(given: str, known: Iterable[str]) -> str | None:
    """The known name that the given one was probably meant to be."""
    from difflib import get_close_matches

    by_lower = {name.lower(): name for name in known}
    near = get_close_matches(given.lower(), by_lower, 1)
    return by_lower[near[0]] if near else None


def _usage(name: str, known: Mapping[str, Parameter], skip: int) -> str:
    """``Write Loader(ds, batch_size=…)``: the required arguments."""
    required = [each for each in list(known.values())[skip:] if each.default is Parameter.empty]
    shown = (f"{each.name}=…" if each.kind is Parameter.KEYWORD_ONLY else each.name for each in required)
    return f"Write {name}({', '.join(shown)}); other arguments are given by name"
