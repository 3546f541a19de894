"""``inspect``: what files contain, and how they will be read."""

from typing import Any

from penstock.dataset.dataset import Dataset
from penstock.dataset.explain import Inspection, count_files, read_paths
from penstock.formats.open import open_quietly


def inspect(source: Any, **options: Any) -> Inspection:
    """Describe what ``open(source, **options)`` finds, or what a dataset is made of, without reading the data."""
    ds = source if isinstance(source, Dataset) else open_quietly(source, **options)
    paths = read_paths(ds.delivered)
    return Inspection(len(ds), count_files(ds.delivered), paths, [str(why) for why in ds.left_out], ds.fields_left_out)
