"""`image --weights volume`: the weights in an image of their own, and `--modelpack`: a second manifest over them."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import kubernetes_validate
import modelpack_schema
import pytest
import yaml
from registry_server import FakeRegistry, serve
from supply_cases import Work, blob, build, index, make_key, ralbuild, write_inputs, write_small_base

from ralbuild.image.local_run import prepare_tree
from ralbuild.image.modelpack import parameter_size

NAME = "team/tiny:1"
LABEL = "io.ralbuild.weights.image"
OTHER_RULES = "postprocessing: {output_transformers: [{name: html_enhancer, config: {bold_terms: [risk]}}]}\n"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    root = tmp_path_factory.mktemp("volume")
    write_inputs(root)
    make_key(root)
    return Work(root, build(root, "--weights", "volume", "--modelpack", "--sign", "sign.key"))


@pytest.fixture
def root(work: Work, tmp_path: Path) -> Path:
    shutil.copytree(work.root, tmp_path / "w")
    return tmp_path / "w"


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with serve() as registry:
        yield registry


def named(layout: Path, name: str) -> dict:
    (entry,) = [
        entry
        for entry in index(layout)
        if entry.get("annotations", {}).get("org.opencontainers.image.ref.name") == name
    ]
    return entry


def manifest(layout: Path, name: str) -> dict:
    return json.loads(blob(layout, named(layout, name)["digest"]))


def layer_digests(layout: Path, name: str) -> list[str]:
    return [layer["digest"] for layer in manifest(layout, name)["layers"]]


def labels(layout: Path, name: str = NAME) -> dict[str, str]:
    config = json.loads(blob(layout, manifest(layout, name)["config"]["digest"]))
    return config["config"]["Labels"]


def test_the_server_image_is_small_and_names_the_image_of_the_weights(work: Work) -> None:
    assert labels(work.layout)[LABEL] == named(work.layout, f"{NAME}-weights")["digest"]
    kinds = [
        layer["annotations"]["io.ralbuild.layer.kind"] for layer in manifest(work.layout, NAME)["layers"]
    ]
    assert "weights" not in kinds
    assert work.digest == named(work.layout, NAME)["digest"]


def test_skopeo_reads_both_and_the_weights_lie_below_models(work: Work, tmp_path: Path) -> None:
    copied = [
        "skopeo",
        "copy",
        "--preserve-digests",
        f"oci:{work.layout}:{NAME}-weights",
        f"dir:{tmp_path / 'd'}",
    ]
    subprocess.run(copied, check=True, capture_output=True)
    found = {}
    for layer in json.loads((tmp_path / "d/manifest.json").read_bytes())["layers"]:
        with tarfile.open(tmp_path / "d" / layer["digest"][7:]) as tar:
            found |= {item.name: tar.extractfile(item).read() for item in tar if item.isfile()}
    shipped = {path for path in (work.root / "model").iterdir() if path.name != "README.md"}
    assert found == {f"models/{path.name}": path.read_bytes() for path in shipped}
    copied[3] = f"oci:{work.layout}:{NAME}"
    subprocess.run(copied, check=True, capture_output=True)


def test_no_rule_date_or_name_changes_the_image_of_the_weights(root: Path) -> None:
    before, old = named(root / "out", f"{NAME}-weights"), named(root / "out", NAME)
    (root / "ral-config.yaml").write_text(
        (root / "ral-config.yaml").read_text().replace("model: tiny", "model: other") + OTHER_RULES
    )
    build(root, "--weights", "volume", env={"SOURCE_DATE_EPOCH": "1700000000"})
    assert named(root / "out", f"{NAME}-weights") == before
    assert named(root / "out", NAME) != old


def test_other_weights_take_the_place_of_the_old_ones(root: Path) -> None:
    old = layer_digests(root / "out", f"{NAME}-weights")
    (root / "model/generation_config.json").write_text('{"eos_token_id": [2]}')
    build(root, "--weights", "volume")
    new = layer_digests(root / "out", f"{NAME}-weights")
    assert labels(root / "out")[LABEL] == named(root / "out", f"{NAME}-weights")["digest"]
    assert new[:2] == old[:2]
    assert not (root / "out/blobs/sha256" / old[2][7:]).exists()


def test_weights_in_the_image_are_the_same_blobs_and_leave_nothing_of_the_old_pair(root: Path) -> None:
    apart = layer_digests(root / "out", f"{NAME}-weights")
    build(root)
    assert set(apart) < set(layer_digests(root / "out", NAME))
    names = {
        entry.get("annotations", {}).get("org.opencontainers.image.ref.name") for entry in index(root / "out")
    }
    assert names == {NAME}


def test_an_archive_holds_the_pair_and_skopeo_and_docker_s_form_read_it(work: Work, tmp_path: Path) -> None:
    archive = tmp_path / "pair.tar"
    done = ralbuild(
        "image", "--model", "model", "--base", "oci:base", "--weights", "volume", "--modelpack", "--tag", NAME,
        "--output", f"archive:{archive}", "--sign", "sign.key", "--quiet", cwd=work.root,
    )  # fmt: skip
    assert (done.code, done.out.strip()) == (0, work.digest), done.err
    for name, wanted in (
        (NAME, work.digest),
        (f"{NAME}-weights", named(work.layout, f"{NAME}-weights")["digest"]),
    ):
        copy = [
            "skopeo",
            "copy",
            "--preserve-digests",
            f"oci-archive:{archive}:{name}",
            f"dir:{tmp_path / 'd'}",
        ]
        subprocess.run(copy, check=True, capture_output=True)
        assert f"sha256:{hashlib.sha256((tmp_path / 'd/manifest.json').read_bytes()).hexdigest()}" == wanted
    for store in (f"docker-archive:{archive}:{NAME}", f"docker-archive:{archive}"):
        subprocess.run(["skopeo", "inspect", store], check=True, capture_output=True)
    words = ["verify-image", str(archive), "--tag", NAME, "--key", "sign.pub", "--quiet"]
    assert ralbuild(*words, cwd=work.root).code == 0


@pytest.mark.parametrize("output", ["docker"])
def test_an_output_for_one_image_is_refused(work: Work, output: str) -> None:
    done = ralbuild("image", "--model", "model", "--base", "oci:base", "--weights", "volume", "--output", output,
                    cwd=work.root)  # fmt: skip
    assert done.code == 2
    assert "a layout, an archive or a registry" in done.err


def test_an_image_without_a_name_is_found_beside_its_weights(root: Path) -> None:
    done = ralbuild(
        "image", "--model", "model", "--base", "oci:base", "--weights", "volume", "--quiet", cwd=root
    )
    assert done.code == 0, done.err
    assert named(root / "ral-image", "weights")
    assert (
        json.loads(ralbuild("inspect", "ral-image", "--json", cwd=root).out)["manifest"] == done.out.strip()
    )


def test_modelpack_is_what_its_specification_says(work: Work) -> None:
    pack = manifest(work.layout, f"{NAME}-modelpack")
    jsonschema.validate(pack, modelpack_schema.MANIFEST)
    config = json.loads(blob(work.layout, pack["config"]["digest"]))
    jsonschema.validate(config, modelpack_schema.CONFIG)
    assert [layer["digest"] for layer in pack["layers"]] == layer_digests(work.layout, f"{NAME}-weights")
    for layer, diff_id in zip(pack["layers"], config["modelfs"]["diffIds"], strict=True):
        data = blob(work.layout, layer["digest"])
        assert (len(data), f"sha256:{hashlib.sha256(data).hexdigest()}") == (layer["size"], diff_id)
    paths = [layer["annotations"]["org.cncf.model.filepath"] for layer in pack["layers"]]
    weights = [path.name for path in sorted((work.root / "model").glob("*.safetensors"))]
    assert paths == [*(f"models/{name}" for name in weights), "models"]
    assert config["descriptor"] == {"name": "tiny", "family": "llama", "licenses": ["Apache-2.0"]}
    assert named(work.layout, f"{NAME}-modelpack")["artifactType"] == pack["artifactType"]


def test_modelpack_of_an_image_with_its_weights_adds_no_blob_but_its_config(root: Path) -> None:
    build(root, output="plain")
    before = {path.name for path in (root / "plain/blobs/sha256").iterdir()}
    build(root, "--modelpack", output="plain")
    after = {path.name for path in (root / "plain/blobs/sha256").iterdir()}
    pack = named(root / "plain", f"{NAME}-modelpack")["digest"]
    assert after - before == {pack[7:], manifest(root / "plain", f"{NAME}-modelpack")["config"]["digest"][7:]}
    assert before <= after


@pytest.mark.parametrize(
    ("parameters", "text"),
    [(134_515_008, "134.5m"), (8_030_261_248, "8b"), (6_738_415_616, "6.7b"), (999, "1k"), (949, "949"),
     (999_950, "1m"), (405_853_388_800, "405.9b"), (0, "0"), (1_000_000_000_000, "1t")],
)  # fmt: skip
def test_parameters_are_counted_as_the_specification_counts(parameters: int, text: str) -> None:
    assert parameter_size(parameters) == text


def verified(root: Path) -> tuple[int, dict[str, dict]]:
    done = ralbuild("verify-image", "out", "--tag", NAME, "--key", "sign.pub", "--json", "--quiet", cwd=root)
    return done.code, {check["name"]: check for check in json.loads(done.out)["checks"]}


def test_verify_image_reads_the_weights_too(work: Work) -> None:
    code, checks = verified(work.root)
    assert code == 0, checks
    assert checks["weights image"]["detail"] == named(work.layout, f"{NAME}-weights")["digest"]
    assert checks["layer weights model-00001-of-00002.safetensors"]["good"]


@pytest.mark.parametrize("what", ["a flipped bit", "no manifest", "another model"])
def test_verify_image_refuses_other_weights(root: Path, what: str) -> None:
    entry = named(root / "out", f"{NAME}-weights")
    if what == "a flipped bit":
        path = root / "out/blobs/sha256" / layer_digests(root / "out", f"{NAME}-weights")[0][7:]
        data = bytearray(path.read_bytes())
        data[-2000] ^= 1
        path.write_bytes(data)
    else:
        path = root / "out/blobs/sha256" / entry["digest"][7:]
        path.unlink() if what == "no manifest" else path.write_bytes(
            path.read_bytes().replace(b"small", b"SMALL")
        )
    code, checks = verified(root)
    assert code == 6
    bad = [name for name, check in checks.items() if not check["good"]]
    assert bad
    assert all("weights" in name for name in bad)


def test_a_push_sends_the_weights_first_and_a_push_of_the_layout_the_same(
    root: Path, registry: FakeRegistry
) -> None:
    target = f"registry:{registry.host}/team/tiny:v1"
    done = ralbuild("image", "--model", "model", "--base", "oci:base", "--weights", "volume", "--modelpack",
                    "--output", target, "--quiet", cwd=root)  # fmt: skip
    assert done.code == 0, done.err
    puts = [
        item.path.rpartition("/")[2]
        for item in registry.seen
        if item.method == "PUT" and "/manifests/" in item.path
    ]
    assert puts == ["v1-weights", "v1-modelpack", "v1"]
    pushed = dict(registry.manifests)
    registry.manifests.clear()
    assert ralbuild("push", "oci:out", target, "--quiet", cwd=root).code == 0
    assert {key: value for key, value in registry.manifests.items() if "v1" in key[1]} == {
        key: value for key, value in pushed.items() if "v1" in key[1]
    }


def test_a_push_of_a_layout_without_the_weights_says_which_image_is_missing(
    root: Path, registry: FakeRegistry
) -> None:
    copied = [
        "skopeo",
        "copy",
        "--preserve-digests",
        f"oci:{root / 'out'}:{NAME}",
        f"oci:{root / 'half'}:{NAME}",
    ]
    subprocess.run(copied, check=True, capture_output=True)
    done = ralbuild("push", "oci:half", f"registry:{registry.host}/team/tiny:v1", cwd=root)
    assert done.code == 6
    assert named(root / "out", f"{NAME}-weights")["digest"] in done.err
    assert registry.manifests == {}


def test_run_puts_the_weights_where_an_image_volume_would(
    work: Work, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Quiet:
        def step(self, text: str) -> None: ...
        def note(self, text: str) -> None: ...
        def progress(self, done: int, total: int, unit: str) -> None: ...

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tree = prepare_tree(work.layout, Quiet(), NAME)
    for path in (work.root / "model").glob("*.safetensors"):
        assert (tree / "models" / path.name).read_bytes() == path.read_bytes()
    assert (tree / "opt/ral/entrypoint.sh").exists()
    assert prepare_tree(work.layout, Quiet(), NAME) == tree


def test_rebase_and_sign_keep_the_pair(root: Path) -> None:
    write_small_base(root / "patched", version="2025c-1", content=b"patched\n")
    fresh = build(root, "--weights", "volume", "--base", "oci:patched", output="fresh")
    before = named(root / "out", f"{NAME}-weights")
    done = ralbuild("rebase", "oci:out", "--base", "oci:patched", "--output", "oci:out", "--quiet", cwd=root)
    assert (done.code, done.out.strip()) == (0, fresh), done.err
    assert ralbuild("sign", "oci:out", "--key", "sign.key", "--quiet", cwd=root).code == 0
    assert named(root / "out", f"{NAME}-weights") == before
    assert verified(root)[0] == 0


def test_diff_counts_weights_once(root: Path) -> None:
    build(root, "--weights", "volume", output="two")
    (root / "model/generation_config.json").write_text('{"eos_token_id": [2]}')
    build(root, "--weights", "volume", output="three")
    same = json.loads(ralbuild("diff", "out", "two", "--old-tag", NAME, "--json", cwd=root).out)
    assert (same["same"], same["bytes"]["push"]) == (True, 0)
    found = json.loads(ralbuild("diff", "two", "three", "--json", cwd=root).out)
    new = [layer["name"] for layer in found["layers"] if layer["state"] == "new"]
    assert "tokenizer and configuration" in new
    assert not any(name.startswith("weights model") for name in new)
    total = sum(layer["size"] for layer in found["layers"] if layer["state"] != "gone")
    assert 0 < found["bytes"]["total"] - total < 20_000


def test_inspect_says_what_must_be_mounted(work: Work) -> None:
    digest = named(work.layout, f"{NAME}-weights")["digest"]
    text = ralbuild("inspect", "out", "--tag", NAME, cwd=work.root, env={"COLUMNS": "140"}).out
    assert f"mount /models of {digest} at /models, read-only" in text
    answer = json.loads(ralbuild("inspect", "out", "--tag", NAME, "--json", cwd=work.root).out)
    assert answer["weights_image"] == digest
    assert {"image of the weights", "ModelPack manifest"} <= {item["what"] for item in answer["artifacts"]}
    alone = ralbuild("inspect", "out", "--tag", f"{NAME}-weights", cwd=work.root)
    assert alone.code == 6
    assert "an image of weights alone" in alone.err


def test_kubernetes_mounts_the_image_that_the_label_names(work: Work, tmp_path: Path) -> None:
    words = [
        "render",
        "--kubernetes",
        "--from",
        "oci:out",
        "--tag",
        NAME,
        "--strategy",
        "recreate",
        "--prepull",
        "2",
    ]
    image = f"registry.example/team/tiny@{work.digest}"
    done = ralbuild(*words, "--image", image, "--out", tmp_path / "k8s", cwd=work.root)
    assert done.code == 0, done.err
    spec = yaml.safe_load((tmp_path / "k8s/base/deployment.yaml").read_text())["spec"]["template"]["spec"]
    digest = named(work.layout, f"{NAME}-weights")["digest"]
    (volume,) = [item for item in spec["volumes"] if item["name"] == "weights"]
    assert volume["image"]["reference"] == f"registry.example/team/tiny@{digest}"
    (mount,) = [item for item in spec["containers"][0]["volumeMounts"] if item["name"] == "weights"]
    assert mount == {"name": "weights", "mountPath": "/models", "subPath": "models", "readOnly": True}
    job = yaml.safe_load((tmp_path / "k8s/base/prepull.yaml").read_text())
    assert job["spec"]["template"]["spec"]["volumes"] == [volume]
    for document in (yaml.safe_load((tmp_path / "k8s/base/deployment.yaml").read_text()), job):
        kubernetes_validate.validate(document, "1.37", strict=True)
    other = f"registry.example/team/other@sha256:{'0' * 64}"
    done = ralbuild(
        *words, "--image", image, "--weights-image", other, "--out", tmp_path / "no", cwd=work.root
    )
    assert done.code == 2
    assert digest in done.err


def test_the_same_pair_comes_out_in_other_conditions(work: Work) -> None:
    done = ralbuild("image", "--model", "model", "--base", "oci:base", "--weights", "volume", "--modelpack",
                    "--check-repro", "--dry-run", cwd=work.root)  # fmt: skip
    assert done.code == 0, done.err
    assert "built twice" in done.err
    assert "beside it: weights" in done.out


def test_a_base_of_the_weights_lies_below_them_and_keeps_its_settings(root: Path) -> None:
    build(root, "--weights", "volume", "--weights-base", "oci:base", output="shell")
    base = json.loads(blob(root / "base", index(root / "base")[0]["digest"]))
    layers = layer_digests(root / "shell", f"{NAME}-weights")
    assert layers == [layer["digest"] for layer in base["layers"]] + layer_digests(
        root / "out", f"{NAME}-weights"
    )
    config = json.loads(blob(root / "shell", manifest(root / "shell", f"{NAME}-weights")["config"]["digest"]))
    assert config["config"]["Env"] == ["PATH=/usr/bin"]
    assert "Entrypoint" not in config["config"]
    done = ralbuild("image", "--model", "model", "--weights-base", "oci:base", cwd=root)
    assert (done.code, "--weights volume" in done.err) == (2, True)
