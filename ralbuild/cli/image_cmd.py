"""`ralbuild image`: the main job."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ralbuild.cli.options import (
    add_base_option,
    add_build_options,
    add_key_option,
    add_registry_options,
    add_report_options,
    build_request,
    chosen_base,
    chosen_report,
    parse_size,
    registry_options,
    signing_key,
)
from ralbuild.errors import UsageError

if TYPE_CHECKING:
    from ralbuild.image.assemble import Image, Layer
    from ralbuild.image.bases import BaseSource
    from ralbuild.image.write import WrittenImage
    from ralbuild.pipeline.building import Planned
    from ralbuild.pipeline.compiling import Compiled
    from ralbuild.pipeline.request import BuildRequest
    from ralbuild.report import Report
    from ralbuild.supply.wanted import Wanted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_build_options(parser)
    add_base_option(parser)
    parser.add_argument(
        "--output",
        action="append",
        metavar="FORM",
        help="oci:DIR, archive:FILE, docker, registry:HOST/NAME[:TAG]; repeatable; default: oci:./ral-image",
    )
    parser.add_argument("--tag", default="", metavar="NAME[:TAG]", help="name of the image in its outputs")
    add_key_option(parser, "--sign", "sign the image with this P-256 key (PEM)")
    parser.add_argument("--sbom", action="store_true", help="store a CycloneDX bill of materials beside it")
    parser.add_argument("--provenance", action="store_true", help="store SLSA v1 provenance beside it")
    parser.add_argument("--builder", default="", metavar="URI", help="who runs this build, for --provenance")
    parser.add_argument(
        "--ignore-secret",
        action="append",
        default=[],
        metavar="FILE:LINE",
        help="what looks like a secret there is none; repeatable",
    )
    parser.add_argument(
        "--check-repro",
        action="store_true",
        help="build twice under different conditions first, and name the first file that differs",
    )
    parser.add_argument(
        "--reshard", metavar="SIZE", help="cut the weights into files of at most SIZE (5GB), without loss"
    )
    parser.add_argument(
        "--weights",
        choices=("baked", "volume"),
        default="baked",
        help="in the image, or in one of their own beside it (NAME-weights), mounted at /models",
    )
    parser.add_argument(
        "--weights-base",
        metavar="IMAGE",
        help="build the image of the weights on this one, which has a shell: for KServe's modelcars",
    )
    parser.add_argument(
        "--modelpack", action="store_true", help="add a ModelPack manifest of the same blobs (NAME-modelpack)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be made, and write nothing, caches included"
    )
    parser.add_argument(
        "--simulate", action="store_true", help="run every kernel's PTX first; write nothing if one is wrong"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the digest")
    add_registry_options(parser)
    add_report_options(parser)


def run(options: argparse.Namespace) -> int:
    """Build an image; print its manifest digest and nothing else on standard output."""
    from ralbuild.contract.codec import to_plain
    from ralbuild.image.outputs import parse_output, parse_tag
    from ralbuild.image.plan import planned_files
    from ralbuild.pipeline.building import build_image, plan_only

    report = chosen_report(options)
    outputs = tuple(parse_output(text) for text in options.output or ["oci:./ral-image"])
    tag = parse_tag(options.tag) if options.tag else ""
    request = build_request(options, base=chosen_base(options), registry=registry_options(options))
    wanted = _wanted(options)
    request = replace(
        request,
        attest=wanted,
        checks=replace(request.checks, own_digests=wanted.sbom or wanted.provenance),
        check_repro=False,  # a whole second build compiles every kernel again anyway
        weights_base=_weights_base(options),
        reshard=parse_size(options.reshard, "--reshard") if options.reshard else 0,
        dry_run=options.dry_run,
    )
    if options.check_repro or options.dry_run:
        planned = plan_only(request, outputs, report)
        if options.check_repro:
            _check_repro(request, planned, report)
        if options.dry_run:
            files = to_plain(planned_files(planned.plan))
            if options.json:
                answer = _answer(planned.compiled, planned.image, None, report, planned.missing)
                print(json.dumps(answer | {"files": files}, indent=2))
            else:
                print(_table(planned.image, planned.missing))
            return 0
    compiled, image, written = build_image(request, outputs, tag, report)
    print(json.dumps(_answer(compiled, image, written, report), indent=2) if options.json else image.digest)
    if not options.json and not options.quiet and sys.stderr.isatty() and not options.output:
        print("next: ralbuild run oci:./ral-image", file=sys.stderr)
    return 0


def _check_repro(request: BuildRequest, planned: Planned, report: Report) -> None:
    from ralbuild.cli.repro import check_reproducible

    if planned.missing:
        hint = f"run `ralbuild base --target {request.target} --out oci:DIR` first, or leave --dry-run out"
        message = f"compares digests, and a dry run does not make {planned.missing[0]}"
        raise UsageError(message, place="--check-repro", hint=hint)
    check_reproducible(request, planned.plan, planned.image, report)


def _weights_base(options: argparse.Namespace) -> BaseSource | None:
    if options.weights_base is None:
        return None
    if options.weights != "volume":
        raise UsageError("is for the image of the weights: --weights volume", place="--weights-base")
    from ralbuild.image.bases import parse_base

    return parse_base(options.weights_base, "--weights-base")


def _wanted(options: argparse.Namespace) -> Wanted:
    from ralbuild.supply.wanted import LOCAL_BUILDER, Wanted

    if options.builder and not options.provenance:
        raise UsageError("says who runs the build, but no --provenance is asked for", place="--builder")
    if options.builder and ":" not in options.builder:
        raise UsageError(f"needs a URI, found {options.builder!r}", place="--builder")
    builder = options.builder or LOCAL_BUILDER
    return Wanted(signing_key(options), sbom=options.sbom, provenance=options.provenance, builder=builder)


def _table(image: Image, missing: tuple[str, ...]) -> str:
    from ralbuild.report import format_bytes

    def rows(layers: tuple[Layer, ...]) -> list[str]:
        items = [layer.descriptor for layer in layers]
        return [f"  {i.digest[:19]}  {format_bytes(i.size):>8}  {i.kind:<8} {i.name}" for i in items]

    head = f"{image.digest}  (not written)"
    if missing:
        head = "no digest yet: a build would first make\n" + "\n".join(f"  {text}" for text in missing)
    lines = [head, *rows(image.layers)]
    for item in image.companions:
        lines += ["", f"{item.digest}  beside it: {item.suffix}"]
        lines += rows(image.beside) if item.suffix == "weights" else []
    return "\n".join(lines)


def _layers(layers: tuple[Layer, ...], reused: set[str]) -> list[dict[str, Any]]:
    return [
        {
            "name": layer.descriptor.name,
            "kind": layer.descriptor.kind,
            "digest": layer.descriptor.digest,
            "size": layer.descriptor.size,
            "reused": layer.descriptor.digest in reused,
        }
        for layer in layers
    ]


def _answer(
    compiled: Compiled,
    image: Image,
    written: WrittenImage | None,
    report: Report,
    missing: tuple[str, ...] = (),
) -> dict[str, Any]:
    reused = {layer.digest for layer in written.layers if layer.reused} if written else set()
    return {
        "manifest": None if missing else image.digest,
        "config": None if missing else image.config_digest,
        "would_make": list(missing),
        "bundle": f"sha256:{compiled.bundle_sha256}",
        "written": written.bytes_written if written else 0,
        "names": list(written.names) if written else [],
        "summary": {stage.name: stage.summary for stage in report.stages},
        "seconds": {stage.name: round(stage.seconds, 3) for stage in report.stages},
        "layers": _layers(image.layers, reused),
        "beside": {item.suffix: item.digest for item in image.companions},
        "weights_layers": _layers(image.beside, reused),
        "artifacts": [item.entry() for item in image.artifacts],
    }
