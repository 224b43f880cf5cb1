"""`ralbuild image --check-repro`: a second build in other conditions, and the first file that differs.

The second build is a process of its own: another folder, home, umask, zone, locale, hash seed and number
of processors, and no cache of ours. It reads every weight and compiles every kernel again, and writes no
image. Whatever leaks from its surroundings into the image shows as another digest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ralbuild.errors import ImageError
from ralbuild.image.assemble import Image
from ralbuild.image.base import ensure_base
from ralbuild.image.bases import BaseSource, LayoutBase
from ralbuild.image.plan import ImagePlan, PlannedFile, planned_files
from ralbuild.image.registry.connect import RegistryOptions
from ralbuild.pipeline.request import BuildRequest
from ralbuild.report import Report

_START = """\
import os, sys
os.sched_setaffinity(0, {int(sys.argv.pop(1))})
from ralbuild.cli.main import main
sys.exit(main())
"""
"""Starts the command line on one processor."""


def check_reproducible(request: BuildRequest, plan: ImagePlan, image: Image, report: Report) -> None:
    """Build ``request`` again in other conditions.

    Args:
        request: what was built.
        plan, image: what came of it.
        report: told how it ends.

    Raises:
        ImageError: naming the first file that is not the same, or saying why the second build failed.
    """
    with report.stage("repro") as stage:
        report.step("building again in another folder, zone and locale, without any cache")
        again = _second_build(request, report)
        if again["manifest"] != image.digest:
            raise _difference(planned_files(plan), again, image.digest)
        count = len(plan.layers)
        stage.summary = f"built twice, {image.digest[:19]} both times, {count} layers of our own the same"


def _base_name(base: BaseSource) -> str:
    """Return what `--base` takes, from any folder."""
    if not isinstance(base, LayoutBase):
        return str(base)
    return f"oci:{base.path.absolute()}" + (f"@{base.digest}" if base.digest else "")


def _registry_words(options: RegistryOptions) -> list[str]:
    words = [f"--registry-profile={options.profile}"] if options.profile else []
    words += ["--insecure-registry"] if options.insecure else []
    return words + ([f"--registry-ca={options.ca_file.absolute()}"] if options.ca_file else [])


def _second_build(request: BuildRequest, report: Report) -> dict[str, Any]:
    base = request.base or LayoutBase(ensure_base(request.target, report))
    with tempfile.TemporaryDirectory(prefix="ralbuild-repro-") as folder:
        place = Path(folder, "elsewhere")
        place.mkdir()
        (place / "weights").symlink_to(request.model.absolute())
        (place / "settings").symlink_to(request.config.absolute().parent)
        command = [sys.executable, "-c", _START, str(max(os.sched_getaffinity(0)))]
        command += ["image", "--dry-run", "--json", "--quiet"]
        command += ["--model", "weights", "--config", f"settings/{request.config.name}"]
        command += ["--base", _base_name(base), "--target", request.target]
        command += [f"--arch={arch}" for arch in request.archs or ()]
        command += [f"--ignore-secret={place}" for place in request.ignored_secrets]
        command += [f"--ignore={rule}" for rule in sorted(request.checks.ignored)]
        command += ["--reshard", str(request.reshard)] if request.reshard else []
        command += ["--weights=volume"] if request.volume else []
        below = request.weights_base
        command += [f"--weights-base={_base_name(below)}"] if below is not None else []
        command += ["--modelpack"] if request.modelpack else []
        command += _registry_words(request.registry)
        done = subprocess.run(
            command,
            cwd=place,
            env=_other_environment(place),
            umask=0o022 if _umask() == 0o077 else 0o077,
            capture_output=True,
            check=False,
        )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()
        raise ImageError(
            f"the second build failed: {last[0] if last else f'status {done.returncode}'}",
            place="--check-repro",
        )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _other_environment(place: Path) -> dict[str, str]:
    """Return this environment with everything that must not matter changed."""
    ours = os.environ
    package = str(Path(__file__).parents[2])
    return {
        **ours,
        "HOME": str(place),
        "XDG_CACHE_HOME": str(place / "cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, (package, ours.get("PYTHONPATH")))),
        "PYTHONHASHSEED": "4711" if ours.get("PYTHONHASHSEED") != "4711" else "1",
        "TZ": "Pacific/Chatham" if ours.get("TZ") != "Pacific/Chatham" else "UTC",
        "LANG": "C",
        "LC_ALL": "C" if ours.get("LC_ALL") != "C" else "C.UTF-8",
    }


def _umask() -> int:
    """Return this process's umask, which only setting one tells."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _difference(first: tuple[PlannedFile, ...], again: dict[str, Any], digest: str) -> ImageError:
    second = tuple(PlannedFile(**item) for item in again["files"])
    digests = f"the first build gives {digest}, the second {again['manifest']}"
    hint = "please report it with `ralbuild doctor`; a file that changes during the build looks the same"
    for was, now in zip(first, second, strict=False):
        if was != now:
            where = f"{was.path} in the layer {was.layer!r}"
            if was.path != now.path:
                where += f" ({now.path} in the second)"
            what = f"the build is not reproducible, first in {where}: {was.sha256[:12]} and {now.sha256[:12]}"
            return ImageError(f"{what}; {digests}", place="--check-repro", hint=hint)
    what = (
        "no file differs, but the image's settings do" if len(first) == len(second) else "a file is missing"
    )
    return ImageError(f"the build is not reproducible: {what}; {digests}", place="--check-repro", hint=hint)
