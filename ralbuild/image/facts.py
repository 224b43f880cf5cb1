"""What is known of an image from its own bytes: the one source of its bill of materials and its checks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ralbuild.contract.bundle import Bundle, read_bundle
from ralbuild.contract.codec import FormatError, from_plain, parse_json, sha256_hex
from ralbuild.contract.manifest import ModelManifest
from ralbuild.contract.places import BASE_MANIFEST, BUNDLE_FILE, INTERPRETER_MANIFEST, OBJECTS_DIR
from ralbuild.errors import ImageError
from ralbuild.image.oci import BASE_DIGEST, LICENSE_LABEL, digest_of
from ralbuild.image.reader import StoredImage

ReadFile = Callable[[str], bytes | None]
"""Returns the bytes of a file of the image by its absolute path; None when there is none."""


@dataclass(frozen=True, slots=True)
class Package:
    """One package of the base.

    Attributes:
        kind: ``deb`` or ``pypi``.
        name: as its index has it.
        version: likewise.
        architecture: of a ``deb``.
        file: the file that was installed; empty where dpkg of a container engine did it and nobody knows.
        sha256: in hex, of the files that the lock allows; none where ``file`` is not known.
        distribution: whose ``deb`` it is: ``debian``, ``ubuntu``.
    """

    kind: str
    name: str
    version: str
    architecture: str
    file: str
    sha256: tuple[str, ...]
    distribution: str = ""


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """What an image is made of.

    Attributes:
        manifest_json: its manifest, the subject of every attestation.
        digest: of the manifest.
        labels: of its config.
        annotations: of its manifest.
        created: RFC 3339, as its config says.
        bundle, bundle_sha256: what is compiled into it.
        model: what verify found in the model folder.
        packages: of the base and of an interpreter of user kernels, Debian's first, each kind sorted by
            name; empty when the base does not say.
        base_json_sha256: digest of the base's list of packages; empty when there is none.
        weight_digests: SHA-256 of the weight files by name, where it is known. The image says that of
            their layers alone; see `ralbuild.image.own_digests`.
    """

    manifest_json: bytes
    digest: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    created: str
    bundle: Bundle
    bundle_sha256: str
    model: ModelManifest
    packages: tuple[Package, ...]
    base_json_sha256: str
    weight_digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def base_digest(self) -> str:
        """Digest of the base image's manifest; empty when the image does not say."""
        return self.annotations.get(BASE_DIGEST, "")

    @property
    def license(self) -> str:
        """The model's licence as its card says, an SPDX id where there is one; may be empty."""
        return self.labels.get(LICENSE_LABEL, "")


def stored_facts(image: StoredImage) -> ImageFacts:
    """Return the facts of an image in a store.

    Raises:
        ImageError: when it is no image of ralbuild, or its parts do not fit each other.
    """
    return read_facts(image.manifest_json, image.config, image.read_file, image.store)


def read_facts(
    manifest_json: bytes, config: Mapping[str, Any], read_file: ReadFile, place: str
) -> ImageFacts:
    """Return the facts of an image whose files ``read_file`` returns.

    Args:
        manifest_json: the image's manifest.
        config: its config, parsed.
        read_file: finds the bundle, the model's manifest and the base's list of packages.
        place: for messages.

    Raises:
        ImageError: when it is no image of ralbuild, or its parts do not fit each other.
    """
    bundle_json = _needed(read_file, BUNDLE_FILE, place)
    base_json = read_file(BASE_MANIFEST)
    try:
        bundle = read_bundle(bundle_json)
        name = f"{OBJECTS_DIR}/{bundle.manifest.sha256}"
        model_json = _needed(read_file, name, place)
        if sha256_hex(model_json) != bundle.manifest.sha256:
            raise ImageError(f"{name} is not what the bundle names", place=place)
        model = from_plain(ModelManifest, parse_json(model_json, "model manifest"), "model manifest")
        packages = base_packages(base_json) if base_json else ()
        if any(kernel.source is not None for kernel in bundle.kernels):
            more = base_packages(_needed(read_file, INTERPRETER_MANIFEST, place))
            packages = tuple(sorted((*packages, *more), key=lambda item: (item.kind, item.name)))
    except FormatError as error:
        raise ImageError(str(error), place=place) from None
    return ImageFacts(
        manifest_json=manifest_json,
        digest=digest_of(manifest_json),
        labels=dict((config.get("config") or {}).get("Labels") or {}),
        annotations=json.loads(manifest_json).get("annotations") or {},
        created=str(config.get("created", "")),
        bundle=bundle,
        bundle_sha256=sha256_hex(bundle_json),
        model=model,
        packages=packages,
        base_json_sha256=sha256_hex(base_json) if base_json else "",
    )


def base_packages(data: bytes) -> tuple[Package, ...]:
    """Return the packages that a base's list names.

    Raises:
        FormatError: when it is not such a list.
    """
    value = parse_json(data, "base.json")
    try:
        distribution = value.get("distribution", "debian")
        debian = [
            Package(
                "deb",
                item["name"],
                item["version"],
                item["architecture"],
                item["file"],
                (item["sha256"],) if item["sha256"] else (),
                distribution,
            )
            for item in value["debian"]
        ]
        wheels = [
            Package("pypi", item["name"], item["version"], "", item["file"], tuple(item["sha256"]))
            for item in value["wheels"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise FormatError("base.json", f"does not list packages: {error}") from None
    return (*sorted(debian, key=lambda item: item.name), *sorted(wheels, key=lambda item: item.name))


def _needed(read_file: ReadFile, name: str, place: str) -> bytes:
    data = read_file(name)
    if data is None:
        hint = "is it an image of ralbuild? an image of weights alone has nothing compiled in it"
        raise ImageError(f"holds no {name}", place=place, hint=hint)
    return data
