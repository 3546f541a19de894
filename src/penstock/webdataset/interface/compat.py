"""The names of ``webdataset.compat``."""

from penstock.webdataset.dataset import WebDataset
from penstock.webdataset.fluent import Fluent as FluidInterface
from penstock.webdataset.interface.shardlists import non_empty as check_empty
from penstock.webdataset.mix import FluidWrapper, WebLoader

__all__ = ["FluidInterface", "FluidWrapper", "WebDataset", "WebLoader", "check_empty"]
