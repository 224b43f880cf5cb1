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
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from ralbuild.config.regex import parse_class, parse_regex, parse_route
from ralbuild.contract.buffers import BIAS_ROOM
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
        raise ValueError(f"needs text that is not blank, found {text!r}")
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

    # Built when first asked for: a part's own validator is not asked for, the whole config's holds it.
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, populate_by_name=True, defer_build=True
    )


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


class Matcher(Model):
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

    @model_validator(mode="after")
    def _one_matcher(self) -> Matcher:
        _exactly_one(self, ("text", "pattern"))
        return self


class TextMatcher(Matcher):
    """What an output rule matches, and where."""

    in_: Scope = Field(default="all", alias="in")


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


class Range(Model):
    """Least and most that a request may ask for; what lies outside is moved to the nearer end."""

    min: float | None = Field(default=None, allow_inf_nan=False)
    max: float | None = Field(default=None, allow_inf_nan=False)

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if self.min is None and self.max is None:
            raise ValueError("needs 'min', 'max' or both, found neither")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"needs 'min' of at most 'max', found {self.min:g} above {self.max:g}")
        return self


SAMPLING_LIMITS: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_k": (0, 1_000_000),
    "top_p": (0.0001, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 10),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
"""Least and most of every sampling value that can be imposed or bounded."""


def _bounded(name: str, description: str) -> Any:
    """Declare a sampling value: a number that is imposed, or a range."""
    least, most = SAMPLING_LIMITS[name]
    kind = "integer" if name == "top_k" else "number"
    number: dict[str, Any] = {"type": kind, "minimum": least, "maximum": most}
    span: dict[str, Any] = {
        "type": "object",
        "properties": {"min": number, "max": number},
        "additionalProperties": False,
    }
    choice: Any = [number, {**span, "minProperties": 1}]

    def describe(schema: dict[str, Any]) -> None:
        schema["anyOf"] = choice

    return Field(default=None, description=description, json_schema_extra=describe)


class LogitBias(Model):
    """A bias for one token. Give exactly one of `text` and `id`."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["text"]}, {"required": ["id"]}]})

    text: OutputText | None = Field(
        default=None, description="Text of exactly one token, leading space included; looked up at build."
    )
    id: int | None = Field(default=None, ge=0, description="Token id.")
    bias: float = Field(
        ge=-100, le=100, allow_inf_nan=False, description="Added to the logit; -100 all but forbids a token."
    )

    @model_validator(mode="after")
    def _one_token(self) -> LogitBias:
        if (self.text is None) == (self.id is None) or self.text == "":
            given = "both" if self.id is not None and self.text else "neither, or an empty text"
            raise ValueError(f"needs exactly one of 'text' and 'id', found {given}")
        return self


class Sampling(Model):
    """What the action imposes on sampling. A number is imposed; `{min: , max: }` bounds the request's own."""

    temperature: Range | None = _bounded("temperature", "0 is greedy.")
    greedy: Literal[True] | None = Field(
        default=None, description="`true`: always the likeliest token, which is temperature 0."
    )
    top_k: Range | None = _bounded("top_k", "Likeliest tokens kept; 0 keeps all.")
    top_p: Range | None = _bounded("top_p", "Nucleus mass kept.")
    min_p: Range | None = _bounded("min_p", "Least share of the likeliest token's probability.")
    repetition_penalty: Range | None = _bounded(
        "repetition_penalty", "Above 1: tokens of prompt and answer become less likely."
    )
    presence_penalty: Range | None = _bounded("presence_penalty", "Taken once from tokens that were drawn.")
    frequency_penalty: Range | None = _bounded(
        "frequency_penalty", "Taken from tokens for each time they were drawn."
    )
    seed: int | None = Field(
        default=None, ge=-(1 << 63), lt=1 << 63, description="One seed for every request: repeatable answers."
    )
    logit_bias: list[LogitBias] = Field(
        default=[], max_length=BIAS_ROOM // 2, description="Beats the request's bias for the same token."
    )

    @field_validator(*SAMPLING_LIMITS, mode="before")
    @classmethod
    def _as_range(cls, value: Any) -> Any:
        """One number imposes itself: it is both ends of the range."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            return {"min": value, "max": value}
        if value is None or isinstance(value, dict):
            return value
        raise ValueError(f"needs a number, or a mapping with 'min', 'max' or both, found {value!r}")

    @field_validator(*SAMPLING_LIMITS)
    @classmethod
    def _within_limits(cls, found: Range | None, info: ValidationInfo) -> Range | None:
        name = str(info.field_name)
        least, most = SAMPLING_LIMITS[name]
        for end in (found.min, found.max) if found else ():
            if end is not None and not least <= end <= most:
                raise ValueError(f"needs a number from {least:g} to {most:g}, found {end:g}")
            if end is not None and name == "top_k" and end != int(end):
                raise ValueError(f"needs a whole number, found {end:g}")
        return found

    @model_validator(mode="after")
    def _greedy_or_warm(self) -> Sampling:
        if self.greedy and self.temperature is not None:
            raise ValueError("needs 'greedy' (which is temperature 0) or 'temperature', found both")
        return self


def _class(text: str) -> str:
    parse_class(text)
    return text


class Allow(Model):
    """All that an answer may be: one of `texts`, or any text of `characters` alone, or either."""

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [{"required": ["texts"]}, {"required": ["characters"]}]}
    )

    texts: Annotated[list[Literal_], Field(min_length=1)] | None = Field(
        default=None,
        max_length=2_000,
        description="The answer is exactly one of these, in this case, and then ends.",
    )
    characters: Annotated[str, Field(max_length=1000), AfterValidator(_class)] | None = Field(
        default=None,
        description="The inside of a character class, such as `0-9.,`: any number of these characters.",
    )

    @model_validator(mode="after")
    def _something(self) -> Allow:
        if self.texts is None and self.characters is None:
            raise ValueError("needs 'texts', 'characters' or both, found neither")
        return self


class Action(Structure):
    """What happens to the requests of a route."""

    allow: Allow | None = Field(default=None, description="The only texts that may be generated.")

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


class Replacement(Matcher):
    """Replaces what it matches in the input."""

    with_: OutputText = Field(alias="with", description="What is written instead; may be empty.")


class InputReplaceConfig(Model):
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
            raise ValueError("needs 'characters', 'tokens' or both, found neither")
        return self


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
    cpu_user_kernels: Literal["interpret"] | None = Field(
        default=None,
        description="`interpret`: a CPU image holds Triton, whose interpreter runs user kernels, slowly.",
    )


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


FilterConfig = TerminologyConfig | InputReplaceConfig | MaxLengthConfig
TOKEN_FILTERS: dict[str, type[FilterConfig]] = {
    "financial_terminology_normalizer": TerminologyConfig,
    "max_length": MaxLengthConfig,
    "replace": InputReplaceConfig,
}
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
