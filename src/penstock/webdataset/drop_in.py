"""The modules of the ``webdataset`` package by their own names, here and, where a program asks for it, for everyone."""

import sys
from importlib import import_module

from penstock.errors import ConfigError

_INTERFACE = (
    *("autodecode", "cache", "compat", "extradatasets", "filters", "gopen", "pytorch", "shardlists", "tariterators"),
    *("tenbin", "utils"),
)
_OWN = ("handlers", "mix", "pipeline", "writer")


def name_modules(package: str) -> None:
    """Let ``import package.filters`` and its like find the modules of the interface."""
    for name in _INTERFACE:
        sys.modules[f"{package}.{name}"] = import_module(f"penstock.webdataset.interface.{name}")


def install() -> None:
    """Make ``import webdataset`` and ``import wids`` give penstock's modules from now on, in this process.

    For programs that cannot be edited: call it before anything imports them. Workers that are forked have it too;
    workers that are spawned run the main module again, so call it at the top of that.
    """
    package = import_module("penstock.webdataset")
    wids = import_module("penstock.webdataset.wids")
    for name, ours in (("webdataset", package), ("wids", wids)):
        found = sys.modules.get(name, ours)
        if found is not ours:
            raise ConfigError(
                f"install(): {name} was imported already (from {getattr(found, '__file__', 'somewhere else')}), and "
                f"whoever did so keeps it; call penstock.webdataset.install() before the first import of it"
            )
    sys.modules["webdataset"], sys.modules["wids"] = package, wids
    name_modules("webdataset")
    for name in _OWN:
        sys.modules[f"webdataset.{name}"] = import_module(f"penstock.webdataset.{name}")
    sys.modules["wids.wids"] = wids
    sys.modules["wids.wids_specs"] = import_module("penstock.webdataset.shard_index")
