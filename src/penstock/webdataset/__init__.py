"""Tar shards, with the verbs of the ``webdataset`` package: a program for it runs when its import changes.

    from penstock import webdataset as wds

    ds = wds.WebDataset("train-{000..017}.tar", shardshuffle=100).shuffle(500).decode("torch").to_tuple("jpg", "cls")

Nothing in a shard is unpickled or executed, what is cut or damaged is an error and not an early end, random choices
follow from a seed, and every sample comes once over all ranks and workers, however few the shards.
"""

from penstock.webdataset import verbs as _verbs
from penstock.webdataset.collate import default_collation_fn
from penstock.webdataset.dataset import (
    ResampledShards,
    SimpleShardList,
    WebDataset,
    decode,
    shardspec,
    tarfile_samples,
    tarfile_to_samples,
)
from penstock.webdataset.decoders import Continue, Decoder, basichandlers, gzfilter, handle_extension, imagehandler
from penstock.webdataset.handlers import (
    DecodingError,
    ignore_and_continue,
    ignore_and_stop,
    reraise_exception,
    warn_and_continue,
    warn_and_stop,
)
from penstock.webdataset.mindeye import get_dataloaders
from penstock.webdataset.mix import FluidWrapper, RandomMix, RoundRobin, WebLoader
from penstock.webdataset.pipeline import Curried as _Curried
from penstock.webdataset.pipeline import DataPipeline
from penstock.webdataset.shards import expand_urls
from penstock.webdataset.shuffle import shuffle_alike as _shuffle_alike
from penstock.webdataset.shuffle import shuffle_samples as _shuffle_samples
from penstock.webdataset.splitting import single_node_only, split_by_node, split_by_worker
from penstock.webdataset.writer import ShardWriter, TarWriter

# The verbs as stages of a DataPipeline.
batched = _Curried(_verbs.batch_samples)
extract_keys = _Curried(_verbs.pick_matching)
log_keys = _Curried(_verbs.log_samples)
map = _Curried(_verbs.map_samples)
map_dict = _Curried(_verbs.map_fields)
map_tuple = _Curried(_verbs.map_elements)
rename = _Curried(_verbs.rename_fields)
rename_keys = _Curried(_verbs.rename_matching)
rsample = _Curried(_verbs.draw_samples)
select = _Curried(_verbs.select_samples)
detshuffle = _Curried(_shuffle_alike)
shuffle = _Curried(_shuffle_samples)
slice = _Curried(_verbs.slice_samples)
to_dict = _Curried(_verbs.fields_to_dict)
to_tuple = _Curried(_verbs.fields_to_tuple)
unbatched = _Curried(_verbs.unbatch_samples)
unlisted = _Curried(_verbs.unlist_samples)

__all__ = [
    "Continue",
    "DataPipeline",
    "Decoder",
    "DecodingError",
    "FluidWrapper",
    "RandomMix",
    "ResampledShards",
    "RoundRobin",
    "ShardWriter",
    "SimpleShardList",
    "TarWriter",
    "WebDataset",
    "WebLoader",
    "basichandlers",
    "batched",
    "decode",
    "default_collation_fn",
    "detshuffle",
    "expand_urls",
    "extract_keys",
    "get_dataloaders",
    "gzfilter",
    "handle_extension",
    "ignore_and_continue",
    "ignore_and_stop",
    "imagehandler",
    "log_keys",
    "map",
    "map_dict",
    "map_tuple",
    "rename",
    "rename_keys",
    "reraise_exception",
    "rsample",
    "select",
    "shardspec",
    "shuffle",
    "single_node_only",
    "slice",
    "split_by_node",
    "split_by_worker",
    "tarfile_samples",
    "tarfile_to_samples",
    "to_dict",
    "to_tuple",
    "unbatched",
    "unlisted",
    "warn_and_continue",
    "warn_and_stop",
]
