"""`ralbuild simulate`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ralbuild.cli.options import add_cache_option, add_config_option, add_report_options, chosen_report
from ralbuild.errors import ImageError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ralbuild.compile.source_lines import SourceLines
    from ralbuild.contract.bundle import Bundle
    from ralbuild.proof import Sources
    from ralbuild.report import Report
    from ralbuild.simulate.gate import KernelRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_config_option(parser)
    parser.add_argument("--model", type=Path, metavar="DIR", help="model folder; or give --image")
    parser.add_argument("--image", metavar="oci:DIR", help="take bundle and objects out of an image instead")
    add_cache_option(parser)
    parser.add_argument("--kernel", action="append", metavar="NAME", help="only this kernel; repeatable")
    parser.add_argument("--arch", action="append", metavar="sm_NN", help="only this architecture; repeatable")
    parser.add_argument(
        "--buffers", type=Path, metavar="FILE", help="YAML: what a user kernel is launched over"
    )
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--text", type=Path, metavar="FILE", help="push this text through, in longest tokens")
    given.add_argument("--cases", type=int, default=256, metavar="N", help="random texts; default: 256")
    parser.add_argument("--route", default="", help="the route whose rules apply to --text")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the random texts; default: 1")
    parser.add_argument("--race", action="store_true", help="watch for data races too")
    parser.add_argument("--profile", action="store_true", help="count memory traffic by line")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_report_options(parser)


def run(options: argparse.Namespace) -> int:
    """Run what the bundle ships and compare; print one line a kernel and architecture.

    Raises:
        CompileError: when a kernel differs, faults or races.
    """
    from ralbuild.contract.bundle import select_profile
    from ralbuild.contract.routes import read_routes
    from ralbuild.proof import Unpaired, find_unpaired, raise_problems, run_line
    from ralbuild.simulate.buffer_file import read_buffer_file
    from ralbuild.simulate.gate import Work, simulate_bundle

    report = chosen_report(options)
    if (options.model is None) == (options.image is None):
        raise UsageError(
            "needs either --model or --image", hint="--model DIR compiles; --image oci:DIR reads"
        )
    if options.cases < 1:
        raise UsageError(f"needs at least 1 case, found {options.cases}", place="--cases")
    buffers = read_buffer_file(options.buffers) if options.buffers else None
    bundle, objects, sources = (_from_image if options.image else _compiled)(options, report)
    routes = read_routes(objects[bundle.route_table.sha256], "routes", len(bundle.routes))
    work = Work(
        kernels=tuple(options.kernel or ()),
        archs=tuple(options.arch or ()),
        cases=options.cases,
        text=_text(options.text),
        profile=select_profile(bundle, routes, options.route),
        races=options.race,
        profiled=options.profile,
        buffers=buffers,
        seed=options.seed,
    )
    runs = simulate_bundle(bundle, objects, work, lambda item: report.step(run_line(item)))
    unpaired: Unpaired = {}
    if sources.toolchain is None:
        report.note("not proved that the cubins are of this PTX: the pinned ptxas is not installed")
    else:
        unpaired = find_unpaired(bundle, objects, work, sources.toolchain)
    answer = [
        _answer(
            item,
            bundle,
            (item.kernel, item.arch) not in unpaired if sources.toolchain else None,
            sources.lines(item, objects[item.ptx_sha256]) if item.profile else None,
        )
        for item in runs
    ]
    print(json.dumps(answer, indent=2) if options.json else "\n".join(_text_answer(item) for item in answer))
    raise_problems(runs, unpaired, bundle, objects, sources)
    return 0


def _text(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", place=str(path)) from None


def _compiled(options: argparse.Namespace, report: Report) -> tuple[Bundle, Mapping[str, bytes], Sources]:
    """Compile, or take from the cache: both end in objects whose digests were checked."""
    from ralbuild.pipeline.compiling import compile_model
    from ralbuild.pipeline.proving import kernel_sources
    from ralbuild.pipeline.request import BuildRequest

    archs = tuple(options.arch) if options.arch else None
    request = BuildRequest(options.model, options.config, target="cuda", archs=archs, cache_dir=options.cache)
    compiled = compile_model(request, report)
    return compiled.bundle, compiled.objects, kernel_sources(request, compiled, report)


def _from_image(options: argparse.Namespace, report: Report) -> tuple[Bundle, Mapping[str, bytes], Sources]:
    """Read the bundle and its objects where they lie in an image's layers."""
    from ralbuild.cache import Cache
    from ralbuild.compile.spec import builtin_specs
    from ralbuild.contract.bundle import object_refs, read_bundle
    from ralbuild.contract.codec import FormatError
    from ralbuild.contract.places import BUNDLE_FILE, OBJECTS_DIR
    from ralbuild.image.reader import open_image
    from ralbuild.proof import sources_of

    path = Path(options.image.removeprefix("oci:").removeprefix("archive:"))
    with open_image(path) as image:
        data = image.read_file(BUNDLE_FILE)
        if data is None:
            raise ImageError(f"holds no {BUNDLE_FILE}", place=str(path), hint="is it an image of ralbuild?")
        try:
            bundle = read_bundle(data)
        except FormatError as error:
            raise ImageError(str(error), place=str(path)) from None
        found = {ref.sha256: image.read_file(f"{OBJECTS_DIR}/{ref.sha256}") for ref in object_refs(bundle)}
    objects = {digest: data for digest, data in found.items() if data is not None}
    return bundle, objects, sources_of(bundle, builtin_specs(), Cache(options.cache, report))


def _answer(run: KernelRun, bundle: Bundle, paired: bool | None, lines: SourceLines | None) -> dict[str, Any]:
    from ralbuild.cli.simulate_profile import profile_answer
    from ralbuild.proof import rule_text

    done = run.comparison
    counters = done.counters
    answer: dict[str, Any] = {
        "kernel": run.kernel,
        "arch": run.arch,
        "ptx": f"sha256:{run.ptx_sha256}",
        "same_ptx_as": run.same_as or None,
        "ok": done.ok,
        "cubin_is_of_this_ptx": paired,
        "cases": done.cases,
        "launches": done.launches,
        "tokens": done.tokens,
        "near_ties": done.ties,
        "warp_instructions": counters.warps if counters else 0,
        "difference": str(done.difference) if done.difference else None,
        "rules": [rule_text(bundle, number) for number in done.difference.rules] if done.difference else [],
        "fault": str(done.fault) if done.fault else None,
        "races": [str(race) for race in done.races],
        "printed": list(done.printed),
    }
    if run.profile:
        answer["profile"] = profile_answer(run, lines)
    return answer


def _text_answer(answer: dict[str, Any]) -> str:
    """Return one line; more for a profile."""
    from ralbuild.cli.simulate_profile import profile_rows

    word = "equal" if answer["ok"] else "FAILED"
    count, launches = answer["warp_instructions"], max(1, answer["launches"])
    line = (
        f"{answer['kernel']:<16} {answer['arch']}  {word:<6} {answer['cases']:>6} cases  "
        f"{launches:>5} launches  {count // launches:>9,} warp instructions a launch"
    )
    if answer["same_ptx_as"]:
        line += f", PTX of {answer['same_ptx_as']}"
    rows = [f"  printed: {text.rstrip()}" for text in answer["printed"]]
    if "profile" not in answer:
        return "\n".join([line, *rows])
    return "\n".join([line, *rows, *profile_rows(answer["profile"])])
