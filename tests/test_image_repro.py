"""`ralbuild image --check-repro`: passes where the build depends on its inputs only, else names a file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from supply_cases import ralbuild, write_inputs

from ralbuild.cli.repro import check_reproducible
from ralbuild.errors import ImageError
from ralbuild.image.assemble import assemble_image
from ralbuild.image.bases import LayoutBase
from ralbuild.image.plan import FileEntry, ImagePlan
from ralbuild.pipeline.building import plan_only
from ralbuild.pipeline.request import BuildRequest
from ralbuild.report import Report, make_report


@pytest.fixture
def quiet() -> Report:
    return make_report("plain", quiet=True)


def test_a_build_passes_and_prints_its_digest_alone(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    done = ralbuild("image", "--model", "model", "--base", "oci:base", "--check-repro", cwd=tmp_path)
    assert done.code == 0, done.err
    assert (done.out.startswith("sha256:"), done.out.count("\n")) == (True, 1)
    assert "built twice" in done.err
    assert (tmp_path / "ral-image/index.json").exists()


def tampered(plan: ImagePlan, layer: str, name: str) -> ImagePlan:
    def change(entry: object) -> object:
        return (
            replace(entry, source=b"other") if isinstance(entry, FileEntry) and entry.path == name else entry
        )

    layers = [
        replace(item, entries=tuple(change(entry) for entry in item.entries)) if item.name == layer else item
        for item in plan.layers
    ]
    return replace(plan, layers=tuple(layers))


def test_the_first_file_that_differs_is_named(
    tmp_path: Path, quiet: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first build is made to hold other bytes in one file, as a leak of its surroundings would."""
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    request = BuildRequest(Path("model"), Path("ral-config.yaml"), base=LayoutBase(Path("base")))
    plan = plan_only(request, (), quiet).plan
    name = "opt/ral/app/ralbuild/contract/codec.py"
    odd = tampered(plan, "launcher", name)
    with pytest.raises(ImageError, match=rf"first in {name} in the layer 'launcher'"):
        check_reproducible(request, odd, assemble_image(odd), quiet)
    dated = replace(plan, created=1)
    with pytest.raises(ImageError, match="no file differs, but the image's settings do"):
        check_reproducible(request, dated, assemble_image(dated), quiet)
    Path("ral-config.yaml").write_text("version: 1\n")
    with pytest.raises(ImageError, match="the second build failed"):
        check_reproducible(request, plan, assemble_image(plan), quiet)
    assert not [name for name in os.listdir(tmp_path) if "repro" in name]
