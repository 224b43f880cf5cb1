"""What our own decoder knows of a scanned model."""

from __future__ import annotations

from ralbuild.contract.codec import FormatError, parse_json
from ralbuild.contract.decoder_spec import DecoderSpec, read_spec
from ralbuild.weights.scan import ScannedModel


def decoder_spec(model: ScannedModel) -> DecoderSpec | str:
    """Return the spec of a model, or in words why our decoder does not run it."""
    try:
        plain = parse_json(dict(model.files)["config.json"], "config.json")
    except (KeyError, FormatError) as error:
        return f"its configuration cannot be read: {error}"
    return read_spec(plain) if isinstance(plain, dict) else "its configuration is no object"
