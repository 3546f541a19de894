"""The names of ``webdataset.compat``."""

from collections.abc import Iterable, Iterator
from typing import Any

from penstock.errors import ConfigError
from penstock.webdataset.dataset import WebDataset
from penstock.webdataset.fluent import Fluent as FluidInterface
from penstock.webdataset.mix import FluidWrapper, WebLoader

__all__ = ["FluidInterface", "FluidWrapper", "WebDataset", "WebLoader", "check_empty"]


def check_empty(source: Iterable[Any]) -> Iterator[Any]:
    """Pass the samples on; raise an error if there are none."""
    anything = False
    for sample in source:
        anything = True
        yield sample
    if not anything:
        raise ConfigError("no samples came through; empty_check=False of WebDataset if that is meant")
