"""`bundle.json`: the one file that the launcher opens. It names everything else by digest."""

from __future__ import annotations

from dataclasses import dataclass

from ralbuild.contract.codec import FormatError, canonical_json, from_plain, parse_json, to_plain
from ralbuild.contract.routes import RouteTable

SCHEMA = "ralbuild.bundle/2"
RUN, CHARACTERS, TOKENS = "run", "characters", "tokens"
"""What an input limit counts."""


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """A file under ``objects/``: SHA-256 in hex (also its name) and size in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Param:
    """One kernel parameter, in launch order.

    Attributes:
        name: as in the source; ``global_scratch`` and ``profile_scratch`` are Triton's own.
        type: Triton's spelling, such as ``*i32`` or ``i32``.
        buffer: the buffer or value bound to it (see `ralbuild.contract.buffers`); empty for hidden ones.
        offset, size: place in the parameter block, in bytes, as the cubin declares it.
        align: bytes that the address (or the number) is promised to be a multiple of; 1 for no promise.
        hidden: added by Triton after the user's parameters; launched as a null pointer.
    """

    name: str
    type: str
    buffer: str
    offset: int
    size: int
    align: int
    hidden: bool


@dataclass(frozen=True, slots=True)
class KernelObject:
    """One kernel compiled for one architecture.

    Attributes:
        arch: such as ``sm_80``.
        cubin, ptx: the objects.
        registers: per thread.
        spill_bytes: local memory per thread that holds spilled registers.
        shared_bytes: shared memory per block.
        symbols: global function symbols in the cubin.
    """

    arch: str
    cubin: ObjectRef
    ptx: ObjectRef
    registers: int
    spill_bytes: int
    shared_bytes: int
    symbols: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A Triton kernel compiled ahead of time for every target architecture.

    Attributes:
        name: step name, unique in the bundle.
        entry: function name in the cubin.
        source_sha256: digest of the Triton source file.
        user: True for a file of the user's ``transformers/`` folder.
        num_warps: warps per block; the block is ``32 * num_warps`` threads.
        constants: the compile-time parameters and their values.
        params: in launch order.
        objects: one per architecture, sorted.
        data: table file of what the kernel's own config gives it, by buffer name; None without any.
        source: the source itself, where Triton's interpreter runs it; None where only objects ship.
    """

    name: str
    entry: str
    source_sha256: str
    user: bool
    num_warps: int
    constants: dict[str, int]
    params: tuple[Param, ...]
    objects: tuple[KernelObject, ...]
    data: ObjectRef | None = None
    source: ObjectRef | None = None


@dataclass(frozen=True, slots=True)
class PatchStep:
    """One node that the patch adds to the decode graph: a kernel and its grid (`slots` or a number)."""

    kernel: str
    grid: str


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a route lets a sampling value be; equal ends impose one value."""

    least: float
    most: float

    def clamp(self, value: float) -> float:
        """Return the nearest value within the bounds."""
        return min(max(value, self.least), self.most)


@dataclass(frozen=True, slots=True)
class TokenBias:
    """A number added to the logit of one token id."""

    token: int
    bias: float


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling values that a route imposes or bounds; None leaves the request's own.

    Attributes:
        temperature, top_k, top_p, min_p: how the distribution is cut; top_k 0 keeps all tokens.
        repetition_penalty, presence_penalty, frequency_penalty: of tokens that occurred before.
        seed: one seed for every request.
        logit_bias: by rising id; beats the request's for the same id.
    """

    temperature: Bounds | None = None
    top_k: Bounds | None = None
    top_p: Bounds | None = None
    min_p: Bounds | None = None
    repetition_penalty: Bounds | None = None
    presence_penalty: Bounds | None = None
    frequency_penalty: Bounds | None = None
    seed: int | None = None
    logit_bias: tuple[TokenBias, ...] = ()

    @property
    def bounded(self) -> tuple[tuple[str, Bounds], ...]:
        """The values that are imposed or bounded, by name."""
        found = ((name, getattr(self, name)) for name in BOUNDED_VALUES)
        return tuple((name, bounds) for name, bounds in found if bounds is not None)

    def lines(self) -> tuple[str, ...]:
        """Say for people what is imposed, one value a line."""
        out = [
            f"{name} {bounds.least:g}"
            if bounds.least == bounds.most
            else f"{name} {bounds.least:g} to {bounds.most:g}"
            for name, bounds in self.bounded
        ]
        if self.seed is not None:
            out.append(f"seed {self.seed}")
        out += [f"logit_bias {item.bias:+g} for token {item.token}" for item in self.logit_bias]
        return tuple(out)


BOUNDED_VALUES = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclass(frozen=True, slots=True)
class Rule:
    """One compiled rule, for counters and for people.

    Attributes:
        kind: ``bold``, ``redact``, ``escape``, ``append``, ``ban``, ``allow`` or ``replace`` (input).
        text: the literal that it matches.
        source: the transformer, action or filter it comes from.
        place: ``line:column`` in the config, or ``built-in``.
    """

    kind: str
    text: str
    source: str
    place: str


@dataclass(frozen=True, slots=True)
class Profile:
    """A set of rules that apply together: start state ``index`` of every table.

    Attributes:
        name: ``default``, or the action's name; ``input`` is the one for token filters.
        rules: ids of its rules.
        sampling: what it imposes on sampling.
    """

    name: str
    rules: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Route:
    """One routing rule, for people: what decides is the table (`ralbuild.contract.routes`).

    Attributes:
        match: the regular expression that must match the whole route name.
        profile: index of the profile that it leads to.
        place: ``line:column`` in the config.
    """

    match: str
    action: str
    priority: int
    profile: int
    place: str = ""


@dataclass(frozen=True, slots=True)
class InputLimit:
    """The longest input that a token filter accepts; more is refused, never cut.

    Attributes:
        name: of the filter.
        max_length: how much is accepted.
        unit: `RUN` (characters without a space), `CHARACTERS` or `TOKENS` (of the whole prompt).
    """

    name: str
    max_length: int
    unit: str = RUN


@dataclass(frozen=True, slots=True)
class Engine:
    """Sizes of the decode loop: slots decoded together, positions per slot, weight element type.

    ``idle_unload`` is the number of seconds without a request after which memory is released; 0 is never.
    """

    max_batch_size: int
    max_seq_len: int
    dtype: str
    idle_unload: int = 0


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Token ids to push through the folded step, and the bytes (hex) that must come out."""

    profile: int
    tokens: tuple[int, ...]
    output: str


@dataclass(frozen=True, slots=True)
class Bundle:
    """Everything compiled into an image; ``profiles[0]`` is the default, ``input_profile`` an index."""

    schema: str
    ralbuild: str
    target: str
    model: str
    manifest: ObjectRef
    engine: Engine
    routes: tuple[Route, ...]
    route_table: ObjectRef
    profiles: tuple[Profile, ...]
    input_profile: int
    input_limits: tuple[InputLimit, ...]
    rules: tuple[Rule, ...]
    config_sha256: str
    transducer: ObjectRef
    bans: ObjectRef
    vocab: ObjectRef
    kernels: tuple[Kernel, ...]
    patch: tuple[PatchStep, ...]
    self_tests: tuple[SelfTest, ...]


def write_bundle(bundle: Bundle) -> bytes:
    """Return canonical JSON; its SHA-256 is the bundle digest that the launcher logs."""
    return canonical_json(to_plain(bundle))


def read_bundle(data: bytes, where: str = "bundle.json") -> Bundle:
    """Parse `bundle.json` and check what its fields say about each other.

    Raises:
        FormatError: naming the field.
    """
    plain = parse_json(data, where)
    if isinstance(plain, dict) and plain.get("schema") != SCHEMA:
        raise FormatError(f"{where}: schema", f"needs {SCHEMA!r}, found {plain.get('schema')!r}")
    bundle = from_plain(Bundle, plain, where)
    for index, limit in enumerate(bundle.input_limits):
        if limit.unit not in (RUN, CHARACTERS, TOKENS):
            raise FormatError(f"{where}: input_limits[{index}].unit", f"is unknown: {limit.unit!r}")
    count = len(bundle.profiles)
    if not count or not 0 <= bundle.input_profile < count:
        raise FormatError(f"{where}: input_profile", "names no profile")
    for index, route in enumerate(bundle.routes):
        if not 0 <= route.profile < count:
            raise FormatError(f"{where}: routes[{index}].profile", "names no profile")
    return bundle


def object_refs(bundle: Bundle) -> tuple[ObjectRef, ...]:
    """Return every object that the bundle names, each once, sorted by digest."""
    refs = {bundle.manifest, bundle.route_table, bundle.transducer, bundle.bans, bundle.vocab}
    for kernel in bundle.kernels:
        refs |= {ref for ref in (kernel.data, kernel.source) if ref is not None}
        for item in kernel.objects:
            refs |= {item.cubin, item.ptx}
    return tuple(sorted(refs, key=lambda ref: ref.sha256))


def select_profile(bundle: Bundle, table: RouteTable, route: str) -> int:
    """Return the profile for a route name: that of the first rule that matches all of it, else 0."""
    found = table.first(route)
    return 0 if found is None else bundle.routes[found].profile
