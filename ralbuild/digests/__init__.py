"""Digests of the user's files: computed in one read, remembered while the file stays the same."""

from ralbuild.digests.cache import (
    DigestCache,
    StatKey,
    cache_root,
    default_cache,
    is_racy,
    make_cache_folder,
    open_regular,
)
from ralbuild.digests.scan import (
    CHUNK,
    FileDigests,
    FileRange,
    LayerCopies,
    LayerCopy,
    LayerFile,
    Witness,
    scan_file,
    scan_layer,
)

__all__ = [
    "CHUNK",
    "DigestCache",
    "FileDigests",
    "FileRange",
    "LayerCopies",
    "LayerCopy",
    "LayerFile",
    "StatKey",
    "Witness",
    "cache_root",
    "default_cache",
    "is_racy",
    "make_cache_folder",
    "open_regular",
    "scan_file",
    "scan_layer",
]
