"""Files on servers: ranges, HTTP, S3 signing."""

from penstock.remote.ranges import RemoteOptions

__all__ = ["RemoteOptions"]
