"""Tar shards, with the verbs of the ``webdataset`` package: a program for it runs when its import changes.

    from penstock import webdataset as wds

    ds = wds.WebDataset("train-{000..017}.tar", shardshuffle=100).shuffle(500).decode("torch").to_tuple("jpg", "cls")

For programs that cannot be edited, ``install()`` makes ``import webdataset`` and ``import wids`` give these modules in
this process.

Nothing in a shard is unpickled or executed, what is cut or damaged is an error and not an early end, random choices
follow from a seed, and every sample comes once over all ranks and workers, however few the shards.
"""

from penstock.webdataset import handlers, mix, pipeline, writer
from penstock.webdataset.collate import default_collation_fn
from penstock.webdataset.dataset import (
    ResampledShards,
    SimpleShardList,
    WebDataset,
    tarfile_samples,
    tarfile_to_samples,
)
from penstock.webdataset.drop_in import install
from penstock.webdataset.drop_in import name_modules as _name_modules
from penstock.webdataset.fluent import Fluent as FluidInterface
from penstock.webdataset.handlers import (
    ignore_and_continue,
    ignore_and_stop,
    reraise_exception,
    warn_and_continue,
    warn_and_stop,
)
from penstock.webdataset.interface import (
    autodecode,
    cache,
    compat,
    extradatasets,
    filters,
    pytorch,
    shardlists,
    tariterators,
    tenbin,
    utils,
)
from penstock.webdataset.interface.autodecode import (
    Continue,
    Decoder,
    DecodingError,
    ImageHandler,
    basichandlers,
    gzfilter,
    handle_extension,
    imagehandler,
    pytorch_weights_only,
    torch_audio,
    torch_loads,
    torch_video,
)
from penstock.webdataset.interface.cache import LRUCleanup, pipe_cleaner
from penstock.webdataset.interface.extradatasets import MockDataset, with_epoch, with_length
from penstock.webdataset.interface.filters import (
    Cached,
    LMDBCached,
    associate,
    batched,
    decode,
    detshuffle,
    extract_keys,
    getfirst,
    info,
    log_keys,
    map,
    map_dict,
    map_tuple,
    pipelinefilter,
    rename,
    rename_keys,
    rsample,
    select,
    shuffle,
    slice,
    to_dict,
    to_tuple,
    transform_with,
    unbatched,
    unlisted,
    xdecode,
)
from penstock.webdataset.interface.gopen import gopen, gopen_schemes
from penstock.webdataset.interface.shardlists import MultiShardSample, expand_urls, non_empty, resampled, shardspec
from penstock.webdataset.interface.utils import PipelineStage, repeatedly
from penstock.webdataset.mindeye import get_dataloaders
from penstock.webdataset.mix import FluidWrapper, RandomMix, RoundRobin, WebLoader
from penstock.webdataset.pipeline import DataPipeline
from penstock.webdataset.splitting import single_node_only, split_by_node, split_by_worker
from penstock.webdataset.writer import ShardWriter, TarWriter, numpy_dumps, torch_dumps

__version__ = "1.0.2"
"""The version of the ``webdataset`` package whose interface this is."""

_name_modules(__name__)

__all__ = [
    "Cached",
    "Continue",
    "DataPipeline",
    "Decoder",
    "DecodingError",
    "FluidInterface",
    "FluidWrapper",
    "ImageHandler",
    "LMDBCached",
    "LRUCleanup",
    "MockDataset",
    "MultiShardSample",
    "PipelineStage",
    "RandomMix",
    "ResampledShards",
    "RoundRobin",
    "ShardWriter",
    "SimpleShardList",
    "TarWriter",
    "WebDataset",
    "WebLoader",
    "associate",
    "autodecode",
    "basichandlers",
    "batched",
    "cache",
    "compat",
    "decode",
    "default_collation_fn",
    "detshuffle",
    "expand_urls",
    "extract_keys",
    "extradatasets",
    "filters",
    "get_dataloaders",
    "getfirst",
    "gopen",
    "gopen_schemes",
    "gzfilter",
    "handle_extension",
    "handlers",
    "ignore_and_continue",
    "ignore_and_stop",
    "imagehandler",
    "info",
    "install",
    "log_keys",
    "map",
    "map_dict",
    "map_tuple",
    "mix",
    "non_empty",
    "numpy_dumps",
    "pipe_cleaner",
    "pipeline",
    "pipelinefilter",
    "pytorch",
    "pytorch_weights_only",
    "rename",
    "rename_keys",
    "repeatedly",
    "reraise_exception",
    "resampled",
    "rsample",
    "select",
    "shardlists",
    "shardspec",
    "shuffle",
    "single_node_only",
    "slice",
    "split_by_node",
    "split_by_worker",
    "tarfile_samples",
    "tarfile_to_samples",
    "tariterators",
    "tenbin",
    "to_dict",
    "to_tuple",
    "torch_audio",
    "torch_dumps",
    "torch_loads",
    "torch_video",
    "transform_with",
    "unbatched",
    "unlisted",
    "utils",
    "warn_and_continue",
    "warn_and_stop",
    "with_epoch",
    "with_length",
    "writer",
    "xdecode",
]
