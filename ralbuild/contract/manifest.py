"""What the model folder holds: the facts that verify found and that the image is bound to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One small file that goes into the image: basename, size in bytes, SHA-256 in hex."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """One weight file: basename and size in bytes. Its bytes are bound by the layer that holds it."""

    path: str
    size: int


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """The weight files of one layer: most often one.

    Attributes:
        sha256: in hex, of the tar that `ralbuild.contract.tarball.WeightLayer` makes of them: the layer's
            diff id in the image. So a weight byte is hashed once, for the layer and for the manifest.
        files: in the order of the layer.
    """

    sha256: str
    files: tuple[WeightEntry, ...]

    @property
    def size(self) -> int:
        """Bytes of all the files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class ModelManifest:
    """A verified model folder.

    Attributes:
        architecture: the Hugging Face class name, such as ``LlamaForCausalLM``.
        model_type: the Hugging Face family, such as ``llama``.
        dtype: the element type of most weight bytes, as safetensors names it (``BF16``).
        parameters: number of weight elements.
        tensors: number of tensors.
        weights: the safetensors files, sorted by name, as they share layers.
        files: configuration, tokenizer and template files, sorted by name.
        vocab_size: rows of the embedding.
        tokenizer_size: ids that the tokenizer knows; the sampler masks ids at and above it.
        tokenizer_sha256: digest of the token bytes, a fingerprint of the vocabulary.
        eos_token_ids: every id that ends a text, ascending.
        max_positions: longest sequence the model was made for; 0 when the config does not say.
        tokenizer_fingerprint: digest of the ids that a fixed list of texts has; empty when unknown.
        template_sha256: digest of the chat template's text; empty without one.
    """

    architecture: str
    model_type: str
    dtype: str
    parameters: int
    tensors: int
    weights: tuple[PackedWeights, ...]
    files: tuple[ModelFile, ...]
    vocab_size: int
    tokenizer_size: int
    tokenizer_sha256: str
    eos_token_ids: tuple[int, ...]
    max_positions: int
    tokenizer_fingerprint: str = ""
    template_sha256: str = ""

    @property
    def weight_files(self) -> tuple[WeightEntry, ...]:
        """The safetensors files, sorted by name."""
        return tuple(file for layer in self.weights for file in layer.files)
