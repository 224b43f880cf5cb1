"""What the model folder holds: the facts that verify found and that the image is bound to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file that goes into the image: basename, size in bytes, SHA-256 in hex."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ModelManifest:
    """A verified model folder.

    Attributes:
        architecture: the Hugging Face class name, such as ``LlamaForCausalLM``.
        model_type: the Hugging Face family, such as ``llama``.
        dtype: the element type of most weight bytes, as safetensors names it (``BF16``).
        parameters: number of weight elements.
        tensors: number of tensors.
        weights: the safetensors files, sorted by name.
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
    weights: tuple[ModelFile, ...]
    files: tuple[ModelFile, ...]
    vocab_size: int
    tokenizer_size: int
    tokenizer_sha256: str
    eos_token_ids: tuple[int, ...]
    max_positions: int
    tokenizer_fingerprint: str = ""
    template_sha256: str = ""

    @property
    def root_sha256(self) -> str:
        """The one digest of all files, as OpenSSF model signing has it for a folder that holds just these."""
        files = sorted((*self.weights, *self.files), key=lambda item: item.path)
        return root_sha256(item.sha256 for item in files)


def root_sha256(digests: Iterable[str]) -> str:
    """Return the SHA-256 over files' SHA-256 digests (hex in, raw bytes hashed), in the given order.

    This is the subject of an OpenSSF model signature, where files come in the order of their names.
    """
    return hashlib.sha256(b"".join(bytes.fromhex(digest) for digest in digests)).hexdigest()
