"""Datasets for trials, by the names of ``webdataset.extradatasets``."""

from collections.abc import Iterator
from typing import Any

from penstock.base import checks
from penstock.webdataset.interface.utils import repeatedly
from penstock.webdataset.pipeline import DataPipeline

__all__ = ["MockDataset", "repeatedly", "with_epoch", "with_length"]


class _Same:
    def __init__(self, sample: Any, length: int) -> None:
        self.sample, self.length = sample, length

    def __iter__(self) -> Iterator[Any]:
        return (self.sample for _ in range(self.length))


class MockDataset(DataPipeline):
    """One sample, ``length`` times."""

    def __init__(self, sample: Any, length: int) -> None:
        super().__init__(_Same(sample, checks.whole("MockDataset: length", length)))
        self.sample = sample


def with_epoch(dataset: Any, length: int) -> DataPipeline:
    """Any dataset, begun anew as often as ``length`` samples per epoch take."""
    return DataPipeline(dataset).with_epoch(length)


def with_length(dataset: Any, length: int) -> DataPipeline:
    """Any dataset, with a ``len()``."""
    return DataPipeline(dataset).with_length(length)
