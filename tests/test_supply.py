"""Signature, bill of materials and provenance: what other tools and the specifications say of them."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cli_support import MINIMAL, NO_KERNELS, podman
from cli_support import ralbuild as in_a_process
from cryptography.hazmat.primitives.asymmetric import ec, utils
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from registry_server import serve
from supply_cases import Work, artifacts, blob, build, index, make_key, ralbuild, signed_work

from ralbuild import signing
from ralbuild.contract.bundle import Kernel, KernelObject, ObjectRef
from ralbuild.digests import DigestCache
from ralbuild.image.facts import ImageFacts, stored_facts
from ralbuild.image.layout import write_layout
from ralbuild.image.reader import open_image
from ralbuild.image.stored import stored_image
from ralbuild.supply.attest import make_artifacts
from ralbuild.supply.sbom import sbom_json
from ralbuild.supply.wanted import Wanted

SIGN, BOM, SLSA = (
    "https://sigstore.dev/cosign/sign/v1",
    "https://cyclonedx.org/bom",
    "https://slsa.dev/provenance/v1",
)
CYCLONEDX, OLD = "application/vnd.cyclonedx+json", "old signature"
LEFT_OUT = {"README.md"}
"""Files of the model folder that do not go into an image."""
BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    return signed_work(tmp_path_factory.mktemp("signed"))


@pytest.fixture(scope="module")
def facts(work: Work) -> ImageFacts:
    with open_image(work.layout, "team/tiny:1") as image:
        return stored_facts(image)


def openssl_accepts(folder: Path, data: bytes, signature: bytes, key: Path) -> bool:
    (folder / "data").write_bytes(data)
    (folder / "signature").write_bytes(signature)
    command = [
        "openssl",
        "dgst",
        "-sha256",
        "-verify",
        key,
        "-signature",
        folder / "signature",
        folder / "data",
    ]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def envelope(work: Work, kind: str) -> tuple[bytes, bytes]:
    """Return the statement of a bundle and the bytes that DSSE signs, made as its specification says."""
    value = json.loads(artifacts(work.layout)[kind][1])["dsseEnvelope"]
    payload = base64.b64decode(value["payload"])
    kind_bytes = value["payloadType"].encode()
    return payload, b"DSSEv1 %d %s %d %s" % (len(kind_bytes), kind_bytes, len(payload), payload)


def test_a_signature_is_the_one_of_rfc_6979() -> None:
    """Appendix A.2.5, P-256 with SHA-256, message "sample"."""
    secret = 0xC9AFA9D845BA75166B5C215767B1D6934E50C3DB36E89B127B8A622B120F6721
    r = 0xEFD48B2AACB6A8FD1140DD9CD45E81D69D2C877B56AAF991C34D0EA84EAF3716
    s = 0xF7CB1C942D657C41D436C7A1B6E29F65F3E900DBB9AFF4064DC4AB2F843ACDA8
    key = ec.derive_private_key(secret, ec.SECP256R1())
    assert utils.decode_dss_signature(signing.sign(key, b"sample")) == (r, s)


def test_openssl_accepts_both_forms_of_signature(work: Work, tmp_path: Path) -> None:
    key = work.root / "sign.pub"
    manifest, text = artifacts(work.layout)[OLD]
    signature = manifest["layers"][0]["annotations"]["dev.cosignproject.cosign/signature"]
    assert openssl_accepts(tmp_path, text, base64.b64decode(signature), key)
    assert json.loads(text)["critical"]["image"]["docker-manifest-digest"] == work.digest
    for kind in (SIGN, BOM, SLSA):
        _, signed = envelope(work, kind)
        found = json.loads(artifacts(work.layout)[kind][1])["dsseEnvelope"]["signatures"][0]["sig"]
        assert openssl_accepts(tmp_path, signed, base64.b64decode(found), key)
        assert not openssl_accepts(tmp_path, signed + b" ", base64.b64decode(found), key)


def test_a_bundle_names_the_key_by_the_hash_of_its_der_form(work: Work) -> None:
    der = subprocess.run(
        ["openssl", "pkey", "-pubin", "-in", work.root / "sign.pub", "-outform", "DER"],
        capture_output=True,
        check=True,
    ).stdout
    bundle = json.loads(artifacts(work.layout)[SIGN][1])
    assert bundle["mediaType"] == BUNDLE
    hint = bundle["verificationMaterial"]["publicKey"]["hint"]
    assert base64.b64decode(hint) == hashlib.sha256(der).digest()


def test_every_statement_is_about_this_image(work: Work) -> None:
    for kind in (SIGN, BOM, SLSA):
        statement = json.loads(envelope(work, kind)[0])
        assert statement["_type"] == "https://in-toto.io/Statement/v1"
        assert statement["predicateType"] == kind
        assert [item["digest"] for item in statement["subject"]] == [{"sha256": work.digest[7:]}]


def test_artifacts_are_stored_as_the_oci_specifications_say(work: Work) -> None:
    """image-spec 1.1: manifest.md "Guidelines for Artifact Usage"; distribution-spec: "Listing Referrers"."""
    size = len(blob(work.layout, work.digest))
    entries = {entry["digest"]: entry for entry in index(work.layout)}
    found = artifacts(work.layout)
    assert set(found) == {SIGN, BOM, SLSA, CYCLONEDX, OLD}
    for name, (manifest, content) in found.items():
        digest = "sha256:" + hashlib.sha256(canonical(manifest)).hexdigest()
        assert entries[digest]["size"] == len(canonical(manifest))
        layer = manifest["layers"][0]
        assert (layer["digest"][7:], layer["size"]) == (hashlib.sha256(content).hexdigest(), len(content))
        if name == OLD:
            assert "artifactType" not in entries[digest]
            continue
        assert manifest["config"] == {
            "mediaType": "application/vnd.oci.empty.v1+json", "size": 2,
            "digest": "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
        }  # fmt: skip
        assert manifest["artifactType"] == layer["mediaType"] == entries[digest]["artifactType"]
        assert manifest["subject"] == {
            "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": work.digest, "size": size
        }  # fmt: skip
        assert manifest["annotations"] == entries[digest].get("annotations", {})


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def test_skopeo_reads_the_image_and_the_old_signature_by_name(work: Work) -> None:
    store = f"oci:{work.layout}"
    seen = subprocess.run(
        ["skopeo", "inspect", f"{store}:team/tiny:1"], capture_output=True, text=True, check=True
    )
    assert json.loads(seen.stdout)["Digest"] == work.digest
    name = f"{work.digest.replace(':', '-')}.sig"
    raw = subprocess.run(["skopeo", "inspect", "--raw", f"{store}:{name}"], capture_output=True, check=True)
    assert json.loads(raw.stdout) == artifacts(work.layout)[OLD][0]


def test_the_bill_of_materials_is_valid_cyclonedx(work: Work, facts: ImageFacts) -> None:
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    ref = ObjectRef("ab" * 32, 10)
    objects = (KernelObject("sm_80", ref, replace(ref, sha256="cd" * 32), 32, 0, 0, ("sample",)),)
    kernel = Kernel("sample", "sample", "ef" * 32, False, 4, {}, (), objects)
    many = replace(facts, bundle=replace(facts.bundle, kernels=(kernel,)), created="2023-11-14T22:13:20Z")
    odd = replace(
        facts, packages=(), labels={}, annotations={}, bundle=replace(facts.bundle, model="Ünïcode/Größe: x")
    )
    for bill in (artifacts(work.layout)[CYCLONEDX][1], sbom_json(many), sbom_json(odd)):
        assert validator.validate_str(bill.decode()) is None
    assert json.loads(envelope(work, BOM)[0])["predicate"] == json.loads(artifacts(work.layout)[CYCLONEDX][1])


def test_the_bill_names_every_model_file_and_package_by_its_hash(work: Work) -> None:
    bill = json.loads(artifacts(work.layout)[CYCLONEDX][1])
    parts = {part["bom-ref"]: part for part in bill["components"]}
    model = parts["model"]
    assert model["type"] == "machine-learning-model"
    assert [item["license"]["id"] for item in model["licenses"]] == ["Apache-2.0"]
    files = {part["name"]: part["hashes"][0]["content"] for part in model["components"]}
    names = {path.name for path in (work.root / "model").iterdir()} - LEFT_OUT
    assert files == {
        name: hashlib.sha256((work.root / "model" / name).read_bytes()).hexdigest() for name in names
    }
    assert parts["pkg:deb/debian/libc6@2.36-9%2Bdeb12u13?arch=amd64"]["hashes"][0]["content"] == "aa" * 32
    assert parts["pkg:pypi/jinja2@3.1.6"]["version"] == "3.1.6"
    config = hashlib.sha256((work.root / "ral-config.yaml").read_bytes()).hexdigest()
    assert config in json.dumps(parts["rules"])
    refs = {item["ref"] for item in bill["dependencies"]}
    assert {ref for item in bill["dependencies"] for ref in item.get("dependsOn", [])} <= refs


def test_provenance_has_what_slsa_v1_requires_and_names_every_input(work: Work) -> None:
    """https://slsa.dev/spec/v1.0/provenance: the REQUIRED fields and the types of the others."""
    predicate = json.loads(envelope(work, SLSA)[0])["predicate"]
    definition, details = predicate["buildDefinition"], predicate["runDetails"]
    assert ":" in definition["buildType"]
    assert ":" in details["builder"]["id"]
    assert isinstance(definition["externalParameters"], dict)
    inputs = {item["name"]: item["digest"]["sha256"] for item in definition["resolvedDependencies"]}
    for path in (work.root / "model").iterdir():
        if path.name not in LEFT_OUT:
            assert inputs.pop(f"model/{path.name}") == hashlib.sha256(path.read_bytes()).hexdigest()
    base = json.loads((work.root / "base/index.json").read_bytes())["manifests"][0]["digest"]
    config = hashlib.sha256((work.root / "ral-config.yaml").read_bytes()).hexdigest()
    assert inputs == {"base": base[7:], "ral-config.yaml": config}
    assert details["metadata"] == {}, "no clock"


def test_attestations_do_not_change_the_image_and_are_the_same_everywhere(work: Work, tmp_path: Path) -> None:
    for name in ("model", "base", "ral-config.yaml", "sign.key"):
        source = work.root / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    assert build(tmp_path, output="plain") == work.digest
    env = {"TZ": "Asia/Tokyo", "PYTHONHASHSEED": "4711", "LC_ALL": "C"}
    done = in_a_process(
        "image", "--model", "model", "--base", "oci:base", "--output", "oci:out", "--tag", "team/tiny:1",
        "--sign", "sign.key", "--sbom", "--provenance", cwd=tmp_path, env=env, umask=0o077,
    )  # fmt: skip
    assert done.out.strip() == work.digest
    assert (tmp_path / "out/index.json").read_bytes() == (work.layout / "index.json").read_bytes()
    names = {path.name for path in (work.layout / "blobs/sha256").iterdir()}
    assert {path.name for path in (tmp_path / "out/blobs/sha256").iterdir()} == names


def test_source_date_epoch_is_in_the_provenance(facts: ImageFacts) -> None:
    wanted = Wanted(provenance=True, builder="https://ci.example/runner")
    (artifact,) = make_artifacts(replace(facts, created="2023-11-14T22:13:20Z"), wanted)
    details = json.loads(artifact.blobs[1])["predicate"]["runDetails"]
    assert details["metadata"]["startedOn"] == "2023-11-14T22:13:20Z"
    assert details["builder"]["id"] == "https://ci.example/runner"


def test_signing_afterwards_stores_the_same_signature(work: Work, tmp_path: Path) -> None:
    shutil.copytree(work.root / "base", tmp_path / "base")
    shutil.copytree(work.root / "model", tmp_path / "model")
    shutil.copy(work.root / "ral-config.yaml", tmp_path)
    build(tmp_path)
    done = ralbuild("sign", "oci:out", "--key", work.root / "sign.key", "--sbom", cwd=tmp_path)
    assert (done.code, done.out.strip()) == (0, work.digest), done.err
    mine, theirs = artifacts(tmp_path / "out"), artifacts(work.layout)
    assert mine == {name: value for name, value in theirs.items() if name != SLSA}


def test_a_new_image_of_the_same_name_leaves_no_artifact_of_the_old_one(work: Work, tmp_path: Path) -> None:
    shutil.copytree(work.root, tmp_path / "w")
    root = tmp_path / "w"
    (root / "ral-config.yaml").write_text(MINIMAL + NO_KERNELS)
    digest = build(root)
    assert [entry["digest"] for entry in index(root / "out")] == [digest]
    manifest = json.loads(blob(root / "out", digest))
    named = {digest, manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"])}
    assert {f"sha256:{path.name}" for path in (root / "out/blobs/sha256").iterdir()} == named


def test_a_rebuild_of_the_same_image_keeps_its_artifacts(work: Work, tmp_path: Path) -> None:
    shutil.copytree(work.root, tmp_path / "w")
    before = (tmp_path / "w/out/index.json").read_bytes()
    assert build(tmp_path / "w") == work.digest
    assert (tmp_path / "w/out/index.json").read_bytes() == before


BAD_KEYS = {
    "rsa": ["openssl", "genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048"],
    "p384": ["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-384"],
    "locked": ["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-aes256", "-pass", "pass:x"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "wording"),
    [("rsa", "is not a key for ECDSA on P-256"), ("p384", "is not a key for ECDSA on P-256"),
     ("locked", "needs a password"), ("text", "is not a private key in PEM format"),
     ("cosign", "cosign's own encrypted format"), ("none", "cannot be read")],
)  # fmt: skip
def test_a_key_that_cannot_sign_is_refused_by_its_reason(kind: str, wording: str, tmp_path: Path) -> None:
    path = tmp_path / "some.key"
    if kind in BAD_KEYS:
        subprocess.run([*BAD_KEYS[kind], "-out", path], check=True, capture_output=True)
    elif kind == "text":
        path.write_text("hello\n")
    elif kind == "cosign":
        path.write_text(
            "-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED SIGSTORE PRIVATE KEY-----\n"
        )
    with pytest.raises(signing.UsageError, match=wording):
        signing.load_private_key(path)


def test_an_encrypted_key_opens_with_its_password(tmp_path: Path) -> None:
    path = tmp_path / "locked.key"
    subprocess.run([*BAD_KEYS["locked"], "-out", path], check=True, capture_output=True)
    key = signing.load_private_key(path, b"x")
    assert signing.verify(key.public_key(), b"data", signing.sign(key, b"data"))
    with pytest.raises(signing.UsageError, match="the password is wrong"):
        signing.load_private_key(path, b"y")


def test_a_docker_engine_alone_cannot_hold_what_lies_beside_an_image(work: Work, tmp_path: Path) -> None:
    make_key(tmp_path)
    done = ralbuild(
        "image", "--model", work.root / "model", "--config", work.root / "ral-config.yaml", "--sign", "sign.key",
        "--output", "docker", cwd=tmp_path,
    )  # fmt: skip
    assert (done.code, "add --output oci:DIR" in done.err) == (2, True)


def test_an_archive_holds_what_lies_beside_an_image_and_other_tools_still_read_it(
    work: Work, tmp_path: Path
) -> None:
    archive = tmp_path / "signed.tar"
    done = ralbuild(
        "image", "--model", "model", "--base", "oci:base", "--output", f"archive:{archive}", "--tag", "team/tiny:1",
        "--sign", "sign.key", "--sbom", "--provenance", "--quiet", cwd=work.root,
    )  # fmt: skip
    assert (done.code, done.out.strip()) == (0, work.digest), done.err
    words = ["verify-image", archive, "--tag", "team/tiny:1", "--key", "sign.pub"]
    checked = ralbuild(*words, "--require", "signature,sbom,provenance", "--quiet", cwd=work.root)
    assert checked.code == 0, checked.out
    for store in ("docker-archive", "oci-archive"):
        command = ["skopeo", "inspect", "--format", "{{.Name}}", f"{store}:{archive}:team/tiny:1"]
        subprocess.run(command, capture_output=True, check=True)
    with podman() as store:
        subprocess.run([*store, "load", "-q", "-i", archive], capture_output=True, check=True)
        listed = subprocess.run(
            [*store, "images", "-q", "--no-trunc"], capture_output=True, text=True, check=True
        )
    config = json.loads(blob(work.layout, work.digest))["config"]["digest"]
    assert config in listed.stdout.split()


def test_a_stored_image_brings_its_artifacts_along_byte_for_byte(work: Work, tmp_path: Path) -> None:
    image = stored_image(work.layout, "team/tiny:1")
    assert len(image.artifacts) == 5
    write_layout(tmp_path / "copy", image, "team/tiny:1", DigestCache(None), None, print)
    assert (tmp_path / "copy/index.json").read_bytes() == (work.layout / "index.json").read_bytes()
    names = {path.name for path in (work.layout / "blobs/sha256").iterdir()}
    assert {path.name for path in (tmp_path / "copy/blobs/sha256").iterdir()} == names


def test_a_base_in_a_registry_is_attested_like_the_same_base_in_a_layout(work: Work, tmp_path: Path) -> None:
    root = tmp_path / "w"
    shutil.copytree(work.root, root)
    with serve() as registry:
        pushed = ralbuild("push", "oci:base", f"registry:{registry.host}/base:v1", "--quiet", cwd=root)
        name = f"{registry.host}/base@{pushed.out.strip()}"
        build(root, "--base", name, "--sbom", "--sign", "sign.key", output="remote")
        done = ralbuild("verify-image", "remote", "--tag", "team/tiny:1", "--key", "sign.pub",
                        "--require", "signature,sbom", "--quiet", cwd=root)  # fmt: skip
        assert done.code == 0, done.out
        with mock.patch("ralbuild.image.bases.REMOTE_LIMIT", 10):
            refused = ralbuild("image", "--model", "model", "--base", name, "--sbom", "--quiet", cwd=root)
    assert refused.code == 6
    assert "copy the base to a layout" in refused.err
    assert not (root / "ral-image").exists()
