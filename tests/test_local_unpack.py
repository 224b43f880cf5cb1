"""Layers as a tree: whiteouts, links and hostile paths, compared with umoci where it has an opinion."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ralbuild.errors import ImageError
from ralbuild.image.reader import open_image
from ralbuild.image.unpack import LayerStore, make_tree

LAYER = "application/vnd.oci.image.layer.v1.tar"
Member = tuple[str, str | bytes | None]
"""Path and content: bytes for a file, ``-> x`` for a symbolic link, ``=> x`` for a hard link, None for a folder."""


def tar_of(members: Sequence[Member]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.mode = 0o755 if content is None else 0o644
            if content is None:
                info.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                info.type = tarfile.SYMTYPE if content.startswith("-> ") else tarfile.LNKTYPE
                info.linkname = content[3:]
            else:
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return out.getvalue()


def write_layout(folder: Path, layers: Sequence[bytes], suffix: str = "") -> Path:
    blobs = folder / "blobs/sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data)}

    diff_ids = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    stored = [gzip.compress(layer, mtime=0) if suffix == "+gzip" else layer for layer in layers]
    config = {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": diff_ids}}
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            **put(json.dumps(config).encode()),
        },
        "layers": [{"mediaType": LAYER + suffix, **put(data)} for data in stored],
    }
    entry = {"mediaType": manifest["mediaType"], **put(json.dumps(manifest).encode())}
    entry["annotations"] = {"org.opencontainers.image.ref.name": "demo"}
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    return folder


def unpack(layout: Path, work: Path) -> Path:
    tree = work / "tree"
    tree.mkdir(parents=True)
    store = LayerStore(work / "layers")
    with open_image(layout) as image:
        for layer in image.layers:
            store.add(image, layer)
        make_tree(store, image.layers, tree)
    return tree


def seen(tree: Path) -> dict[str, object]:
    out: dict[str, object] = {}
    for path in sorted(tree.rglob("*")):
        name = str(path.relative_to(tree))
        if path.is_symlink():
            out[name] = f"-> {os.readlink(path)}"
        else:
            out[name] = None if path.is_dir() else path.read_bytes()
    return out


CASES: dict[str, list[list[Member]]] = {
    "a later file replaces": [[("a", b"1"), ("d/b", b"2")], [("a", b"3")]],
    "a whiteout deletes a file": [[("d/a", b"1"), ("d/b", b"2")], [("d/.wh.a", b"")]],
    "a whiteout deletes a folder": [[("d/e/a", b"1"), ("b", b"2")], [(".wh.d", b"")]],
    "a whiteout beside its new self": [[("a", b"1")], [(".wh.a", b""), ("a", b"2")]],
    "an opaque folder hides what was below": [[("d/a", b"1"), ("d/e/b", b"2")], [("d/", None), ("d/.wh..wh..opq", b""), ("d/c", b"3")]],
    "a file becomes a folder": [[("a", b"1")], [("a/", None), ("a/b", b"2")]],
    "a folder becomes a file": [[("a/b", b"1")], [("a", b"2")]],
    "a link becomes a folder": [[("usr/lib/x", b"1"), ("lib", "-> usr/lib")], [("lib/", None), ("lib/y", b"2")]],
    "a folder becomes a link": [[("lib/x", b"1"), ("usr/lib/y", b"2")], [("lib", "-> usr/lib")]],
    "a hard link": [[("a", b"1"), ("d/b", "=> a")]],
    "a hard link to a lower layer": [[("a", b"1")], [("b", "=> a")]],
    "dots and slashes": [[("./", None), ("./a", b"1"), ("d//b", b"2")]],
    "a link to nowhere": [[("a", "-> missing/x")]],
    "an absolute link stays as written": [[("etc/x", b"1"), ("y", "-> /etc/x")]],
}  # fmt: skip


@pytest.mark.parametrize("suffix", ["", "+gzip"])
@pytest.mark.parametrize("layers", CASES.values(), ids=CASES.keys())
def test_the_tree_is_the_one_that_umoci_makes(
    layers: list[list[Member]], suffix: str, tmp_path: Path
) -> None:
    layout = write_layout(tmp_path / "layout", [tar_of(layer) for layer in layers], suffix)
    command = ["umoci", "unpack", "--rootless", "--image", f"{layout}:demo", tmp_path / "bundle"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert seen(unpack(layout, tmp_path)) == seen(tmp_path / "bundle/rootfs")


def test_a_path_through_a_link_of_a_lower_layer_lands_where_the_link_points(tmp_path: Path) -> None:
    layers = [[("usr/lib/x", b"1"), ("lib", "-> usr/lib")], [("lib/y", b"2")]]
    tree = unpack(write_layout(tmp_path / "layout", [tar_of(layer) for layer in layers]), tmp_path)
    assert seen(tree)["usr/lib/y"] == b"2"
    assert seen(tree)["lib"] == "-> usr/lib"


HOSTILE: dict[str, Callable[[Path], list[Member]]] = {
    "a link to the outside": lambda out: [("d", f"-> {out}"), ("d/x", b"bad")],
    "a link up": lambda _: [("d", "-> ../../../../../../out"), ("d/x", b"bad")],
    "a link to a link": lambda out: [("a", f"-> {out}"), ("b", "-> a"), ("b/x", b"bad")],
    "an absolute path": lambda out: [(f"{out}/x", b"bad")],
    "a file over a link": lambda out: [("x", f"-> {out}/x"), ("x", b"bad")],
    "a hard link to the outside": lambda out: [("d", f"-> {out}"), ("x", "=> d/secret")],
    "a hard link up": lambda _: [("x", "=> ../../../out/secret")],
    "a whiteout through a link": lambda out: [("d", f"-> {out}"), ("d/.wh.secret", b"")],
    "an opaque folder through a link": lambda out: [("d", f"-> {out}"), ("d/.wh..wh..opq", b"")],
}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("split", [False, True], ids=["one layer", "a layer each"])
def test_nothing_outside_is_read_written_or_removed(
    make: Callable[[Path], list[Member]], split: bool, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "secret").write_bytes(b"secret")
    members = make(out)
    layers = [[member] for member in members] if split else [members]
    layout = write_layout(tmp_path / "layout", [tar_of(layer) for layer in layers])
    try:
        tree = unpack(layout, tmp_path / "work")
    except ImageError:
        pass
    else:
        assert b"secret" not in seen(tree).values()
    assert seen(out) == {"secret": b"secret"}


@pytest.mark.parametrize("path", ["../x", "d/../../x", "/../x", ".."])
def test_a_path_with_dots_is_refused(path: str, tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", [tar_of([(path, b"bad")])])
    with pytest.raises(ImageError, match="path with"):
        unpack(layout, tmp_path / "work")


@pytest.mark.parametrize("name", [".wh.", ".wh..", ".wh..."])
@pytest.mark.parametrize("folder", ["", "d/"])
def test_a_whiteout_of_no_file_is_refused_and_deletes_nothing(name: str, folder: str, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work/keep").write_bytes(b"keep")
    layers = [tar_of([("d/a", b"1")]), tar_of([(f"{folder}{name}", b"")])]
    layout = write_layout(tmp_path / "layout", layers)
    with pytest.raises(ImageError, match="whiteout"):
        unpack(layout, tmp_path / "work")
    assert (tmp_path / "work/keep").read_bytes() == b"keep"


@pytest.mark.parametrize("target", [".", "..", "../x"])
def test_a_stored_whiteout_of_the_outside_is_refused(target: str, tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", [tar_of([("a", b"1")])])
    store = LayerStore(tmp_path / "layers")
    (tmp_path / "tree").mkdir()
    with open_image(layout) as image:
        store.add(image, image.layers[0])
        rows = [["whiteout", "", 0, target, -1]]
        (store.place(image.layers[0]) / "entries.json").write_text(json.dumps(rows))
        with pytest.raises(ImageError, match="whiteout"):
            make_tree(store, image.layers, tmp_path / "tree")
    assert (tmp_path / "layers").is_dir()
    assert (tmp_path / "tree").is_dir()


def surrogates(data: bytes) -> str:
    return os.fsdecode(data)


@pytest.mark.parametrize(
    "members",
    [
        [(surrogates(b"a\xff"), b"1")],
        [("a", f"-> {surrogates(bytes([0xFF]))}")],
        [("x" * 256, b"1")],
        [("x/" * 2500 + "y", b"1")],
        [("a/" * 1200 + "b", b"1")],
        [("a", "-> " + "x" * 5000)],
        [("a", "-> ")],
        # Each path is short, yet the links lead ever deeper.
        [
            ("l0", "-> ."),
            *((f"l{n + 1}", f"-> l{n}/" + f"{n}/" * 150) for n in range(8)),
            *((f"l{n}/f", b"") for n in range(9)),
        ],
    ],
    ids=["name bytes", "target bytes", "long name", "long path", "deep", "long target", "no target", "links"],
)
def test_a_name_that_no_tree_can_hold_is_an_error(members: list[Member], tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", [tar_of(members)])
    with pytest.raises(ImageError):
        unpack(layout, tmp_path / "work")


def test_a_loop_of_links_is_an_error(tmp_path: Path) -> None:
    members: list[Member] = [("a", "-> b"), ("b", "-> a"), ("a/x", b"1")]
    layout = write_layout(tmp_path / "layout", [tar_of(members)])
    with pytest.raises(ImageError, match="loop"):
        unpack(layout, tmp_path / "work")


def test_devices_pipes_and_set_id_bits_are_left_out(tmp_path: Path) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, kind in (("null", tarfile.CHRTYPE), ("pipe", tarfile.FIFOTYPE), ("disk", tarfile.BLKTYPE)):
            info = tarfile.TarInfo(f"dev/{name}")
            info.type = kind
            tar.addfile(info)
        info = tarfile.TarInfo("su")
        info.mode = 0o6755
        tar.addfile(info)
    tree = unpack(write_layout(tmp_path / "layout", [data.getvalue()]), tmp_path)
    assert seen(tree) == {"su": b""}
    assert (tree / "su").stat().st_mode & 0o7777 == 0o555


@pytest.mark.parametrize("suffix", ["", "+gzip"])
def test_a_flipped_byte_is_found_and_nothing_is_kept(suffix: str, tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", [tar_of([("a", b"1" * 3000)])], suffix)
    with open_image(layout) as image:
        blob = layout / "blobs/sha256" / image.layers[0].digest.removeprefix("sha256:")
    data = bytearray(blob.read_bytes())
    data[600 if not suffix else -6] ^= 1
    blob.write_bytes(data)
    with pytest.raises(ImageError) as caught:
        unpack(layout, tmp_path / "work")
    assert "damaged" in str(caught.value)
    assert list((tmp_path / "work/layers").iterdir()) == []


def test_a_layer_is_read_once_and_its_files_are_shared(tmp_path: Path) -> None:
    big = os.urandom(3 << 20)
    first = tar_of([("model", big), ("small", b"s")])
    one = write_layout(tmp_path / "one", [first, tar_of([("rules", b"1")])])
    two = write_layout(tmp_path / "two", [first, tar_of([("rules", b"2")])])
    store = LayerStore(tmp_path / "layers")
    trees = [tmp_path / "t1", tmp_path / "t2"]
    read = []
    for layout, tree in zip((one, two), trees, strict=True):
        tree.mkdir()
        with open_image(layout) as image:
            read.append([store.add(image, layer) for layer in image.layers])
            make_tree(store, image.layers, tree)
    assert read == [[True, True], [False, True]]
    assert [(tree / "rules").read_bytes() for tree in trees] == [b"1", b"2"]
    assert (trees[0] / "model").read_bytes() == big
    assert (trees[0] / "model").samefile(trees[1] / "model")
