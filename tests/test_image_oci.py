"""The JSON of an image, against the rules of the OCI image specification and what Docker does."""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from image_cases import CONFIG, make_plan, rules_layer

from ralbuild.errors import ImageError
from ralbuild.image.assemble import Image, assemble_image
from ralbuild.image.oci import index_entry, index_json, timestamp
from ralbuild.image.plan import BaseImage, BaseLayer, FileEntry, ImageConfig, ImagePlan, LayerPlan


@pytest.fixture
def plan(tmp_path: Path) -> ImagePlan:
    return make_plan(tmp_path / "model")


def make_base(folder: Path, config: dict[str, Any] | None = None, count: int = 1, **more: Any) -> BaseImage:
    layers = []
    for number in range(count):
        blob = folder / f"blob{number}"
        blob.write_bytes(b"blob %d" % number)
        digest = f"sha256:{hashlib.sha256(blob.read_bytes()).hexdigest()}"
        media_type = "application/vnd.oci.image.layer.v1.tar+gzip"
        diff_id = f"sha256:{number:064x}"
        layers.append(BaseLayer(media_type, digest, blob.stat().st_size, diff_id, blob))
    value = {"architecture": "amd64", "os": "linux", "config": config or {}, **more}
    return BaseImage(f"sha256:{'b' * 64}", "team/base:1", value, tuple(layers))


def config_of(image: Image) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(image.config)
    return value


def run_config(base: BaseImage | None, config: ImageConfig) -> dict[str, Any]:
    value: dict[str, Any] = config_of(assemble_image(ImagePlan(base, (rules_layer(),), config)))["config"]
    return value


def test_an_image_says_how_it_runs(plan: ImagePlan) -> None:
    config = config_of(assemble_image(plan))
    assert (config["architecture"], config["os"]) == ("amd64", "linux")
    assert config["config"] == {
        "Env": ["PATH=/usr/bin", "RAL_MODEL=demo"],
        "Entrypoint": ["/opt/ral/entrypoint.sh"],
        "User": "65532",
        "WorkingDir": "/opt/ral",
        "ExposedPorts": {"8000/tcp": {}},
        "StopSignal": "SIGTERM",
        "Labels": {
            "io.ralbuild.model": "demo",
            "io.ralbuild.packing": "v1",
            "org.opencontainers.image.title": "modèle",
        },
    }


def test_every_layer_has_a_diff_id_and_a_history_entry(plan: ImagePlan) -> None:
    image = assemble_image(plan)
    config = config_of(image)
    assert config["rootfs"]["type"] == "layers"
    assert config["rootfs"]["diff_ids"] == [layer.descriptor.digest for layer in image.layers]
    assert [entry["created_by"] for entry in config["history"]] == [
        f"ralbuild: {layer.name}" for layer in plan.layers
    ]


def test_the_manifest_names_config_and_layers_by_what_they_are(plan: ImagePlan) -> None:
    image = assemble_image(plan)
    manifest = json.loads(image.manifest)
    assert manifest["schemaVersion"] == 2
    assert manifest["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    assert manifest["config"] == {
        "mediaType": "application/vnd.oci.image.config.v1+json",
        "digest": f"sha256:{hashlib.sha256(image.config).hexdigest()}",
        "size": len(image.config),
    }
    assert {layer["mediaType"] for layer in manifest["layers"]} == {"application/vnd.oci.image.layer.v1.tar"}
    assert [layer["size"] for layer in manifest["layers"]] == [layer.recipe.size for layer in image.layers]
    assert image.digest == f"sha256:{hashlib.sha256(image.manifest).hexdigest()}"


def test_the_json_is_canonical(plan: ImagePlan) -> None:
    image = assemble_image(plan)
    for data in (image.config, image.manifest, index_json([index_entry(image.manifest, "amd64", "")], {})):
        value = json.loads(data)
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        assert data == text.encode()


@pytest.mark.parametrize("seconds", [0, 1_700_000_000])
def test_created_is_the_plans_and_moves_no_layer(plan: ImagePlan, seconds: int) -> None:
    image = assemble_image(dataclasses.replace(plan, created=seconds))
    config = config_of(image)
    expected = dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=seconds)
    assert config["created"] == expected.isoformat().replace("+00:00", "Z") == timestamp(seconds)
    assert {entry["created"] for entry in config["history"]} == {config["created"]}
    manifest = json.loads(image.manifest)
    assert manifest["annotations"] == {"org.opencontainers.image.created": config["created"]}
    assert [layer.digest for layer in image.layers] == [layer.digest for layer in assemble_image(plan).layers]


# On a base


def test_a_bases_layers_and_history_stay_and_ours_follow(tmp_path: Path) -> None:
    history = [
        {"created": "2024-05-06T07:08:09.123Z", "created_by": "ADD rootfs", "author": "them"},
        {"created_by": "ENV A=1", "empty_layer": True},
        {"created_by": "RUN things"},
    ]
    base = make_base(tmp_path, count=2, history=history)
    image = assemble_image(ImagePlan(base, (rules_layer(),), CONFIG))
    config = config_of(image)
    assert config["history"][:3] == history
    assert sum(not entry.get("empty_layer", False) for entry in config["history"]) == len(image.layers) == 3
    assert config["rootfs"]["diff_ids"][:2] == [layer.diff_id for layer in base.layers]
    layers = json.loads(image.manifest)["layers"]
    assert [layer["digest"] for layer in layers[:2]] == [layer.digest for layer in base.layers]
    assert layers[0]["mediaType"] == "application/vnd.oci.image.layer.v1.tar+gzip"


@pytest.mark.parametrize("history", [None, [], [{"created_by": "one of two"}]])
def test_a_base_whose_history_does_not_fit_gets_one_line_a_layer(tmp_path: Path, history: Any) -> None:
    base = make_base(tmp_path, count=2, history=history)
    assert len(config_of(assemble_image(ImagePlan(base, (rules_layer(),), CONFIG)))["history"]) == 3


def test_the_base_is_named_by_digest(tmp_path: Path) -> None:
    image = assemble_image(ImagePlan(make_base(tmp_path), (rules_layer(),), CONFIG))
    annotations = json.loads(image.manifest)["annotations"]
    assert annotations["org.opencontainers.image.base.digest"] == f"sha256:{'b' * 64}"
    assert annotations["org.opencontainers.image.base.name"] == "team/base:1"


def test_env_keeps_the_bases_order_and_replaces_in_place(tmp_path: Path) -> None:
    base = make_base(tmp_path, {"Env": ["PATH=/bin", "LANG=C", "X=a=b"]})
    config = ImageConfig(env=(("NEW", "1"), ("LANG", "C.UTF-8")))
    assert run_config(base, config)["Env"] == ["PATH=/bin", "LANG=C.UTF-8", "X=a=b", "NEW=1"]


def test_a_new_entrypoint_clears_the_bases_command(tmp_path: Path) -> None:
    base = make_base(tmp_path, {"Entrypoint": ["/init"], "Cmd": ["bash"]})
    kept = run_config(base, ImageConfig())
    assert (kept["Entrypoint"], kept["Cmd"]) == (["/init"], ["bash"])
    ours = run_config(base, ImageConfig(entrypoint=("/run",)))
    assert ours["Entrypoint"] == ["/run"]
    assert "Cmd" not in ours
    assert run_config(base, ImageConfig(entrypoint=("/run",), cmd=("-v",)))["Cmd"] == ["-v"]


def test_what_the_plan_does_not_say_is_the_bases(tmp_path: Path) -> None:
    settings = {"User": "1000", "WorkingDir": "/w", "Volumes": {"/data": {}}, "ExposedPorts": {"80/tcp": {}}}
    base = make_base(tmp_path, {**settings, "Labels": {"io.ralbuild.base.python": "3.11", "a": "base"}})
    out = run_config(base, ImageConfig(ports=(8000,), labels={"a": "ours"}))
    assert (out["User"], out["WorkingDir"], out["Volumes"]) == ("1000", "/w", {"/data": {}})
    assert out["ExposedPorts"] == {"80/tcp": {}, "8000/tcp": {}}
    assert out["Labels"] == {"io.ralbuild.base.python": "3.11", "a": "ours", "io.ralbuild.packing": "v1"}


def test_a_bases_health_check_and_triggers_are_dropped(tmp_path: Path) -> None:
    base = make_base(tmp_path, {"Healthcheck": {"Test": ["CMD", "curl"]}, "OnBuild": ["RUN x"]})
    assert not {"Healthcheck", "OnBuild"} & set(run_config(base, ImageConfig()))


@pytest.mark.parametrize(("key", "value"), [("architecture", "arm64"), ("os", "windows")])
def test_a_base_for_another_platform_is_refused(tmp_path: Path, key: str, value: str) -> None:
    base = make_base(tmp_path)
    other = dataclasses.replace(base, config={**base.config, key: value})
    with pytest.raises(ImageError, match="the base is for"):
        assemble_image(ImagePlan(other, (), CONFIG))


def test_more_layers_than_docker_takes_are_refused() -> None:
    layers = tuple(LayerPlan(f"{n}", "small", (FileEntry(f"f{n}", b""),)) for n in range(126))
    assemble_image(ImagePlan(None, layers[:125], CONFIG))
    with pytest.raises(ImageError, match="126 layers"):
        assemble_image(ImagePlan(None, layers, CONFIG))


def test_a_manifest_that_no_registry_takes_is_refused() -> None:
    plan = ImagePlan(None, (), CONFIG, annotations={"x": "y" * (4 << 20)})
    with pytest.raises(ImageError, match="a registry takes 4194304"):
        assemble_image(plan)


def test_index_entries_are_ordered_by_name_whatever_order_they_came_in() -> None:
    entries = [index_entry(b"%d" % n, "amd64", tag) for n, tag in enumerate(("b:1", "", "a:2", "a:1"))]
    assert index_json(entries, {}) == index_json(entries[::-1], {})
    names = [
        entry.get("annotations", {}).get("org.opencontainers.image.ref.name")
        for entry in json.loads(index_json(entries, {}))["manifests"]
    ]
    assert names == [None, "a:1", "a:2", "b:1"]
