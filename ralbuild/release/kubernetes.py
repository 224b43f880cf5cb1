"""Kubernetes manifests for one image: sized from its labels, in a kustomize layout with environments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ralbuild.errors import UsageError
from ralbuild.release.preflight import host_needs_of, ready_budget
from ralbuild.release.references import require_digest
from ralbuild.release.runtime_rules import MOUNTED, rules_env
from ralbuild.render import RenderedFile, render_text

STRATEGIES = ("service-switch", "rollout", "recreate")
ENVIRONMENTS = ("staging", "production")
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?\Z")
_MAP_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?\Z")


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is deployed, and how.

    Attributes:
        app: name of every object.
        image: by digest.
        labels: of the image.
        strategy: one of `STRATEGIES`.
        replicas, most: pods at least and, with autoscaling, at most; equal means no autoscaler.
        gpus: GPUs of a pod.
        drain_seconds: how long running requests may take when a pod ends.
        pressure: requests per slot that the autoscaler aims at.
        probe_image: image that holds ``ralbuild``, by digest; for ``rollout``.
        weights_image: image volume for the weights, by digest; empty when they are in ``image``.
        nodes: nodes that the image is brought to before a release; 0 writes no such job.
        rules_map: ConfigMap with ``rules.json`` and ``key.pem`` of the serving side; empty for none.
        rules_least: smallest serial that those rules may have when a pod starts.
    """

    app: str
    image: str
    labels: Mapping[str, str]
    strategy: str = "service-switch"
    replicas: int = 1
    most: int = 1
    gpus: int = 0
    drain_seconds: int = 300
    pressure: str = "0.8"
    probe_image: str = ""
    weights_image: str = ""
    nodes: int = 0
    rules_map: str = ""
    rules_least: int = 0


def parse_autoscale(text: str) -> tuple[int, str]:
    """Return the most pods and the target of ``MAX`` or ``MAX,target=0.8``.

    Raises:
        UsageError: also for ``weight``, which an autoscaler does not have.
    """
    most, *rest = text.split(",")
    target = "0.8"
    for part in rest:
        key, _, value = part.partition("=")
        if key == "weight":
            raise UsageError(
                "an autoscaler's metrics have no weight: it takes the largest answer of all of them",
                place="--autoscale",
                hint="weights belong into the recording rule ralbuild_pressure of prometheusrule.yaml",
            )
        if key != "target" or not re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,3})?", value) or not float(value):
            raise UsageError(f"needs MAX,target=NUMBER, found {part!r}", place="--autoscale")
        target = value
    if not most.isascii() or not most.isdecimal() or not 1 <= int(most) <= 10_000:
        raise UsageError(f"needs a number of pods, found {most!r}", place="--autoscale")
    return int(most), target


def render_kubernetes(wanted: Deployment) -> list[RenderedFile]:
    """Return the files of ``base/`` and of one folder per environment.

    Raises:
        UsageError: for a name or an image that Kubernetes would refuse, or a missing probe image.
    """
    _check(wanted)
    values = _values(wanted)
    files = dict(_workloads(wanted, values))
    files["service.yaml"] = _render("service", values, name=wanted.app, colour=_service_colour(wanted))
    if wanted.replicas > 1:
        files["pdb.yaml"] = _render("pdb", values)
    files["servicemonitor.yaml"] = _render("servicemonitor", values)
    files["prometheusrule.yaml"] = _render("prometheusrule", values)
    if wanted.nodes:
        files["prepull.yaml"] = _render("prepull", values, nodes=wanted.nodes)
    names = sorted(files)
    files["kustomization.yaml"] = _kustomization(names)
    rendered = [RenderedFile(f"base/{name}", data) for name, data in sorted(files.items())]
    for environment in ENVIRONMENTS:
        replicas = [] if wanted.most > wanted.replicas else _replicas(wanted, environment)
        data = _kustomization(["../../base"], namespace=f"{wanted.app}-{environment}", replicas=replicas)
        rendered.append(RenderedFile(f"environments/{environment}/kustomization.yaml", data))
    return rendered


def _workloads(wanted: Deployment, values: dict[str, Any]) -> list[tuple[str, bytes]]:
    """One Rollout, one Deployment, or one Deployment per colour; each with its autoscaler."""
    if wanted.strategy == "rollout":
        kind, api = "Rollout", "argoproj.io/v1alpha1"
        pods = [("rollout", wanted.app, "", wanted.replicas)]
    elif wanted.strategy == "recreate":
        kind, api = "Deployment", "apps/v1"
        pods = [("deployment", wanted.app, "", wanted.replicas)]
    else:
        kind, api = "Deployment", "apps/v1"
        pods = [
            ("deployment-blue", f"{wanted.app}-blue", "blue", wanted.replicas),
            ("deployment-green", f"{wanted.app}-green", "green", 0),
        ]
    out = []
    for file, name, colour, replicas in pods:
        own = {"name": name, "colour": colour, "replicas": replicas, "kind": kind, "api": api}
        out.append((f"{file}.yaml", _render("workload", values, **own)))
        # A colour that is off has no autoscaler: it would start it.
        if wanted.most > wanted.replicas and replicas:
            hpa = {**own, "most": wanted.most, "target": wanted.pressure}
            out.append(("hpa.yaml", _render("hpa", values, **hpa)))
    if wanted.strategy == "rollout":
        preview = f"{wanted.app}-preview"
        out.append(("service-preview.yaml", _render("service", values, name=preview, colour="")))
        for stage, count, service in (("gate", 1, preview), ("watch", 6, wanted.app)):
            own = {"stage": stage, "count": count, "service": service, "probe_image": wanted.probe_image}
            out.append((f"analysis-{stage}.yaml", _render("analysis", values, **own)))
    return out


def _values(wanted: Deployment) -> dict[str, Any]:
    needs = host_needs_of(wanted.labels) >> 20
    return {
        "app": wanted.app,
        "image": wanted.image,
        "bundle": wanted.labels["io.ralbuild.bundle"],
        "start_seconds": ready_budget(wanted.labels),
        "drain_seconds": wanted.drain_seconds,
        # Keys and values come on top of the weights; the runtime takes what the limit leaves.
        "memory": needs * 3 // 2,
        "cpus": 2,
        "gpus": wanted.gpus,
        "surge": wanted.replicas > 1,
        "weights_image": wanted.weights_image,
        "rules_map": wanted.rules_map,
        "rules_folder": MOUNTED,
        "rules_env": rules_env(wanted.rules_least) if wanted.rules_map else {},
    }


def _service_colour(wanted: Deployment) -> str:
    return "blue" if wanted.strategy == "service-switch" else ""


def _replicas(wanted: Deployment, environment: str) -> list[tuple[str, int]]:
    if wanted.strategy == "rollout":  # kustomize changes replicas of built-in kinds only
        return []
    name = wanted.app if wanted.strategy == "recreate" else f"{wanted.app}-blue"
    return [(name, 1 if environment == "staging" else wanted.replicas)]


def _kustomization(
    resources: list[str], namespace: str = "", replicas: list[tuple[str, int]] | None = None
) -> bytes:
    values = {"resources": resources, "namespace": namespace, "replicas": replicas or []}
    return render_text("kubernetes/kustomization.yaml.j2", values)


def _render(template: str, values: Mapping[str, Any], **own: Any) -> bytes:
    return render_text(f"kubernetes/{template}.yaml.j2", {**values, **own})


def _check(wanted: Deployment) -> None:
    if not _NAME.match(wanted.app):
        hint = "lower-case letters, digits and -, at most 47"
        raise UsageError(f"{wanted.app!r} is no name for objects of Kubernetes", place="--name", hint=hint)
    if wanted.rules_map and not _MAP_NAME.match(wanted.rules_map):
        raise UsageError(f"{wanted.rules_map!r} is no name of a ConfigMap", place="--rules-configmap")
    images = {
        "--image": wanted.image,
        "--probe-image": wanted.probe_image,
        "--weights-image": wanted.weights_image,
    }
    for option, image in images.items():
        if image or option == "--image":
            require_digest(image, option)
    if wanted.strategy == "rollout" and not wanted.probe_image:
        hint = "an image with `ralbuild` in it, by digest: the gate runs `ralbuild probe`"
        raise UsageError("a rollout needs an image for its gate", place="--probe-image", hint=hint)
