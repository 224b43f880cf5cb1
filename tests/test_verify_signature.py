"""An upstream `model.sig`: made by the library that defines the format, checked by us; and altered ones."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from model_factory import edit_json, write_model
from model_signing import hashing, signing

from ralbuild.cli.main import main
from ralbuild.contract.codec import pae
from ralbuild.digests import DigestCache
from ralbuild.errors import UsageError
from ralbuild.signing import load_public_key
from ralbuild.signing import verify as verify_bytes
from ralbuild.weights.scan import Order, Verdict, verify_folder

pytestmark = pytest.mark.usefixtures("one_worker_a_request")


def write_key(folder: Path, name: str, key: Any) -> Path:
    private = folder / f"{name}.pem"
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    public = folder / f"{name}.pub.pem"
    spki = serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, spki))
    return public


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name, curve in (("p256", ec.SECP256R1()), ("p384", ec.SECP384R1()), ("p521", ec.SECP521R1())):
        write_key(folder, name, ec.generate_private_key(curve))
    write_key(folder, "other", ec.generate_private_key(ec.SECP256R1()))
    write_key(folder, "ed25519", ed25519.Ed25519PrivateKey.generate())
    write_key(folder, "k1", ec.generate_private_key(ec.SECP256K1()))
    return folder


def sign(folder: Path, key: Path, **settings: Any) -> Path:
    """Sign with the reference library."""
    signature = folder / "model.sig"
    config = hashing.Config().set_ignored_paths(paths=[signature.name, *settings.get("ignored", ())])
    if settings.get("shards"):
        config.use_shard_serialization(shard_size=1000)
    if settings.get("algorithm"):
        config.use_file_serialization(hashing_algorithm=settings["algorithm"])
    signing.Config().use_elliptic_key_signer(private_key=key).set_hashing_config(config).sign(
        folder, signature
    )
    return folder


@pytest.fixture(scope="module")
def signed(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("signed") / "model", shards=2)
    (folder / "README.md").write_text("hello")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs")
    return sign(folder, keys / "p256.pem")


def verify(folder: Path, key: Path | None) -> Verdict:
    public = load_public_key(key) if key is not None else None
    return verify_folder(
        folder, DigestCache(None), 0, lambda done, total: None, Order(key=public, own_digests=True)
    )


def found(verdict: Verdict) -> set[tuple[str, str]]:
    """Return id and file of what is above a note, or says something of the signature."""
    return {
        (item.rule.id, item.file)
        for item in verdict.findings
        if item.severity != "info" or item.rule.id.startswith("W9")
    }


def test_a_good_signature_leaves_nothing_to_say(signed: Path, keys: Path) -> None:
    verdict = verify(signed, keys / "p256.pub.pem")
    assert found(verdict) == set()
    assert verdict.model is not None


def test_a_signature_that_nobody_asked_for_is_a_note(signed: Path) -> None:
    assert found(verify(signed, None)) == {("W901", "model.sig")}


@pytest.mark.parametrize("curve", ["p384", "p521"])
def test_the_other_curves_of_the_format_are_taken(curve: str, keys: Path, tmp_path: Path) -> None:
    folder = sign(write_model(tmp_path / "model"), keys / f"{curve}.pem")
    assert found(verify(folder, keys / f"{curve}.pub.pem")) == set()
    assert found(verify(folder, keys / "p256.pub.pem")) == {("W904", "model.sig")}


@pytest.mark.parametrize("shards", [1, 3])
def test_the_manifest_recomputes_the_root_digest_of_what_goes_into_the_image(
    shards: int, keys: Path, tmp_path: Path
) -> None:
    model = verify(write_model(tmp_path / "model", shards=shards), None).model
    assert model is not None
    image = tmp_path / "image"
    image.mkdir()
    for item in (*model.manifest.weight_files, *model.manifest.files):
        shutil.copy(tmp_path / "model" / item.path, image)
    sign(image, keys / "p256.pem")
    payload = json.loads((image / "model.sig").read_text())["dsseEnvelope"]["payload"]
    subject = json.loads(base64.b64decode(payload))["subject"][0]
    assert model.root_sha256 == subject["digest"]["sha256"]


def append(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + b" ")


FIRST = "model-00001-of-00002.safetensors"


def flip(name: str) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[-1] ^= 1
        (folder / name).write_bytes(data)

    return change


FOLDERS: list[tuple[str, tuple[str, str], Callable[[Path], Any]]] = [
    ("a changed weight", ("W906", FIRST), flip(FIRST)),
    ("a changed config", ("W906", "config.json"), append("config.json")),
    ("a changed file that is not shipped", ("W906", "README.md"), append("README.md")),
    ("a changed file in a folder", ("W906", "original/params.json"), append("original/params.json")),
    ("a missing file", ("W905", "README.md"), lambda f: (f / "README.md").unlink()),
    ("a missing file of the image", ("W905", "generation_config.json"), lambda f: (f / "generation_config.json").unlink()),
    ("a renamed file", ("W905", "README.md"), lambda f: (f / "README.md").rename(f / "READ")),
    ("an extra file", ("W907", "notes.txt"), lambda f: (f / "notes.txt").write_text("x")),
    ("an extra file in a folder", ("W907", "original/x"), lambda f: (f / "original" / "x").write_text("x")),
    ("an extra file of the image", ("W907", "special_tokens_map.json"), lambda f: (f / "special_tokens_map.json").write_text("{}")),
    ("a signed file that is now a link", ("W905", "README.md"), lambda f: ((f / "README.md").unlink(), (f / "README.md").symlink_to("config.json"))),
    ("no signature", ("W902", "model.sig"), lambda f: (f / "model.sig").unlink()),
]  # fmt: skip


@pytest.mark.parametrize(("what", "expected", "change"), FOLDERS, ids=[case[0] for case in FOLDERS])
def test_each_change_of_a_signed_folder_has_its_finding(
    what: str,
    expected: tuple[str, str],
    change: Callable[[Path], Any],
    signed: Path,
    keys: Path,
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(signed, tmp_path / "model"))
    change(folder)
    verdict = verify(folder, keys / "p256.pub.pem")
    assert expected in found(verdict)
    assert verdict.model is None


def bundle(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    return lambda folder: edit_json(folder / "model.sig", change)


def statement(change: Callable[[dict[str, Any]], Any], key: str = "p256") -> Callable[[Path, Path], Any]:
    """Change the statement and sign it again: what a publisher with another tool might write."""

    def apply(folder: Path, keys: Path) -> None:
        def edit(value: dict[str, Any]) -> None:
            payload = json.loads(base64.b64decode(value["dsseEnvelope"]["payload"]))
            change(payload)
            data = json.dumps(payload).encode()
            private = serialization.load_pem_private_key((keys / f"{key}.pem").read_bytes(), None)
            made = private.sign(pae("application/vnd.in-toto+json", data), ec.ECDSA(hashes.SHA256()))
            value["dsseEnvelope"]["payload"] = base64.b64encode(data).decode()
            value["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(made).decode()

        edit_json(folder / "model.sig", edit)

    return apply


def root_again(value: dict[str, Any]) -> None:
    digests = b"".join(bytes.fromhex(item["digest"]) for item in value["predicate"]["resources"])
    value["subject"][0]["digest"]["sha256"] = hashlib.sha256(digests).hexdigest()


def drop(name: str) -> Callable[[dict[str, Any]], Any]:
    """Take a file out of the statement, and say that its path is ignored."""

    def change(value: dict[str, Any]) -> None:
        predicate = value["predicate"]
        predicate["resources"] = [item for item in predicate["resources"] if item["name"] != name]
        predicate["serialization"]["ignore_paths"] = [name]
        root_again(value)

    return change


def first(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda value: value["predicate"]["resources"][0].update(fields)


SIGNATURES: list[tuple[str, str | None, Any]] = [
    ("not JSON", "W903", lambda f: (f / "model.sig").write_bytes(b"\x00\xff")),
    ("nothing", "W903", lambda f: (f / "model.sig").write_bytes(b"")),
    ("a list", "W903", lambda f: (f / "model.sig").write_bytes(b"[]")),
    ("an empty object", "W903", lambda f: (f / "model.sig").write_bytes(b"{}")),
    ("another media type", "W903", bundle(lambda b: b.update(mediaType="text/plain"))),
    ("no envelope", "W903", bundle(lambda b: b.pop("dsseEnvelope"))),
    ("a certificate", "W903", bundle(lambda b: b.update(verificationMaterial={"certificate": {}}))),
    ("two signatures", "W903", bundle(lambda b: b["dsseEnvelope"]["signatures"].append({}))),
    ("no signature", "W903", bundle(lambda b: b["dsseEnvelope"].update(signatures=[]))),
    ("a signature that is no base64", "W903", bundle(lambda b: b["dsseEnvelope"]["signatures"][0].update(sig="%%"))),
    ("a signature that is a number", "W903", bundle(lambda b: b["dsseEnvelope"]["signatures"][0].update(sig=7))),
    ("a signature that is no DER", "W904", bundle(lambda b: b["dsseEnvelope"]["signatures"][0].update(sig="AAAA"))),
    ("an empty signature", "W904", bundle(lambda b: b["dsseEnvelope"]["signatures"][0].update(sig=""))),
    ("a payload of another type", "W903", bundle(lambda b: b["dsseEnvelope"].update(payloadType="text/plain"))),
    ("an altered payload", "W904", bundle(lambda b: b["dsseEnvelope"].update(payload=base64.b64encode(b"{}").decode()))),
    ("the statement signed again", None, statement(lambda s: None)),
    ("a statement of another key", "W904", statement(lambda s: None, "other")),
    ("another predicate", "W903", statement(lambda s: s.update(predicateType="https://slsa.dev/provenance/v1"))),
    ("another statement", "W903", statement(lambda s: s.update(_type="x"))),
    ("no files", "W903", statement(lambda s: s["predicate"].pop("resources"))),
    ("a root digest of other files", "W903", statement(lambda s: s["subject"][0]["digest"].update(sha256="0" * 64))),
    ("no subject", "W903", statement(lambda s: s.update(subject=[]))),
    ("a path out of the folder", "W903", statement(first(name="../config.json"))),
    ("an absolute path", "W903", statement(first(name="/etc/passwd"))),
    ("a file listed twice", "W903", statement(lambda s: (s["predicate"]["resources"].append(s["predicate"]["resources"][0]), root_again(s)))),
    ("BLAKE2", "W903", statement(first(algorithm="blake2b"))),
    ("a digest that is no digest", "W903", statement(first(digest="xyz"))),
    ("an unsigned README that is ignored", None, statement(drop("README.md"))),
    ("an unsigned config that is ignored", "W907", statement(drop("config.json"))),
]  # fmt: skip


@pytest.mark.parametrize(("what", "expected", "change"), SIGNATURES, ids=[case[0] for case in SIGNATURES])
def test_each_odd_signature_has_its_finding(
    what: str, expected: str | None, change: Any, signed: Path, keys: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(signed, tmp_path / "model"))
    if change.__code__.co_argcount == 2:
        change(folder, keys)
    else:
        change(folder)
    ids = {rule for rule, _ in found(verify(folder, keys / "p256.pub.pem"))}
    assert ids == ({expected} if expected else set())


@pytest.mark.parametrize("settings", [{"shards": True}, {"algorithm": "blake2"}])
def test_what_this_version_does_not_read_is_said(
    settings: dict[str, Any], keys: Path, tmp_path: Path
) -> None:
    folder = sign(write_model(tmp_path / "model"), keys / "p256.pem", **settings)
    assert found(verify(folder, keys / "p256.pub.pem")) == {("W903", "model.sig")}


@pytest.mark.parametrize("name", ["ed25519.pub.pem", "k1.pub.pem", "p256.pem"])
def test_another_kind_of_key_is_refused(name: str, keys: Path) -> None:
    with pytest.raises(UsageError):
        load_public_key(keys / name)


@pytest.mark.parametrize("data", [b"", b"x", b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"])
def test_what_is_no_key_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_bytes(data)
    with pytest.raises(UsageError, match="PEM"):
        load_public_key(tmp_path / "key.pem")


def test_a_signature_holds_for_its_message_only(keys: Path) -> None:
    private = serialization.load_pem_private_key((keys / "p384.pem").read_bytes(), None)
    made = private.sign(b"text", ec.ECDSA(hashes.SHA384()))
    key = load_public_key(keys / "p384.pub.pem")
    assert verify_bytes(key, b"text", made)
    assert not verify_bytes(key, b"Text", made)


def test_the_command_takes_the_key(
    signed: Path,
    keys: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["verify", "--quiet", "--model", str(signed), "--signature-key"]
    assert main([*words, str(keys / "p256.pub.pem")]) == 0
    assert main([*words, str(keys / "other.pub.pem")]) == 3
    assert "W904 signature-wrong" in capsys.readouterr().out
    assert main([*words, str(keys / "nowhere.pem")]) == 2
    assert main([*words, str(keys)]) == 2
