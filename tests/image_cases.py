"""Small images for the tests of the image room."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

from ralbuild.digests import DigestCache, scan_file
from ralbuild.image.assemble import Image, assemble_image
from ralbuild.image.plan import (
    BaseImage,
    DirEntry,
    FileEntry,
    HostFile,
    ImageConfig,
    ImagePlan,
    LayerPlan,
    LinkEntry,
    weight_layer,
)

NOWHERE = DigestCache(None)
CONFIG = ImageConfig(
    env=(("PATH", "/usr/bin"), ("RAL_MODEL", "demo")),
    entrypoint=("/opt/ral/entrypoint.sh",),
    user="65532",
    workdir="/opt/ral",
    ports=(8000,),
    labels={"io.ralbuild.model": "demo", "org.opencontainers.image.title": "modèle"},
)


def write_weights(folder: Path, sizes: tuple[int, ...] = (5 << 20, 1_000_003)) -> list[Path]:
    """Write files of pseudo-random bytes, named like shards."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, size in enumerate(sizes, 1):
        path = folder / f"model-{number:05}-of-{len(sizes):05}.safetensors"
        path.write_bytes(random.Random(number).randbytes(size))
        paths.append(path)
    return paths


def weight_layers(paths: list[Path], cache: DigestCache = NOWHERE) -> tuple[LayerPlan, ...]:
    return tuple(weight_layer(path, path.stat().st_size, scan_file(path, cache, 0)) for path in paths)


def rules_layer(text: str = "bold: risk") -> LayerPlan:
    return LayerPlan(
        "rules",
        "small",
        (
            FileEntry("opt/ral/entrypoint.sh", b"#!/bin/sh\nexec true\n", 0o755),
            FileEntry("opt/ral/bundle/ral-config.yaml", text.encode()),
        ),
        owned=("opt/ral",),
    )


def tokenizer_layer(folder: Path) -> LayerPlan:
    path = folder / "tokenizer.json"
    path.write_bytes(b'{"version":"1.0"}' * 100)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    entry = FileEntry("models/tokenizer.json", HostFile(path, path.stat().st_size, digest))
    return LayerPlan("tokenizer", "small", (entry,), owned=("models",))


def root_layer() -> LayerPlan:
    """A base of our own making: every kind of entry, long and non-ASCII names."""
    return LayerPlan(
        "root",
        "small",
        (
            DirEntry("tmp", 0o1777),
            FileEntry("etc/passwd", b"nonroot:x:65532:65532::/nonexistent:/bin/false\n"),
            FileEntry("usr/share/ca/NetLock_Főtanúsítvány.crt", b"certificate\n"),
            FileEntry("usr/lib/" + "long/" * 30 + "name", b"deep\n"),
            LinkEntry("lib", "usr/lib"),
            LinkEntry("usr/lib/far", "/usr/" + "x" * 120),
        ),
        owned=("",),
    )


def make_plan(
    folder: Path,
    rules: str = "bold: risk",
    base: BaseImage | None = None,
    cache: DigestCache = NOWHERE,
    sizes: tuple[int, ...] = (5 << 20, 1_000_003),
) -> ImagePlan:
    """An image with every kind of layer, from files below ``folder`` that are made when missing."""
    paths = sorted(folder.glob("model-*.safetensors")) or write_weights(folder, sizes)
    layers = (*weight_layers(paths, cache), tokenizer_layer(folder), rules_layer(rules))
    return ImagePlan(base, layers if base else (root_layer(), *layers), CONFIG)


def make_image(folder: Path, rules: str = "bold: risk", cache: DigestCache = NOWHERE) -> Image:
    return assemble_image(make_plan(folder, rules, cache=cache))
