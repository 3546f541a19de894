"""Files on servers: ranges over HTTP, buckets, ``RemoteOptions``."""

from penstock.remote.ranges import RemoteOptions

__all__ = ["RemoteOptions"]
