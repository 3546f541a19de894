"""Errors of shards and samples that are also what programs for tar shards have learned to catch.

Each is one of ``penstock.errors``, and takes one string like those.
"""

import tarfile

from penstock.errors import Corrupt, DataError, Missing, SchemaMismatch, Truncated


class MissingShard(Missing, FileNotFoundError):
    """There is no such file."""


class TruncatedShard(Truncated, tarfile.ReadError):
    """A shard ends before its own end."""


class CorruptShard(Corrupt, tarfile.ReadError):
    """A shard is not a tar, or stops being one."""


class MissingField(SchemaMismatch, ValueError):
    """A sample lacks a field that was asked for, or has what should not be there."""


class RepeatedField(Corrupt, ValueError):
    """A sample has the same field twice."""


DecodingError = DataError
"""What a decoder's refusal is called in programs for tar shards; all of them are data errors."""
