"""The config language as pydantic models: one class a mapping, one field a key.

A field marked `not_yet` is known and refused with the reason: a key is never ignored. The
descriptions here become the JSON Schema and docs/config.md.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from ralbuild.config.regex import parse_regex, parse_route
from ralbuild.pins import load_pins

ARCHITECTURES = load_pins().cubin.archs
MAX_TEXT_BYTES = 256
"""Longest literal in bytes: a match is held back until it is decided, and hold-back is bounded."""

NOT_YET = "x-not-supported-in-this-version"


def _refuse(value: Any) -> Any:
    if value is not None:
        raise ValueError("not supported in this version; remove it")
    return value


def not_yet(description: str) -> Any:
    """Declare an optional key that parses and is refused, for it has no effect yet."""
    return Field(default=None, description=description, json_schema_extra={NOT_YET: True, "not": {}})


def _literal(text: str) -> str:
    if not text.strip():
        raise ValueError("needs text that is not blank")
    size = len(text.encode("utf-8"))
    if size > MAX_TEXT_BYTES:
        raise ValueError(f"needs at most {MAX_TEXT_BYTES} bytes of UTF-8, found {size}")
    return text


def _output_text(text: str) -> str:
    size = len(text.encode("utf-8"))
    if size > 1024:
        raise ValueError(f"needs at most 1024 bytes of UTF-8, found {size}")
    return text


def _route(text: str) -> str:
    parse_route(text)
    return text


def _architecture(name: str) -> str:
    if name not in ARCHITECTURES:
        raise ValueError(f"needs one of {', '.join(ARCHITECTURES)}, found {name!r}")
    return name


T = TypeVar("T")
Architecture = Annotated[
    str, AfterValidator(_architecture), Field(json_schema_extra={"enum": list(ARCHITECTURES)})
]
NotYet = Annotated[T | None, BeforeValidator(_refuse)]
Literal_ = Annotated[
    str, Field(json_schema_extra={"pattern": r"\S", "minLength": 1}), AfterValidator(_literal)
]
OutputText = Annotated[str, AfterValidator(_output_text)]


def _pattern(text: str) -> str:
    parse_regex(text)
    return text


Pattern = Annotated[str, Field(max_length=1000), AfterValidator(_pattern)]
RoutePattern = Annotated[str, Field(max_length=1000), AfterValidator(_route)]
Identifier = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=64)]
ServedName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$", max_length=128)
]


class Model(BaseModel):
    """Base: strict types, unknown keys refused, immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, populate_by_name=True)


class RouteRule(Model):
    """Sends requests whose route matches to an action."""

    match: RoutePattern = Field(description="Regular expression that must match the whole route name.")
    action: Identifier = Field(description="Name of a built-in action or of one under `actions`.")
    priority: int = Field(
        default=100,
        ge=0,
        le=1_000_000,
        description="Ascending: the smallest number is tried first; ties by file order.",
    )


class Routing(Model):
    """How a request finds its action."""

    rules: list[RouteRule] = Field(
        default=[], max_length=256, description="First match wins; no match means no action."
    )


class Redact(Model):
    """Replaces what it matches. Give exactly one of `text`, `pattern` and `kind`."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["text"]}, {"required": ["pattern"]}]}
    )

    text: Literal_ | None = Field(default=None, description="Literal to replace.")
    pattern: Pattern | None = Field(
        default=None, description="Regular expression to replace: bounded, the longest match is taken."
    )
    kind: NotYet[str] = not_yet("Named kind: card, iban, email, phone, ip, us_ssn, api_key.")
    with_: OutputText = Field(default="[redacted]", alias="with", description="What is written instead.")
    case_sensitive: bool = Field(default=False, description="Match ASCII letters in their case only.")
    whole_words: bool = Field(default=False, description="Match only where a word starts and ends.")

    @model_validator(mode="after")
    def _one_matcher(self) -> Redact:
        given = [name for name in ("text", "pattern", "kind") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"needs exactly one of 'text', 'pattern' and 'kind', found {given or 'none'}")
        return self


class Sampling(Model):
    """Sampling values that the action imposes on the request."""

    temperature: float | None = Field(
        default=None, ge=0, le=2, allow_inf_nan=False, description="0 is greedy."
    )
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False, description="Nucleus mass.")


class Action(Model):
    """What happens to the requests of a route."""

    ban: list[Literal_] = Field(
        default=[],
        max_length=10_000,
        description="Phrases that are never generated, in any case and any split into tokens.",
    )
    redact: list[Redact] = Field(default=[], max_length=10_000, description="What is replaced in the output.")
    append: OutputText | None = Field(default=None, description="Text written after the model's own.")
    sampling: Sampling = Field(default=Sampling(), description="Sampling values that override the request's.")


class TerminologyConfig(Model):
    """`financial_terminology_normalizer`: canonical terms and a length limit for the input."""

    case_sensitive: bool = Field(default=False, description="Match ASCII letters in their case only.")
    max_length: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Longest run of non-space characters; longer input is refused with 422, never cut.",
    )
    whole_words: bool = Field(default=True, description="Match only where a word starts and ends.")
    terms: dict[Literal_, OutputText] = Field(
        default={}, max_length=10_000, description="Term to what is written instead."
    )
    synonyms: dict[OutputText, list[Literal_]] = Field(
        default={}, max_length=10_000, description="Canonical term to all that is written as it."
    )


class Replacement(Model):
    """Replaces what it matches in the input. Give exactly one of `text` and `pattern`."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["text"]}, {"required": ["pattern"]}]}
    )

    text: Literal_ | None = Field(default=None, description="Literal to replace.")
    pattern: Pattern | None = Field(
        default=None, description="Regular expression to replace: bounded, the longest match is taken."
    )
    with_: OutputText = Field(alias="with", description="What is written instead; may be empty.")
    case_sensitive: bool = Field(default=False, description="Match ASCII letters in their case only.")
    whole_words: bool = Field(default=False, description="Match only where a word starts and ends.")

    @model_validator(mode="after")
    def _one_matcher(self) -> Replacement:
        if (self.text is None) == (self.pattern is None):
            raise ValueError("needs exactly one of 'text' and 'pattern'")
        return self


class ReplaceConfig(Model):
    """`replace`: replacements in the text that users send."""

    rules: list[Replacement] = Field(
        default=[], max_length=10_000, description="Leftmost, then longest, then file order wins."
    )


class MaxLengthConfig(Model):
    """`max_length`: limits of the whole prompt; longer input is refused with 422, never cut."""

    characters: int | None = Field(
        default=None, ge=1, le=100_000_000, description="Code points of all texts that the user sends."
    )
    tokens: int | None = Field(
        default=None, ge=1, le=10_000_000, description="Tokens of the prompt, chat template included."
    )

    @model_validator(mode="after")
    def _some_limit(self) -> MaxLengthConfig:
        if self.characters is None and self.tokens is None:
            raise ValueError("needs 'characters', 'tokens' or both")
        return self


class HtmlEnhancerConfig(Model):
    """`html_enhancer`: bold terms in the output."""

    bold_terms: list[Literal_] = Field(
        default=[], max_length=10_000, description="Wrapped in `<b>` and `</b>`."
    )
    case_sensitive: bool = Field(default=False, description="Match ASCII letters in their case only.")
    whole_words: bool = Field(default=True, description="Match only where a word starts and ends.")
    escape: bool = Field(
        default=False, description="Write the model's own `&`, `<`, `>` and quotes as HTML entities."
    )


class TokenFilter(Model):
    """A rule set for the text that users send."""

    name: Identifier = Field(description="`financial_terminology_normalizer`, `replace` or `max_length`.")
    config: dict[str, Any] = Field(default={}, description="Settings of the named filter.")


class OutputTransformer(Model):
    """A rule set, or a user's Triton kernel, for the text that the model writes."""

    name: Identifier = Field(description="`transformers/<name>.py` beside the config, else a built-in.")
    config: dict[str, Any] = Field(default={}, description="Settings; for a user kernel, its parameters.")
    priority: int = Field(
        default=100,
        ge=0,
        le=1_000_000,
        description="Ascending. Built-in transformers are one step; a user kernel of less runs before it.",
    )


class Preprocessing(Model):
    """What happens before inference."""

    token_filters: list[TokenFilter] = Field(default=[], max_length=64, description="Applied to user text.")


class Postprocessing(Model):
    """What happens to every output, whatever its route."""

    output_transformers: list[OutputTransformer] = Field(
        default=[], max_length=64, description="Applied to output."
    )


class Build(Model):
    """What the build produces."""

    targets: list[Architecture] = Field(
        default=list(ARCHITECTURES),
        description="GPU architectures that kernels are compiled for; may be empty.",
    )


def _seconds(value: Any) -> Any:
    """Turn ``600s``, ``15m`` or ``2h`` into seconds; a number without unit is refused."""
    if value == 0 and not isinstance(value, bool):
        return 0
    match = re.fullmatch(r"([1-9][0-9]{0,5})([smh])", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"needs a time with its unit, such as '600s', '15m' or '2h', or 0; found {value!r}")
    return int(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


Duration = Annotated[
    int,
    BeforeValidator(_seconds),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": "^[1-9][0-9]{0,5}[smh]$"}, {"const": 0}]}),
]


class Runtime(Model):
    """How the image runs."""

    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description="Weight type; `auto` is float32 on CPU, where it is exact and batches fastest.",
    )
    idle_unload: Duration = Field(
        default=0,
        description="Idle time after which the server releases the model's memory, such as `600s`, `15m` or "
        "`2h`; 0 is never. The next request loads it again.",
    )
    scrub: NotYet[bool] = not_yet(
        "Overwrite memory before it is released: on the CPU the kernel clears every page before another "
        "process gets it, so this would only add something on a GPU."
    )
    engine: NotYet[str] = not_yet("Another engine than the built-in one.")
    cpu_user_kernels: NotYet[str] = not_yet("Run user kernels on the CPU target.")


class Config(Model):
    """A whole `ral-config.yaml`."""

    version: Literal["0.3"] = Field(description='Version of this language: "0.3", in quotes.')
    model: ServedName = Field(description="The name under which the model is served.")
    max_batch_size: int = Field(
        default=128, ge=1, le=1024, description="Requests decoded together; more wait."
    )
    max_seq_len: int = Field(
        default=4096, ge=16, le=1_048_576, description="Positions per request, prompt included."
    )
    routing: Routing = Field(default=Routing(), description="Which requests take which action.")
    actions: dict[Identifier, Action] = Field(default={}, max_length=256, description="Actions by name.")
    preprocessing: Preprocessing = Field(default=Preprocessing(), description="Rules for the input.")
    postprocessing: Postprocessing = Field(default=Postprocessing(), description="Rules for the output.")
    build: Build = Field(default=Build(), description="Build settings.")
    runtime: Runtime = Field(default=Runtime(), description="Settings of the engine in the image.")


FilterConfig = TerminologyConfig | ReplaceConfig | MaxLengthConfig
TOKEN_FILTERS: dict[str, type[FilterConfig]] = {
    "financial_terminology_normalizer": TerminologyConfig,
    "max_length": MaxLengthConfig,
    "replace": ReplaceConfig,
}
OUTPUT_TRANSFORMERS: dict[str, type[Model]] = {"html_enhancer": HtmlEnhancerConfig}

BUILT_IN_ACTIONS: dict[str, Action] = {
    "apply_financial_guardrails": Action(
        ban=[
            "guaranteed return",
            "guaranteed profit",
            "risk-free return",
            "risk-free profit",
            "risk-free investment",
            "cannot lose money",
        ],
        redact=[
            Redact(text="material non-public information"),
            Redact(text="insider information"),
            Redact(text="inside information"),
        ],
    ),
}
"""Actions that exist without being written; one of the same name under `actions` replaces it."""
