"""From a plan to a complete image: every digest known, nothing written yet."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from ralbuild.image.artifacts import Artifact
from ralbuild.image.layers import Progress, Recipe, base_recipe, digest_layer, layer_recipe
from ralbuild.image.oci import LAYER_TYPE, Descriptor, config_json, digest_of, manifest_json
from ralbuild.image.plan import BaseLayer, ImagePlan, LayerDigest, LayerPlan, bind_weights


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with its digest: how the manifest describes it, what its bytes must be, how to get them."""

    descriptor: Descriptor
    digest: LayerDigest
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class Image:
    """An image whose every byte is decided: layers from the lowest, config and manifest JSON.

    ``artifacts`` are stored beside it and are no part of it: they do not change its digest. ``beside`` are
    layers that only they name: those of the image that holds the weights.
    """

    layers: tuple[Layer, ...]
    config: bytes
    manifest: bytes
    architecture: str
    artifacts: tuple[Artifact, ...] = ()
    beside: tuple[Layer, ...] = ()

    @property
    def digest(self) -> str:
        """The manifest's digest: the image's identity."""
        return digest_of(self.manifest)

    @property
    def config_digest(self) -> str:
        """The config's digest: what Docker calls the image id."""
        return digest_of(self.config)

    @property
    def annotations(self) -> dict[str, str]:
        """The manifest's annotations."""
        return dict(json.loads(self.manifest).get("annotations") or {})

    @property
    def unique_layers(self) -> tuple[Layer, ...]:
        """The layers to write, those beside the image first, without those whose blob occurred before."""
        return tuple({layer.digest.sha256: layer for layer in (*self.beside, *self.layers)}.values())

    @property
    def companions(self) -> tuple[Artifact, ...]:
        """The artifacts that are no statements about the image, but manifests beside it."""
        return tuple(artifact for artifact in self.artifacts if artifact.suffix)


def assemble_image(plan: ImagePlan, progress: Progress | None = None) -> Image:
    """Compute what ``plan`` means; reads small files, and weights only where their digest is not known.

    Args:
        plan: the image.
        progress: called with the number of bytes hashed in each step.

    Raises:
        ImageError: for an entry, a base or a layer count that no image may have, or a changed source.
    """
    weights = assemble_image(plan.weights, progress) if plan.weights is not None else None
    if weights is not None:
        plan = replace(plan, config=bind_weights(plan.config, weights.digest))
    layers = [base_layer(layer) for layer in (plan.base.layers if plan.base else ())]
    layers += [_our_layer(layer, plan.mtime, progress) for layer in plan.layers]
    descriptors = [layer.descriptor for layer in layers]
    config = config_json(plan, descriptors)
    manifest = manifest_json(plan, config, descriptors)
    image = Image(tuple(layers), config, manifest, plan.architecture)
    if weights is None:
        return image
    return replace(image, artifacts=(weights_companion(weights),), beside=weights.layers)


def weights_companion(weights: Image) -> Artifact:
    """Return the image that holds the weights, as what lies beside the one that does not."""
    return Artifact(weights.manifest, (weights.config,), "", suffix="weights")


def base_layer(layer: BaseLayer) -> Layer:
    """Return a base's layer: its blob is copied as it is."""
    descriptor = Descriptor(layer.media_type, layer.digest, layer.size, layer.diff_id, layer.name, "base")
    digest = LayerDigest(layer.digest.removeprefix("sha256:"), layer.size)
    return Layer(descriptor, digest, base_recipe(layer))


def _our_layer(layer: LayerPlan, mtime: int, progress: Progress | None) -> Layer:
    recipe = layer_recipe(layer, mtime)
    digest = layer.known or digest_layer(recipe, progress)
    name = f"sha256:{digest.sha256}"
    return Layer(Descriptor(LAYER_TYPE, name, digest.size, name, layer.name, layer.kind), digest, recipe)
