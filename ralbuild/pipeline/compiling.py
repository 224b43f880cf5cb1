"""From a model folder and a config to a bundle: verify, fold, compile, link."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from ralbuild import __version__
from ralbuild.cache import Cache
from ralbuild.checking import LAYER_MTIME, verify_model
from ralbuild.compile.interpreted import with_sources
from ralbuild.compile.order import step_order
from ralbuild.compile.spec import builtin_specs
from ralbuild.config.load import LoadedConfig, load_config
from ralbuild.contract import bundle as contract
from ralbuild.contract.codec import canonical_json, sha256_hex, to_plain
from ralbuild.digests import DigestCache, LayerCopies, default_cache
from ralbuild.errors import CacheError
from ralbuild.files import write_atomically
from ralbuild.fold.folding import Folded, fold
from ralbuild.fold.plan_text import overlap_lines, plan_text
from ralbuild.pipeline.checks import engine_of, refuse_user_kernels
from ralbuild.pipeline.kernels import compile_specs, kernel_summary, lint, user_steps, with_data
from ralbuild.pipeline.request import BuildRequest, Target
from ralbuild.report import Report, byte_counter, format_bytes
from ralbuild.weights.scan import ScannedModel

SHOWN_OVERLAPS = 10
"""Lines on overlapping routes that a build prints."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """The result of everything before the image: bundle bytes and the objects it names, by digest."""

    loaded: LoadedConfig
    model: ScannedModel
    folded: Folded
    bundle: contract.Bundle
    bundle_json: bytes
    objects: dict[str, bytes] = field(repr=False)

    @property
    def bundle_sha256(self) -> str:
        """The digest that the launcher logs."""
        return sha256_hex(self.bundle_json)


def compile_model(request: BuildRequest, report: Report, copies: LayerCopies | None = None) -> Compiled:
    """Verify the model, fold the rules and compile the kernels into the cache.

    ``copies`` takes the weight layers' bytes in the read that hashes them.
    """
    loaded = load_config(request.config)
    refuse_user_kernels(loaded, request.target)
    cache = Cache(request.cache_dir, report, writes=not request.dry_run)
    checks = replace(request.checks, remember=not request.dry_run)
    model = verify_model(request.model, report, checks, cache, copies)
    if request.reshard:
        model = _reshard(model, request.reshard, default_cache(writes=not request.dry_run), report)
    engine = engine_of(loaded, model, request.target)
    with report.stage("fold") as stage:
        folded = fold(loaded, model.vocabulary.tokens, strips=model.vocabulary.strips)
        size = folded.size
        stage.summary = (
            f"{len(folded.rule_set.rules)} rules, {size.states} states x {size.classes} classes, "
            f"{format_bytes(size.table_bytes + size.front_bytes)}, at most {size.max_held} bytes held back"
        )
    _note_overlaps(loaded, folded, report)
    with report.stage("compile") as stage:
        archs = request.archs if request.archs is not None else tuple(loaded.config.build.targets)
        users = user_steps(loaded, model, engine.max_seq_len)
        lint(users, report, strict=request.checks.strict)
        specs = (*builtin_specs(), *(step.spec for step in users))
        kernels = compile_specs(request, specs, archs, cache, report)
        if request.target == "cpu":
            kernels = with_sources(kernels, users, cache.add)
        kernels = with_data(kernels, users, cache)
        stage.summary = kernel_summary(kernels)
    steps = step_order(users, loaded.declarative_priorities)
    bundle = _link(loaded, model, folded, engine, kernels, steps, request.target, cache)
    objects = {ref.sha256: cache.read(ref) for ref in contract.object_refs(bundle)}
    return Compiled(loaded, model, folded, bundle, contract.write_bundle(bundle), objects)


def _note_overlaps(loaded: LoadedConfig, folded: Folded, report: Report) -> None:
    lines = overlap_lines(loaded.path.name, folded.rule_set.routes, folded.overlaps)
    for line in lines[:SHOWN_OVERLAPS]:
        report.note(line)
    if len(lines) > SHOWN_OVERLAPS:
        report.note(f"{len(lines) - SHOWN_OVERLAPS} more overlaps of routes; `ralbuild explain` lists them")


def _reshard(model: ScannedModel, limit: int, digests: DigestCache, report: Report) -> ScannedModel:
    from ralbuild.weights.reshard import reshard

    with report.stage("reshard") as stage:
        progress = byte_counter(report, model.weight_bytes)
        fresh = reshard(model, limit, digests, LAYER_MTIME, progress)
        stage.summary = f"{len(model.shards)} weight files become {len(fresh.shards)}"
    return fresh


def _link(
    loaded: LoadedConfig,
    model: ScannedModel,
    folded: Folded,
    engine: contract.Engine,
    kernels: tuple[contract.Kernel, ...],
    steps: tuple[str, ...],
    target: Target,
    cache: Cache,
) -> contract.Bundle:
    """Name everything by digest; the tables join the kernels in the cache."""
    rules = folded.rule_set
    return contract.Bundle(
        schema=contract.SCHEMA,
        ralbuild=__version__,
        target=target,
        model=loaded.config.model,
        manifest=cache.add(canonical_json(to_plain(model.manifest))),
        engine=engine,
        routes=rules.routes,
        profiles=rules.profiles,
        input_profile=rules.input_profile,
        input_limits=folded.input_limits,
        rules=rules.rules,
        config_sha256=sha256_hex(loaded.source),
        transducer=cache.add(folded.transducer),
        route_table=cache.add(folded.route_table),
        bans=cache.add(folded.bans),
        vocab=cache.add(folded.vocab),
        kernels=kernels,
        patch=tuple(contract.PatchStep(name, "1" if name == "feedback" else "slots") for name in steps),
        self_tests=folded.self_tests,
    )


def save_plan(compiled: Compiled, folder: Path) -> Path:
    """Write ``bundle.json`` and ``report.txt`` into the cache folder; return the report's path."""
    text = plan_text(compiled.bundle, compiled.bundle_sha256, compiled.folded.size)
    for name, data in (("bundle.json", compiled.bundle_json), ("report.txt", text.encode())):
        try:
            write_atomically(folder / name, data)
        except OSError as error:
            raise CacheError(f"cannot be written: {error.strerror}", place=str(folder / name)) from None
    return folder / "report.txt"
