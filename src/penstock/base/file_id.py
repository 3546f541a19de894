"""The identity of a file when its metadata was parsed; it is checked whenever the file is read."""

import os
from dataclasses import field

from penstock.base.dataclass import dataclass
from penstock.base.urls import is_remote, lasting_name


@dataclass(frozen=True)
class FileId:
    """A file as it was when its metadata was parsed."""

    path: str
    size: int
    mtime_ns: int
    inode: int
    is_growing: bool = False
    """Still being written: it may become longer, and what was there stays."""
    etag: str = field(default="", repr=False)
    """The server's name for this version of a remote file."""
    is_expanded: bool = False
    """The bytes are the decompressed contents of the file at ``path``."""
    is_compared: bool = False
    """Compared with a manifest, block by block, when it is read."""

    def __hash__(self) -> int:  # needed for every loan; Python caches the hash of a text
        return hash(self.path)

    @property
    def has_strong_etag(self) -> bool:
        """Whether equal ETags mean equal bytes."""
        return bool(self.etag) and not self.etag.startswith("W/")

    @property
    def kept_as(self) -> str:
        """Its name in caches on disk. Without a strong ETag, another signature might be another file."""
        if not is_remote(self.path):
            return os.path.abspath(self.path)
        return lasting_name(self.path) if self.has_strong_etag else self.path

    @property
    def can_be_mapped(self) -> bool:
        """Whether it is a plain local file whose reads need not be compared with a manifest."""
        return not self.is_expanded and not self.is_compared and not is_remote(self.path)
