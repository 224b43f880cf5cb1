"""Is an unpacked image still what its layers say? Asked before it is run again.

The small layers (launcher, rules, tokenizer, configuration) are read again from the layout, against their
digests, and compared with the kept files and the tree. Base layers and weights are too large for that.
"""

from __future__ import annotations

import filecmp
import os
from pathlib import Path

from ralbuild.image.oci import Descriptor
from ralbuild.image.reader import StoredImage
from ralbuild.image.treepython import inside
from ralbuild.image.unpack import LayerEntry, LayerStore

_CHECKED = "small"


def changed_layers(store: LayerStore, image: StoredImage) -> tuple[Descriptor, ...]:
    """Return the small layers of ``image`` that are in ``store`` but not as the layout has them.

    Raises:
        ImageError: when the layout's own layer is damaged.
    """
    small = (layer for layer in image.layers if layer.kind == _CHECKED and store.has(layer))
    return tuple(layer for layer in small if not _is_intact(store, image, layer))


def is_tree_intact(store: LayerStore, image: StoredImage, tree: Path) -> bool:
    """Tell whether ``tree`` still has every file and link of the small layers; the store must be intact."""
    expected: dict[str, tuple[LayerEntry, Path] | None] = {}
    for layer in image.layers:
        files = store.place(layer)
        for entry in store.entries(layer):
            if entry.kind != "whiteout":
                expected[entry.path] = (entry, files) if layer.kind == _CHECKED else None
    return all(_is_same(tree, *item) for item in expected.values() if item is not None)


def _is_same(tree: Path, entry: LayerEntry, files: Path) -> bool:
    folder, _, name = entry.path.rpartition("/")
    place = inside(tree, folder) / name
    try:
        if entry.kind == "file":
            return os.path.samestat(place.lstat(), (files / str(entry.number)).lstat())
        if entry.kind == "symlink":
            return str(place.readlink()) == str(Path(entry.target))
        return entry.kind != "dir" or place.is_dir()
    except OSError:
        return False


def _is_intact(store: LayerStore, image: StoredImage, layer: Descriptor) -> bool:
    with store.read_again(image, layer) as fresh:
        kept = store.place(layer)
        names = sorted(path.name for path in fresh.iterdir())
        try:
            same = sorted(path.name for path in kept.iterdir()) == names and not any(
                (kept / name).is_symlink() for name in names
            )
            return same and all(filecmp.cmp(kept / name, fresh / name, shallow=False) for name in names)
        except OSError:
            return False
