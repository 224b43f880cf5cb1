"""A config's rules, folded and ready to run with the reference executor; no build and no image."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ralbuild.compile.user_data import Encode
from ralbuild.config.load import LoadedConfig, load_config
from ralbuild.contract.bans import BanTable, read_bans
from ralbuild.contract.bundle import Rule
from ralbuild.contract.routes import RouteTable, read_routes
from ralbuild.contract.transducer import Transducer, read_transducer
from ralbuild.contract.vocab import TokenBytes, read_vocab
from ralbuild.errors import WeightsError
from ralbuild.fold.folding import Folded, fold
from ralbuild.weights.findings import Findings
from ralbuild.weights.tokenizer import read_vocabulary, text_encoder

MAX_TOKENIZER_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Rules:
    """Everything that the rules of one config need to run.

    Attributes:
        loaded, folded: the config and what it folds to.
        machine, bans, routes, vocab: its tables.
        encode: text to token ids; None without a model, where a token is one character.
    """

    loaded: LoadedConfig
    folded: Folded
    machine: Transducer
    bans: BanTable
    routes: RouteTable
    vocab: TokenBytes
    encode: Encode | None

    def profile(self, route: str) -> int:
        """Return the profile that a route name leads to."""
        found = self.routes.first(route)
        return 0 if found is None else self.folded.rule_set.routes[found].profile

    def rule(self, number: int) -> Rule:
        """Return a rule by its id."""
        return self.folded.rule_set.rules[number]

    def place(self, rule: Rule) -> str:
        """Return ``file:line:column`` of a rule; ``built-in`` for one that is in no file."""
        return f"{self.loaded.path.name}:{rule.place}" if rule.place[:1].isdecimal() else rule.place

    def tokens(self, text: str) -> list[tuple[int | None, bytes]]:
        """Split a text into tokens: ids and their bytes, or characters without a model."""
        if self.encode is None:
            return [(None, char.encode("utf-8", "replace")) for char in text]
        return [(number, self.vocab[number]) for number in self.encode(text)]


def load_rules(config: Path, model: Path | None) -> Rules:
    """Fold a config, with a model's tokenizer where there is one.

    Raises:
        ConfigError, CompileError: as a build would.
        WeightsError: when ``model`` holds no usable tokenizer.json; no weight is read.
    """
    loaded = load_config(config)
    tokens: Sequence[bytes] = [bytes([byte]) for byte in range(256)]
    encode: Encode | None = None
    if model is not None:
        tokens, encode = _read_tokenizer(model / "tokenizer.json")
    folded = fold(loaded, tokens)
    return Rules(
        loaded,
        folded,
        Transducer(read_transducer(folded.transducer, "transducer")),
        read_bans(folded.bans, "bans"),
        read_routes(folded.route_table, "routes", len(folded.rule_set.routes)),
        read_vocab(folded.vocab, "vocab"),
        encode,
    )


def _read_tokenizer(path: Path) -> tuple[Sequence[bytes], Encode]:
    try:
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise WeightsError(f"needs at most {MAX_TOKENIZER_BYTES} bytes", place=str(path))
        source = path.read_bytes()
        data = json.loads(source)
    except OSError as error:
        raise WeightsError(f"cannot be read: {error.strerror}", place=str(path)) from None
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"not JSON: {error}", place=str(path)) from None
    findings = Findings()
    vocabulary = read_vocabulary(data, source, findings) if isinstance(data, dict) else None
    if vocabulary is None:
        raise WeightsError("holds no tokenizer that this version reads", place=str(path))
    return vocabulary.tokens, text_encoder(source)
