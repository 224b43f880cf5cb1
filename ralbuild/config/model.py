"""The config language as pydantic models: one class a mapping, one field a key.

A field marked `not_yet` is known and refused with the reason: a key is never ignored. The
descriptions here become the JSON Schema and docs/config.md.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ralbuild.config.regex import check_route, parse_regex
from ralbuild.pins import load_pins

ARCHITECTURES = load_pins().cubin.archs
MAX_MARKER_BYTES = 128
"""Longest stop string or marker of a span."""
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
    check_route(text)
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


def _marker(text: str) -> str:
    size = len(text.encode("utf-8"))
    if not 0 < size <= MAX_MARKER_BYTES:
        raise ValueError(f"needs 1 to {MAX_MARKER_BYTES} bytes of UTF-8, found {size}")
    return text


Marker = Annotated[str, Field(json_schema_extra={"minLength": 1}), AfterValidator(_marker)]


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


Scope = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        max_length=64,
        description="Where it holds: `all`, `outside` of every span, or the name of one that keeps its text.",
    ),
]
Kind = Literal["api_key", "card", "email", "iban", "ip", "phone", "us_ssn"]


class TextMatcher(Model):
    """What a rule matches: exactly one of `text` and `pattern`."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["text"]}, {"required": ["pattern"]}]}
    )

    text: Literal_ | None = Field(default=None, description="Literal to match.")
    pattern: Pattern | None = Field(
        default=None, description="Regular expression to match: bounded, the longest match is taken."
    )
    case_sensitive: bool = Field(default=False, description="Match letters in their case only.")
    whole_words: bool = Field(default=False, description="Match only where a word starts and ends.")
    in_: Scope = Field(default="all", alias="in")

    @model_validator(mode="after")
    def _one_matcher(self) -> TextMatcher:
        _exactly_one(self, ("text", "pattern"))
        return self


def _exactly_one(item: Model, names: tuple[str, ...]) -> None:
    given = [name for name in names if getattr(item, name) is not None]
    if len(given) != 1:
        wanted = f"{', '.join(map(repr, names[:-1]))} and {names[-1]!r}"
        raise ValueError(f"needs exactly one of {wanted}, found {given or 'none'}")


class Redact(Model):
    """Replaces what it matches. Give exactly one of `text`, `pattern` and `kind`."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [{"required": ["text"]}, {"required": ["pattern"]}, {"required": ["kind"]}]
        }
    )

    text: Literal_ | None = Field(default=None, description="Literal to replace.")
    pattern: Pattern | None = Field(
        default=None, description="Regular expression to replace: bounded, the longest match is taken."
    )
    kind: Kind | None = Field(default=None, description="Named kind to replace; its form is in rules.md.")
    with_: OutputText = Field(default="[redacted]", alias="with", description="What is written instead.")
    case_sensitive: bool = Field(
        default=False, description="Match letters in their case only. A kind has its own rule."
    )
    whole_words: bool = Field(
        default=False, description="Match only where a word starts and ends. A kind always does."
    )
    in_: Scope = Field(default="all", alias="in")

    @model_validator(mode="after")
    def _one_matcher(self) -> Redact:
        _exactly_one(self, ("text", "pattern", "kind"))
        return self


class Replace(TextMatcher):
    """Writes another text instead of what it matches."""

    with_: OutputText = Field(alias="with", description="What is written instead.")


class Markup(TextMatcher):
    """Writes something before and after what it matches."""

    before: OutputText = Field(description="Written before the match.")
    after: OutputText = Field(description="Written after the match.")


class Stop(Model):
    """Ends the text where it first appears; neither it nor what follows is written."""

    text: Marker = Field(description="Exact text.")
    in_: Scope = Field(default="all", alias="in")


class Span(Model):
    """A part of the text between two exact markers, such as a model's reasoning."""

    name: Identifier = Field(default="span", description="For the `in` of other rules.")
    open: Marker = Field(description="Exact text that begins the span.")
    close: Marker = Field(description="Exact text that ends it; else it lasts to the end of the text.")
    do: Literal["drop", "keep", "exempt"] = Field(
        description="`drop` writes nothing, `exempt` writes it untouched, `keep` applies rules by their `in`."
    )
    begins: Literal["outside", "inside"] = Field(
        default="outside", description="`inside` when the prompt has already opened the span."
    )


class Structure(Model):
    """Where a text ends, and which parts of it are special."""

    stop: list[Stop | Marker] = Field(
        default=[], max_length=256, description="Texts that end the answer, or mappings with `text` and `in`."
    )
    spans: list[Span] = Field(default=[], max_length=16, description="Parts of the text between markers.")


class Sampling(Model):
    """Sampling values that the action imposes on the request."""

    temperature: float | None = Field(
        default=None, ge=0, le=2, allow_inf_nan=False, description="0 is greedy."
    )
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False, description="Nucleus mass.")


class Action(Structure):
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
    terms: dict[Literal_, OutputText] = Field(
        default={}, max_length=10_000, description="Whole word to its replacement."
    )


class HtmlEnhancerConfig(Model):
    """`html_enhancer`: bold terms in the output, and escapes."""

    bold_terms: list[Literal_] = Field(
        default=[], max_length=10_000, description="Wrapped in `<b>` and `</b>`."
    )
    case_sensitive: bool = Field(default=False, description="Match letters in their case only.")
    whole_words: bool = Field(default=True, description="Match only where a word starts and ends.")
    escape: bool | Literal["html", "json"] = Field(
        default=False,
        description="`html` (or true) writes the model's own `&`, `<`, `>` and quotes as entities; "
        "`json` writes quotes, backslashes and control characters as in a JSON string.",
    )
    in_: Scope = Field(default="all", alias="in")


class ReplaceConfig(Model):
    """`replace`: other texts in the output."""

    rules: list[Replace] = Field(default=[], max_length=10_000, description="What is replaced.")


class MarkupConfig(Model):
    """`markup`: any tags around terms in the output."""

    rules: list[Markup] = Field(default=[], max_length=10_000, description="What gets marked up.")


class TokenFilter(Model):
    """A rule set for the text that users send."""

    name: Identifier = Field(description="`financial_terminology_normalizer`.")
    config: dict[str, Any] = Field(default={}, description="Settings of the named filter.")


class OutputTransformer(Model):
    """A rule set, or a user's Triton kernel, for the text that the model writes."""

    name: Identifier = Field(description="`transformers/<name>.py` beside the config, else a built-in.")
    config: dict[str, Any] = Field(default={}, description="Settings; for a user kernel, its parameters.")


class Preprocessing(Model):
    """What happens before inference."""

    token_filters: list[TokenFilter] = Field(default=[], max_length=64, description="Applied to user text.")


class Postprocessing(Structure):
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


class Runtime(Model):
    """How the image runs."""

    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description="Weight type; `auto` is float32 on CPU, where it is exact and batches fastest.",
    )
    idle_unload: NotYet[str] = not_yet("Idle time after which memory is released, such as `600s`.")
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


TOKEN_FILTERS: dict[str, type[Model]] = {"financial_terminology_normalizer": TerminologyConfig}
OUTPUT_TRANSFORMERS: dict[str, type[Model]] = {
    "html_enhancer": HtmlEnhancerConfig,
    "markup": MarkupConfig,
    "replace": ReplaceConfig,
}

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
