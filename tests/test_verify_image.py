"""`ralbuild verify-image`: whatever is missing, changed or by somebody else is refused, by its name."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from supply_cases import Work, artifacts, blob, build, index, make_key, ralbuild, signed_work

from ralbuild.contract.codec import canonical_json, sha256_hex
from ralbuild.image.reader import open_image
from ralbuild.signing import load_public_key
from ralbuild.supply.layer_checks import Check
from ralbuild.supply.verify_image import REQUIREMENTS, verify_image

ALL = frozenset(REQUIREMENTS)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    return signed_work(tmp_path_factory.mktemp("signed"))


@pytest.fixture
def layout(work: Work, tmp_path: Path) -> Path:
    """A copy to break."""
    shutil.copytree(work.layout, tmp_path / "copy")
    return tmp_path / "copy"


def bad(layout: Path, key: Path, required: frozenset[Any] = ALL) -> dict[str, str]:
    """Return the checks that failed, and what each says."""
    with open_image(layout, "team/tiny:1") as image:
        checks: tuple[Check, ...] = verify_image(image, (load_public_key(key),), required)
    return {check.name: check.detail for check in checks if not check.good}


def rewrite(layout: Path, kind: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Replace the content of an artifact by a changed one, with digests that fit."""
    manifest, content = artifacts(layout)[kind]
    old = sha256_hex(canonical_json(manifest))
    value = json.loads(content)
    change(value)
    data = canonical_json(value)
    manifest["layers"][0] |= {"digest": f"sha256:{sha256_hex(data)}", "size": len(data)}
    text = canonical_json(manifest)
    for item in (data, text):
        (layout / "blobs/sha256" / sha256_hex(item)).write_bytes(item)
    entries = index(layout)
    for entry in entries:
        if entry["digest"] == f"sha256:{old}":
            entry |= {"digest": f"sha256:{sha256_hex(text)}", "size": len(text)}
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": entries}))


def drop(layout: Path, *kinds: str) -> None:
    gone = {f"sha256:{sha256_hex(canonical_json(artifacts(layout)[kind][0]))}" for kind in kinds}
    kept = [entry for entry in index(layout) if entry["digest"] not in gone]
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": kept}))


SIGN, BOM, SLSA = (
    "https://sigstore.dev/cosign/sign/v1",
    "https://cyclonedx.org/bom",
    "https://slsa.dev/provenance/v1",
)
CYCLONEDX, OLD = "application/vnd.cyclonedx+json", "old signature"


def test_a_good_image_passes_and_says_so(work: Work) -> None:
    text = ralbuild(
        "verify-image", "oci:out", "--key", "sign.pub", "--require", "signature,sbom,provenance", cwd=work.root
    )  # fmt: skip
    assert text.code == 0, text.out
    assert "the image is good" in text.out
    answer = json.loads(ralbuild("verify-image", "oci:out", "--key", "sign.pub", "--json", cwd=work.root).out)
    assert (answer["manifest"], answer["good"]) == (work.digest, True)
    assert {"signature", "provenance", "sbom", "labels", "contents"} <= {
        check["name"] for check in answer["checks"]
    }


def test_a_refusal_is_exit_code_6_and_names_the_check(work: Work) -> None:
    make_key(work.root, "other")
    done = ralbuild("verify-image", "oci:out", "--key", "other.pub", "--json", cwd=work.root)
    answer = json.loads(done.out)
    assert (done.code, answer["good"]) == (6, False)
    assert [check["name"] for check in answer["checks"] if not check["good"]] == ["signature"]
    done = ralbuild("verify-image", "oci:out", "--key", "other.pub", cwd=work.root)
    assert (done.code, "REFUSED: 1 of" in done.out) == (6, True)
    both = ralbuild("verify-image", "oci:out", "--key", "other.pub", "--key", "sign.pub", cwd=work.root)
    assert both.code == 0, "any of the keys may have signed"
    wrong = ralbuild("verify-image", "oci:out", "--key", "sign.pub", "--require", "sbomb", cwd=work.root)
    assert (wrong.code, "needs a list of" in wrong.err) == (2, True)


@pytest.mark.parametrize(
    ("kinds", "check"),
    [((SIGN, OLD), "signature"), ((SLSA,), "provenance"), ((BOM,), "sbom"), ((BOM, CYCLONEDX), "sbom")],
)
def test_what_is_missing_is_refused_only_where_it_is_required(
    work: Work, layout: Path, kinds: tuple[str, ...], check: str
) -> None:
    drop(layout, *kinds)
    key = work.root / "sign.pub"
    assert list(bad(layout, key)) == [check]
    assert bad(layout, key, ALL - {check}) == {}


@pytest.mark.parametrize("left", [SIGN, OLD])
def test_either_form_of_signature_is_enough(work: Work, layout: Path, left: str) -> None:
    drop(layout, *({SIGN, OLD} - {left}))
    assert bad(layout, work.root / "sign.pub") == {}


def test_an_unsigned_image_has_none_of_the_three(work: Work, tmp_path: Path) -> None:
    shutil.copytree(work.root, tmp_path / "w")
    build(tmp_path / "w", "--sbom", "--provenance", output="plain")
    assert set(bad(tmp_path / "w/plain", work.root / "sign.pub")) == set(REQUIREMENTS)


def test_no_byte_of_any_blob_can_change(work: Work, layout: Path) -> None:
    """One flipped bit, in turn, in every blob: refused, or not readable as an image at all."""
    key = work.root / "sign.pub"
    for path in sorted((layout / "blobs/sha256").iterdir()):
        good = path.read_bytes()
        broken = bytearray(good)
        broken[len(good) // 2] ^= 1
        path.write_bytes(broken)
        try:
            assert bad(layout, key), path.name
        except Exception as error:  # whatever is wrong must be our own error
            assert type(error).__name__ == "ImageError"
        path.write_bytes(good)
    assert bad(layout, key) == {}


def test_a_shorter_or_missing_layer_is_named(work: Work, layout: Path) -> None:
    manifest = json.loads(blob(layout, work.digest))
    path = layout / "blobs/sha256" / manifest["layers"][2]["digest"][7:]
    path.write_bytes(path.read_bytes()[:-512])
    found = bad(layout, work.root / "sign.pub")
    assert "weights model-00001-of-00002.safetensors" in next(iter(found))
    path.unlink()
    assert "has no readable" in next(iter(bad(layout, work.root / "sign.pub").values()))


def test_a_changed_statement_is_not_believed(work: Work, layout: Path) -> None:
    def other_builder(value: dict[str, Any]) -> None:
        envelope = value["dsseEnvelope"]
        payload = json.loads(base64.b64decode(envelope["payload"]))
        payload["predicate"]["runDetails"]["builder"]["id"] = "https://ci.example/trusted"
        envelope["payload"] = base64.b64encode(canonical_json(payload)).decode()

    rewrite(layout, SLSA, other_builder)
    found = bad(layout, work.root / "sign.pub", frozenset({"signature"}))
    assert list(found) == ["attestation"], "it names the key, which did not sign it"
    assert "provenance" in bad(layout, work.root / "sign.pub")


def test_an_unsigned_bill_that_differs_from_the_signed_one_is_refused(work: Work, layout: Path) -> None:
    rewrite(layout, CYCLONEDX, lambda bill: bill["components"].pop())
    assert list(bad(layout, work.root / "sign.pub")) == ["sbom"]


def weight_parts(bill: dict[str, Any]) -> list[dict[str, Any]]:
    model = next(part for part in bill["components"] if part["bom-ref"] == "model")
    return [part for part in model["components"] if part["name"].endswith(".safetensors")]


def test_the_hash_of_a_weight_file_is_compared_with_the_bytes_in_its_layer(work: Work, layout: Path) -> None:
    """The image names the file by its layer, so nothing but the bytes can tell."""

    def another_hash(bill: dict[str, Any]) -> None:
        weight_parts(bill)[1]["hashes"][0]["content"] = "ab" * 32

    rewrite(layout, CYCLONEDX, another_hash)
    found = bad(layout, work.root / "sign.pub")
    assert list(found) == ["sbom"]
    assert found["sbom"].endswith("the hash of model-00002-of-00002.safetensors")


def test_a_bill_that_names_weight_files_by_their_layers_alone_is_taken(work: Work, layout: Path) -> None:
    def no_hash(bill: dict[str, Any]) -> None:
        for part in weight_parts(bill):
            del part["hashes"]

    rewrite(layout, CYCLONEDX, no_hash)
    assert bad(layout, work.root / "sign.pub") == {}

    def another_layer(bill: dict[str, Any]) -> None:
        part = weight_parts(bill)[0]
        next(i for i in part["properties"] if i["name"] == "ralbuild:layer")["value"] = f"sha256:{'0' * 64}"

    rewrite(layout, CYCLONEDX, another_layer)
    assert list(bad(layout, work.root / "sign.pub")) == ["sbom"]


def test_an_image_without_a_weight_layer_that_its_model_names_is_refused(work: Work) -> None:
    with open_image(work.layout, "team/tiny:1") as image:
        gone = next(layer for layer in image.layers if layer.kind == "weights")
        other = replace(image, layers=tuple(layer for layer in image.layers if layer is not gone))
        checks = verify_image(other, (load_public_key(work.root / "sign.pub"),), ALL)
    found = {check.name: check.detail for check in checks if not check.good}
    assert gone.diff_id in found["weights"]


def test_the_signature_of_another_image_is_none_of_this_one(work: Work, tmp_path: Path) -> None:
    """The other image's artifacts are put beside this one as if they were its own."""
    shutil.copytree(work.root, tmp_path / "w")
    root = tmp_path / "w"
    (root / "ral-config.yaml").write_text((root / "ral-config.yaml").read_text().replace("512", "256"))
    other = build(root, output="other")
    layout = root / "other"
    size = len(blob(layout, other))
    for kind, (manifest, _) in artifacts(work.layout).items():
        if kind != OLD:
            manifest["subject"] |= {"digest": other, "size": size}
        text = canonical_json(manifest)
        for path in (work.layout / "blobs/sha256").iterdir():
            if not (layout / "blobs/sha256" / path.name).exists():
                shutil.copy(path, layout / "blobs/sha256")
        (layout / "blobs/sha256" / sha256_hex(text)).write_bytes(text)
        entry: dict[str, Any] = {
            "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": f"sha256:{sha256_hex(text)}", "size": len(text)
        }  # fmt: skip
        if kind == OLD:
            entry["annotations"] = {"org.opencontainers.image.ref.name": f"{other.replace(':', '-')}.sig"}
        else:
            entry["artifactType"] = manifest["artifactType"]
        entries = [*index(layout), entry]
        (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": entries}))
    assert set(bad(layout, work.root / "sign.pub")) == set(REQUIREMENTS)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"dsseEnvelope":3}', b"\xff", b'{"dsseEnvelope":{"payload":"!","payloadType":"x","signatures":[]}}'])  # fmt: skip
def test_a_hostile_attestation_is_an_ordinary_failure(work: Work, layout: Path, content: bytes) -> None:
    manifest, _ = artifacts(layout)[SIGN]
    manifest["layers"][0] |= {"digest": f"sha256:{sha256_hex(content)}", "size": len(content)}
    text = canonical_json(manifest)
    for data in (content, text):
        (layout / "blobs/sha256" / sha256_hex(data)).write_bytes(data)
    entry = {"mediaType": manifest["mediaType"], "digest": f"sha256:{sha256_hex(text)}", "size": len(text)}
    entries = [*index(layout), entry | {"artifactType": manifest["artifactType"]}]
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": entries}))
    assert list(bad(layout, work.root / "sign.pub")) == ["attestation"]


def test_what_is_signed_is_what_is_there(work: Work, layout: Path, tmp_path: Path) -> None:
    manifest = json.loads(blob(layout, work.digest))
    path = layout / "blobs/sha256" / manifest["layers"][2]["digest"][7:]
    path.write_bytes(bytes(path.stat().st_size))
    done = ralbuild(
        "sign", f"oci:{layout}", "--tag", "team/tiny:1", "--key", work.root / "sign.key", cwd=tmp_path
    )
    assert done.code == 6, done.out
    assert done.out == ""


def test_a_broken_image_beside_a_good_one_is_nobody_s_business(work: Work, layout: Path) -> None:
    manifest = "application/vnd.oci.image.manifest.v1+json"
    entry = {
        "mediaType": manifest,
        "digest": f"sha256:{'0' * 64}",
        "size": 7,
        "annotations": {"org.opencontainers.image.ref.name": "b"},
    }
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [*index(layout), entry]}))
    assert bad(layout, work.root / "sign.pub") == {}


def test_inspect_shows_an_image_whose_signature_is_damaged(work: Work, layout: Path) -> None:
    digest = sha256_hex(canonical_json(artifacts(layout)[SIGN][0]))
    (layout / "blobs/sha256" / digest).write_bytes(b"{}")
    done = ralbuild("inspect", f"oci:{layout}", cwd=work.root)
    assert (done.code, "something damaged" in done.out) == (0, True), done.err
