"""The kernels of a build run on a CPU, for `image --simulate` and `ralbuild simulate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ralbuild.cache import Cache
from ralbuild.compile.spec import builtin_specs
from ralbuild.pipeline.compiling import Compiled
from ralbuild.pipeline.kernels import user_steps
from ralbuild.pipeline.request import BuildRequest
from ralbuild.report import Report

if TYPE_CHECKING:
    from ralbuild.proof import Sources


def kernel_sources(request: BuildRequest, compiled: Compiled, report: Report) -> Sources:
    """Return where the source lines of the compiled kernels are found."""
    from ralbuild.proof import sources_of  # the simulator: a build without --simulate does not wait for it

    users = user_steps(compiled.loaded, compiled.model, compiled.bundle.engine.max_seq_len)
    specs = (*builtin_specs(), *(step.spec for step in users))
    return sources_of(compiled.bundle, specs, Cache(request.cache_dir, report, writes=not request.dry_run))


def prove_kernels(request: BuildRequest, compiled: Compiled, report: Report) -> str:
    """Run the kernels when that is asked for; return what the image's label says of it."""
    if not request.simulate:
        return ""
    from ralbuild.proof import prove

    sources = kernel_sources(request, compiled, report)
    return prove(compiled.bundle, compiled.objects, sources, report)
