"""Complete pipelines for GitHub and GitLab: verify, compile, image, push, release, probe."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ralbuild import __version__
from ralbuild.errors import UsageError
from ralbuild.pins import load_pins
from ralbuild.render import RenderedFile, render_text

KINDS = ("github", "gitlab")
ENVIRONMENTS = (("staging", "build"), ("production", "staging"))
"""Each environment, and the job that must have passed before it."""
_REPOSITORY = re.compile(r"[a-z0-9][a-z0-9.-]*(:[0-9]{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+\Z")
_PATH = re.compile(r"[A-Za-z0-9._][A-Za-z0-9._/-]{0,200}\Z")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What a pipeline builds.

    Attributes:
        image: repository in a registry, without tag and digest.
        model, config, probes: paths in the checkout, or absolute ones on the runner.
        runner: label of the runner that has the model.
    """

    image: str
    model: str
    config: str
    probes: str
    runner: str = "self-hosted"


def render_pipeline(kind: str, wanted: Pipeline) -> list[RenderedFile]:
    """Return the pipeline's file, at the path where its host looks for it.

    Raises:
        UsageError: for an image with a tag or digest, or a path that would need quoting in a shell.
    """
    if not _REPOSITORY.match(wanted.image):
        hint = "such as registry.example/models/chat: the pipeline adds the digest"
        raise UsageError(f"{wanted.image!r} is no repository of a registry", place="--image", hint=hint)
    paths = {"--model": wanted.model, "--config": wanted.config, "--probes": wanted.probes}
    for option, path in paths.items():
        if not _PATH.match(path.removeprefix("/")):
            raise UsageError(f"{path!r} needs quoting in a shell", place=option, hint="use a plain path")
    actions = load_pins().actions
    values = {
        "image": wanted.image,
        "model": wanted.model,
        "config": wanted.config,
        "probes": wanted.probes,
        "runner": wanted.runner,
        "version": __version__,
        "environments": ENVIRONMENTS,
        "actions": {name: item.ref for name, item in actions.items()},
        "versions": {name: item.version for name, item in actions.items()},
    }
    name = ".github/workflows/model-image.yaml" if kind == "github" else ".gitlab-ci.yml"
    return [RenderedFile(name, render_text(f"ci/{kind}.yaml.j2", values))]
