"""`ralbuild render`: a build context, or files for whoever runs the image."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ralbuild.cli.options import (
    add_base_option,
    add_build_options,
    add_report_options,
    add_rules_folder_options,
    build_request,
    chosen_base,
    chosen_report,
    least_serial,
)
from ralbuild.errors import HostError, ImageError, UsageError

if TYPE_CHECKING:
    from ralbuild.render import RenderedFile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_build_options(parser, model_required=False)
    add_base_option(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder for the files")
    what = parser.add_argument_group("instead of a build context")
    what.add_argument("--kubernetes", action="store_true", help="manifests in a kustomize layout")
    what.add_argument("--compose", action="store_true", help="a Compose file with two colours")
    what.add_argument("--ci", choices=("github", "gitlab"), help="a pipeline from verify to release")
    what.add_argument("--probes", default="probes.yaml", metavar="FILE", help="for --ci: the gate's probes")
    what.add_argument(
        "--from", dest="layout", metavar="oci:DIR", help="the image whose labels give the sizes"
    )
    what.add_argument("--tag", default="", help="which image of a layout")
    what.add_argument(
        "--image", default="", metavar="NAME@sha256:DIGEST", help="how it is found; no digest for --ci"
    )
    what.add_argument("--name", default="model-server", help="name of every object; default: model-server")
    what.add_argument(
        "--strategy",
        choices=("service-switch", "rollout", "recreate"),
        default="service-switch",
        help="two Deployments and one Service, Argo Rollouts, or one at a time",
    )
    what.add_argument("--replicas", type=int, default=1, help="pods; default: 1")
    what.add_argument("--autoscale", metavar="MAX[,target=0.8]", help="an autoscaler on requests per slot")
    what.add_argument("--gpus", type=int, default=0, help="GPUs of a pod")
    what.add_argument("--drain", type=int, default=300, metavar="SECONDS", help="for running requests")
    what.add_argument(
        "--probe-image", default="", metavar="NAME@sha256:DIGEST", help="holds ralbuild, for a gate"
    )
    what.add_argument(
        "--weights-image", default="", metavar="NAME@sha256:DIGEST", help="image volume for /models"
    )
    what.add_argument(
        "--rules-configmap", default="", metavar="NAME", help="ConfigMap with rules.json and key.pem"
    )
    add_rules_folder_options(what)
    what.add_argument("--proxy-image", default="", metavar="NAME@sha256:DIGEST", help="HAProxy, for Compose")
    what.add_argument(
        "--prepull", type=int, default=0, metavar="NODES", help="bring the image to so many nodes first"
    )
    add_report_options(parser)


def run(options: argparse.Namespace) -> int:
    """Write the files; the path of the main one goes to standard output."""
    if sum((options.kubernetes, options.compose, options.ci is not None)) > 1:
        raise UsageError("one of --kubernetes, --compose and --ci at a time", place="render")
    if options.kubernetes:
        return _deliver(_kubernetes(options), options.out, "base/kustomization.yaml")
    if options.compose:
        return _deliver(_compose(options), options.out, "compose.yaml")
    if options.ci is not None:
        files = _pipeline(options)
        return _deliver(files, options.out, files[0].path)
    if options.model is None:
        raise UsageError("a build context needs --model", place="render")
    from ralbuild.pipeline.building import render_context

    request = build_request(options, base=chosen_base(options))
    print(render_context(request, options.out, chosen_report(options)) / "Dockerfile")
    return 0


def _kubernetes(options: argparse.Namespace) -> list[RenderedFile]:
    from ralbuild.release.kubernetes import Deployment, parse_autoscale, render_kubernetes

    replicas = _count(options.replicas, "--replicas", 1)
    most, pressure = parse_autoscale(options.autoscale) if options.autoscale else (replicas, "0.8")
    labels = _labels(options)
    return render_kubernetes(
        Deployment(
            options.name,
            options.image,
            labels,
            options.strategy,
            replicas,
            most,
            _count(options.gpus, "--gpus", 0),
            _count(options.drain, "--drain", 0),
            pressure,
            options.probe_image,
            _weights_image(options, labels),
            _count(options.prepull, "--prepull", 0),
            options.rules_configmap,
            least_serial(options),
        )
    )


def _weights_image(options: argparse.Namespace, labels: dict[str, str]) -> str:
    """Return the image to mount at /models: the one that the label names, in the image's own repository."""
    from ralbuild.image.plan import WEIGHTS_LABEL

    needed = labels.get(WEIGHTS_LABEL, "")
    given: str = options.weights_image
    if not needed:
        return given
    if given and not given.endswith(f"@{needed}"):
        hint = f"name it by the digest that the image was built with: {needed}"
        raise UsageError("is not the image of these weights", place="--weights-image", hint=hint)
    return given or f"{options.image.partition('@')[0]}@{needed}"


def _compose(options: argparse.Namespace) -> list[RenderedFile]:
    from ralbuild.release.compose import render_compose
    from ralbuild.release.site import default_settings

    settings = default_settings(drain_seconds=_count(options.drain, "--drain", 0))
    gpus = _count(options.gpus, "--gpus", 0)
    return render_compose(
        options.name,
        options.image,
        options.proxy_image,
        _labels(options),
        settings,
        gpus,
        rules_folder=options.rules_folder,
        rules_least=least_serial(options),
    )


def _pipeline(options: argparse.Namespace) -> list[RenderedFile]:
    from ralbuild.release.pipelines import Pipeline, render_pipeline

    model = str(options.model) if options.model is not None else "weights"
    wanted = Pipeline(options.image, model, str(options.config), options.probes)
    return render_pipeline(options.ci, wanted)


def _labels(options: argparse.Namespace) -> dict[str, str]:
    from ralbuild.image.reader import open_image

    if not options.layout:
        hint = "give the image that you built: --from oci:DIR"
        raise UsageError("the sizes come from the labels of an image", place="--from", hint=hint)
    path = Path(options.layout.removeprefix("oci:").removeprefix("archive:"))
    with open_image(path, options.tag) as image:
        labels = dict(image.labels)
    if "io.ralbuild.bundle" not in labels:
        raise ImageError(
            "has no label io.ralbuild.bundle", place=str(path), hint="is it an image of ralbuild?"
        )
    return labels


def _count(value: int, name: str, least: int) -> int:
    if not least <= value <= 86400:
        raise UsageError(f"needs {least} to 86400, found {value}", place=name)
    return value


def _deliver(files: list[RenderedFile], out: Path, main: str) -> int:
    """Write all files into a new folder, or none."""
    import shutil
    import tempfile

    if out.exists():
        raise UsageError("is there already", place=str(out), hint="name a new folder, or remove it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            for file in files:
                path = partial / file.path
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.data)
            partial.chmod(0o755)
            partial.rename(out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise HostError(f"cannot be written: {error.strerror}", place=str(out)) from None
    print(out / main)
    return 0
