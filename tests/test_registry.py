"""The registry client: who we are there, manifests, mounts, referrers, bases, whole images, profiles."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import pytest
from image_cases import CONFIG, NOWHERE, make_image, make_plan, rules_layer
from registry_cases import DATA, DIGEST, FULL, NAME, RECIPE, Run, client
from registry_server import INDEX, FakeRegistry, Handler, serve, sha256, times

from ralbuild.errors import HostError, ImageError, UsageError
from ralbuild.image.assemble import Image, assemble_image
from ralbuild.image.bases import LayoutBase, open_base, parse_base
from ralbuild.image.outputs import ArchiveOutput, LayoutOutput, RegistryOutput
from ralbuild.image.plan import ImagePlan, LayerDigest
from ralbuild.image.reader import read_base
from ralbuild.image.registry.auth import parse_challenge
from ralbuild.image.registry.credentials import ANONYMOUS, Credentials, find_credentials
from ralbuild.image.registry.profiles import check_limits, find_profile
from ralbuild.image.registry.reference import Reference, is_loopback
from ralbuild.image.registry.transport import Transport
from ralbuild.image.stored import stored_image
from ralbuild.image.write import write_image

MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@pytest.fixture
def registry():
    with serve() as made:
        yield made


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return make_image(tmp_path_factory.mktemp("model"))


def target(registry: FakeRegistry, name: str = NAME, tag: str = "v1") -> RegistryOutput:
    return RegistryOutput(Reference(registry.host, name, tag))


# Credentials ---------------------------------------------------------------------------------------


def config_file(folder: Path, value: object) -> dict[str, str]:
    (folder / "config.json").write_text(json.dumps(value))
    return {"DOCKER_CONFIG": str(folder)}


def test_a_password_of_docker_login_is_found_by_host(tmp_path: Path) -> None:
    auth = base64.b64encode(b"me:p:w").decode()
    env = config_file(tmp_path, {"auths": {"https://r.example.test/v1/": {"auth": auth}, "b:5000": {}}})
    assert find_credentials("r.example.test", env) == Credentials("me", "p:w")
    assert find_credentials("b:5000", env) == ANONYMOUS
    assert find_credentials("other.example.test", env) == ANONYMOUS
    assert "p:w" not in repr(find_credentials("r.example.test", env))


def helper(folder: Path, name: str, script: str) -> None:
    path = folder / f"docker-credential-{name}"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_credential_helpers_are_asked_as_docker_asks_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The protocol of docker-credential-helpers: `get`, the host on standard input, JSON back."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    helper(
        tmp_path, "a", f'test "$1" = get && cat > {tmp_path}/asked; echo \'{{"Username":"u","Secret":"s"}}\''
    )
    helper(tmp_path, "t", 'echo \'{"Username":"<token>","Secret":"refresh"}\'')
    helper(tmp_path, "none", "echo credentials not found in native keychain; exit 1")
    helper(tmp_path, "bad", "echo secret-word >&2; exit 3")
    env = config_file(tmp_path, {"credHelpers": {"r.test": "a", "n.test": "none"}, "credsStore": "t"})
    assert find_credentials("r.test", env) == Credentials("u", "s")
    assert (tmp_path / "asked").read_text() == "r.test"
    assert find_credentials("n.test", env) == ANONYMOUS
    assert find_credentials("x.test", env) == Credentials(identity_token="refresh")
    env = config_file(tmp_path, {"credHelpers": {"r.test": "bad", "m.test": "missing", "e.test": "../a"}})
    with pytest.raises(HostError, match=r"failed with status 3 for r\.test") as caught:
        find_credentials("r.test", env)
    assert "secret-word" not in str(caught.value)
    with pytest.raises(HostError, match="cannot be run"):
        find_credentials("m.test", env)
    with pytest.raises(UsageError, match="is not the name of a credential helper"):
        find_credentials("e.test", env)


def test_podmans_file_counts_too_and_broken_files_are_named(tmp_path: Path) -> None:
    auth = base64.b64encode(b"me:pw").decode()
    (tmp_path / "auth.json").write_text(json.dumps({"auths": {"r.test": {"auth": auth}}}))
    env = {"REGISTRY_AUTH_FILE": str(tmp_path / "auth.json"), "HOME": str(tmp_path)}
    assert find_credentials("r.test", env) == Credentials("me", "pw")
    (tmp_path / "auth.json").write_text("{")
    with pytest.raises(UsageError, match="is not a JSON object"):
        find_credentials("r.test", env)
    (tmp_path / "auth.json").write_text('{"auths": {"r.test": {"auth": "%%%"}}}')
    with pytest.raises(UsageError, match="is not base64"):
        find_credentials("r.test", env)


def test_basic_and_bearer_work_with_a_password_and_with_an_identity_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    for kind, identity in (("basic", ""), ("bearer", ""), ("bearer", "refresh-me")):
        with serve(auth=kind, identity=identity) as registry, client() as run:
            auth = base64.b64encode(b"user:secret").decode()
            entry = {"identitytoken": identity} if identity else {"auth": auth}
            config_file(tmp_path, {"auths": {registry.host: entry}})
            run.uploader(registry).put(RECIPE, DIGEST)
            assert registry.blobs[FULL] == DATA
            assert run.repository(registry).has_blob(FULL, DIGEST.size)


@pytest.mark.parametrize("kind", ["basic", "bearer"])
def test_a_wrong_password_is_one_error_without_the_password(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with serve(auth=kind) as registry, client() as run:
        auth = base64.b64encode(b"user:hunter2").decode()
        config_file(tmp_path, {"auths": {registry.host: {"auth": auth}}})
        with pytest.raises(ImageError, match="401") as caught:
            run.uploader(registry).put(RECIPE, DIGEST)
    problem = caught.value.problems[0]
    assert f"docker login {registry.host}" in problem.hint
    assert "hunter2" not in str(problem)
    assert auth not in str(problem)
    assert run.pauses == []


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ('Bearer realm="https://a/t",service="s",scope="x:y:pull,push"', ("bearer", "https://a/t", "s")),
        ('bearer service=s , realm="https://a/t?q=\\"1\\""', ("bearer", 'https://a/t?q="1"', "s")),
        ('Basic realm="r"', ("basic", "r", "")),
        ("Negotiate", None),
        ("", None),
    ],
)
def test_challenges_are_read_as_rfc_9110_writes_them(header: str, expected: object) -> None:
    found = parse_challenge(header)
    assert (found and (found.scheme, found.realm, found.service)) == expected


def test_no_password_goes_to_a_token_service_without_tls(registry: FakeRegistry) -> None:
    challenge = 'Bearer realm="http://auth.example.test/token"'
    registry.faults.append(lambda h: h.refuse(401, "UNAUTHORIZED", WWW_Authenticate=challenge) is None)
    with client() as run, pytest.raises(ImageError, match="without TLS"):
        run.repository(registry).has_blob(FULL, 1)


# TLS -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1, with its key."""
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-keyout", "key.pem", "-out", "cert.pem", "-days", "2", "-subj", "/CN=test"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (folder / "both.pem").write_text((folder / "key.pem").read_text() + (folder / "cert.pem").read_text())
    return folder / "both.pem"


def test_a_certificate_that_nobody_trusts_is_an_error_even_on_loopback(certificate: Path) -> None:
    with serve(tls=certificate) as registry:
        with client() as run, pytest.raises(ImageError, match="certificate is not trusted") as caught:
            run.repository(registry).has_blob(FULL, 1)
        assert "--registry-ca" in caught.value.problems[0].hint
        with client(ca_file=certificate.with_name("cert.pem")) as run:
            run.uploader(registry).put(RECIPE, DIGEST)
        assert registry.blobs[FULL] == DATA


def test_a_file_without_certificates_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("no certificate")
    with (
        serve() as registry,
        client(ca_file=tmp_path / "x.pem") as run,
        pytest.raises(HostError, match="cannot be read as certificates"),
    ):
        run.repository(registry).has_blob(FULL, 1)


def test_plain_http_is_for_this_machine_unless_asked_for() -> None:
    assert Transport().scheme("r.example.test") == "https"
    for host in ("localhost:5000", "127.0.0.1", "127.9.9.9:1", "[::1]:5000", "x.localhost"):
        assert is_loopback(host), host
    for host in ("127.0.0.1.example.test", "localhost.example.test", "10.0.0.1:5000", "[::2]"):
        assert not is_loopback(host), host
        assert not Transport().allows_plain(host)
        assert Transport(insecure=True).allows_plain(host)


# Manifests and referrers ---------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False])
def test_a_manifest_is_stored_under_tag_and_digest(registry: FakeRegistry, named: bool) -> None:
    registry.digest_header = named  # a registry need not say the digest: then it is read back
    data = b'{"schemaVersion":2}'
    with client() as run:
        repository = run.repository(registry)
        assert repository.put_manifest(data, "v1") == sha256(data)
        assert repository.put_manifest(data) == sha256(data)
        assert repository.get_manifest("v1") == (data, MANIFEST)
        assert repository.get_manifest(sha256(data))[0] == data


def test_a_registry_that_lies_about_a_manifest_is_an_error(registry: FakeRegistry) -> None:
    digest = registry.add_manifest(NAME, b'{"schemaVersion":2}', MANIFEST, "v1")
    other = b'{"schemaVersion":2,"x":1}'
    registry.manifests[NAME, digest] = (other, MANIFEST)
    with client() as run, pytest.raises(ImageError, match="is damaged"):
        run.repository(registry).get_manifest(digest)
    registry.faults.append(
        times(1, "PUT", "", lambda h: (h.body(), h.answer(201, Docker_Content_Digest=digest)))
    )
    with client() as run, pytest.raises(ImageError, match="stored another manifest"):
        run.repository(registry).put_manifest(other, "v2")
    registry.faults.append(lambda handler: handler.answer(200, b"x" * (9 << 20)) is None)
    with client() as run, pytest.raises(ImageError, match="longer than"):
        run.repository(registry).get_manifest("v1")


@pytest.mark.parametrize("native", [True, False])
def test_what_refers_to_an_image_is_listed_whatever_the_registry_can_do(native: bool) -> None:
    """The fallback of the distribution specification: an index under the tag sha256-<hex>."""
    with serve(referrers=native) as registry, client() as run:
        repository = run.repository(registry)
        subject = repository.put_manifest(b'{"schemaVersion":2}', "v1")
        empty = run.uploader(registry).put_bytes(b"{}")
        digests = []
        for kind in ("application/x-sbom", "application/x-signature"):
            manifest = {
                "schemaVersion": 2, "mediaType": MANIFEST, "artifactType": kind, "layers": [],
                "config": {"mediaType": "application/vnd.oci.empty.v1+json", "digest": empty, "size": 2},
                "subject": {"mediaType": MANIFEST, "digest": subject, "size": 19},
            }  # fmt: skip
            digests.append(repository.put_manifest(json.dumps(manifest).encode()))
            repository.put_manifest(json.dumps(manifest).encode())
        found = repository.referrers(subject)
        assert [item["digest"] for item in found] == sorted(digests)
        tag = subject.replace(":", "-")
        assert ((NAME, tag) in registry.manifests) == (not native)
        if not native:
            index, kind = registry.manifests[NAME, tag]
            assert kind == INDEX
            types = {item["artifactType"] for item in json.loads(index)["manifests"]}
            assert types == {"application/x-sbom", "application/x-signature"}
        assert repository.referrers("sha256:" + "0" * 64) == ()


# Whole images --------------------------------------------------------------------------------------


def test_an_image_is_pushed_from_where_its_bytes_lie_and_pushed_again_for_nothing(
    registry: FakeRegistry, image: Image
) -> None:
    with client() as run:
        first = write_image(image, [target(registry)], cache=NOWHERE, registries=run.registries)
        sent = [item.size for item in registry.seen if item.method == "PUT"]
        again = write_image(image, [target(registry)], cache=NOWHERE, registries=run.registries)
    assert registry.manifests[NAME, "v1"] == (image.manifest, MANIFEST)
    for layer in image.layers:
        assert len(registry.blobs[f"sha256:{layer.digest.sha256}"]) == layer.digest.size
    assert first.bytes_written == sum(layer.digest.size for layer in image.layers)
    assert sum(sent) == first.bytes_written + len(image.config) + len(image.manifest)
    assert again.bytes_written == 0
    assert all(layer.reused for layer in again.layers)
    assert len([item for item in registry.seen if item.method == "PUT"]) == len(sent)
    assert first.names == (f"{registry.host}/{NAME}:v1@{image.digest}",)
    assert registry.count("PUT", "manifests") == 1


def test_the_manifest_comes_last_and_a_failed_push_publishes_nothing(
    registry: FakeRegistry, image: Image, tmp_path: Path
) -> None:
    registry.faults.append(times(1 << 30, "PUT", "uploads", lambda h: (h.body(), h.refuse(403, "DENIED"))))
    outputs = [target(registry), LayoutOutput(tmp_path / "layout"), ArchiveOutput(tmp_path / "a.tar")]
    with client() as run, pytest.raises(ImageError, match="DENIED"):
        write_image(image, outputs, cache=NOWHERE, registries=run.registries)
    assert registry.manifests == {}
    assert list(tmp_path.iterdir()) == []


def test_several_outputs_of_one_run_hold_the_same_image(
    registry: FakeRegistry, image: Image, tmp_path: Path
) -> None:
    outputs = [
        target(registry), LayoutOutput(tmp_path / "layout"), ArchiveOutput(tmp_path / "a.tar"),
        LayoutOutput(tmp_path / "x/../layout"),
    ]  # fmt: skip
    with client() as run:
        write_image(image, outputs, cache=NOWHERE, registries=run.registries)
    assert read_base(tmp_path / "layout").digest == image.digest
    assert (tmp_path / "a.tar").exists()
    assert registry.manifests[NAME, "v1"][0] == image.manifest


def test_a_push_needs_no_memory_for_the_weights(tmp_path: Path) -> None:
    """200 MB of a sparse file; the process stays below 60 MB."""
    path = tmp_path / "w.safetensors"
    with path.open("wb") as file:
        file.truncate(200 << 20)
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from ralbuild.image.layers import Recipe, digest_layer\nfrom ralbuild.image.plan import HostFile\n"
        "from ralbuild.image.registry.connect import open_registries\n"
        "from ralbuild.image.registry.reference import Reference\n"
        "from ralbuild.image.registry.upload import Uploader\n"
        "recipe = Recipe('w', (b'head', HostFile(Path(sys.argv[1]), 200 << 20), b'tail'))\n"
        "with open_registries() as run:\n"
        "    print(Uploader(run.repository(Reference(sys.argv[2], 'x'))).put(recipe, digest_layer(recipe)))\n"
        "print(next(x.split()[1] for x in open('/proc/self/status') if x.startswith('VmHWM')))\n"
    )
    with serve(keep=False) as registry:
        command = [sys.executable, "-c", code, str(path), registry.host]
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, cwd=Path(__file__).parent.parent
        )
        size, memory = map(int, done.stdout.split())
        assert size == (200 << 20) + 8
        assert registry.count("PUT") == 1
    assert memory < 60 << 10


# Bases ---------------------------------------------------------------------------------------------


@pytest.fixture
def based(registry: FakeRegistry, tmp_path: Path):
    """A base in the registry's repository `base/python`: an index of two platforms, amd64 the second."""
    plan = make_plan(tmp_path / "base-model", sizes=(9000,))
    base = assemble_image(plan)
    with client() as run:
        output = RegistryOutput(Reference(registry.host, "base/python", "amd64"))
        write_image(base, [output], cache=NOWHERE, registries=run.registries)
    other = registry.add_manifest("base/python", b'{"schemaVersion":2,"arm":1}', MANIFEST)
    entries = [
        {"mediaType": MANIFEST, "digest": other, "size": 9, "platform": {"os": "linux", "architecture": "arm64"}},
        {"mediaType": MANIFEST, "digest": base.digest, "size": 9, "platform": {"os": "linux", "architecture": "amd64"}},
    ]  # fmt: skip
    value = {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}
    index = registry.add_manifest("base/python", value, INDEX, "latest")
    registry.seen.clear()
    return registry, base, index


def test_a_base_is_taken_by_the_digest_of_an_index_or_a_manifest_without_its_layers(based) -> None:
    registry, base, index = based
    for digest in (index, base.digest):
        with client() as run:
            found = open_base(parse_base(f"{registry.host}/base/python:latest@{digest}"), run.registries)
        assert found.digest == base.digest
        assert found.name == f"{registry.host}/base/python:latest@{digest}"
        assert [layer.digest for layer in found.layers] == [layer.descriptor.digest for layer in base.layers]
        assert found.config == json.loads(base.config)
    small = {f"/v2/base/python/blobs/{base.config_digest}"}
    assert {item.path for item in registry.seen if "/blobs/" in item.path} == small


def test_base_layers_are_mounted_in_the_same_registry_and_streamed_to_another(based) -> None:
    registry, base, index = based
    with serve() as other:
        for place in (registry, other):
            with client() as run:
                source = open_base(parse_base(f"{registry.host}/base/python@{index}"), run.registries)
                image = assemble_image(ImagePlan(source, (rules_layer("new"),), CONFIG))
                write_image(image, [target(place)], cache=NOWHERE, registries=run.registries)
            assert place.manifests[NAME, "v1"][0] == image.manifest
        layers = [f"sha256:{layer.digest.sha256}" for layer in base.layers]
        assert registry.count("POST", "mount=") == len(set(layers))
        assert registry.count("GET", f"base/python/blobs/({'|'.join(layers)})") == len(set(layers))
        for digest in layers:
            assert other.blobs[digest] == registry.blobs[digest]
    manifest = json.loads(image.manifest)
    assert manifest["annotations"]["org.opencontainers.image.base.digest"] == base.digest
    history = json.loads(image.config)["history"]
    assert history[: len(base.layers)] == json.loads(base.config)["history"]


def test_a_mount_that_is_not_granted_is_an_upload_and_leaves_no_open_session(based) -> None:
    registry, _, index = based
    registry.mounts = False
    with client() as run:
        source = open_base(parse_base(f"{registry.host}/base/python@{index}"), run.registries)
        image = assemble_image(ImagePlan(source, (rules_layer("new"),), CONFIG))
        write_image(image, [target(registry)], cache=NOWHERE, registries=run.registries)
    assert registry.manifests[NAME, "v1"][0] == image.manifest
    assert registry.sessions == {}


def test_a_remote_base_is_downloaded_into_a_layout_and_checked_there(based, tmp_path: Path) -> None:
    registry, base, index = based

    def plan_for(run: Run) -> ImagePlan:
        source = open_base(parse_base(f"{registry.host}/base/python@{index}"), run.registries)
        return ImagePlan(source, (rules_layer("new"),), CONFIG)

    with client() as run:
        image = assemble_image(plan_for(run))
        write_image(image, [LayoutOutput(tmp_path / "good")], cache=NOWHERE, registries=run.registries)
    assert read_base(tmp_path / "good").digest == image.digest
    victim = f"sha256:{base.layers[0].digest.sha256}"
    data = registry.blobs[victim]
    registry.blobs[victim] = data[:-1] + bytes([data[-1] ^ 1])
    with client() as run:
        image = assemble_image(plan_for(run))
        with pytest.raises(ImageError, match="is damaged"):
            write_image(image, [LayoutOutput(tmp_path / "bad")], cache=NOWHERE, registries=run.registries)
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize(
    ("kind", "value", "wording"),
    [
        (
            "application/vnd.docker.distribution.manifest.v1+prettyjws",
            {"schemaVersion": 1},
            "no image of today",
        ),
        (INDEX, {"schemaVersion": 2, "mediaType": INDEX, "manifests": []}, "needs one image for linux/amd64"),
        (MANIFEST, {"schemaVersion": 2, "mediaType": MANIFEST}, "do not describe the same layers"),
        (MANIFEST, b"[]", "is not a JSON object"),
    ],
)
def test_what_is_no_base_is_refused(registry: FakeRegistry, kind: str, value: object, wording: str) -> None:
    digest = registry.add_manifest("b", value, kind)
    with client() as run, pytest.raises(ImageError, match=wording):
        open_base(parse_base(f"{registry.host}/b@{digest}"), run.registries)


def test_a_docker_schema_2_base_becomes_an_oci_image_of_the_same_blobs(registry: FakeRegistry) -> None:
    docker = "application/vnd.docker"
    layer = registry.add_blob("b", b"layer")
    config = {
        "architecture": "amd64",
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + "1" * 64]},
    }
    config_digest = registry.add_blob("b", json.dumps(config).encode())
    manifest = {
        "schemaVersion": 2, "mediaType": f"{docker}.distribution.manifest.v2+json",
        "config": {"mediaType": f"{docker}.container.image.v1+json", "digest": config_digest, "size": 9},
        "layers": [{"mediaType": f"{docker}.image.rootfs.diff.tar.gzip", "digest": layer, "size": 5}],
    }  # fmt: skip
    digest = registry.add_manifest("b", manifest, manifest["mediaType"])
    with client() as run:
        base = open_base(parse_base(f"{registry.host}/b@{digest}"), run.registries)
        image = assemble_image(ImagePlan(base, (rules_layer("new"),), CONFIG))
    first = json.loads(image.manifest)["layers"][0]
    assert (first["mediaType"], first["digest"]) == ("application/vnd.oci.image.layer.v1.tar+gzip", layer)


def test_a_layout_base_can_be_pinned_by_digest(tmp_path: Path, image: Image) -> None:
    write_image(image, [LayoutOutput(tmp_path / "l")], cache=NOWHERE)
    with client() as run:
        pinned = parse_base(f"oci:{tmp_path / 'l'}@{image.digest}")
        assert pinned == LayoutBase(tmp_path / "l", image.digest)
        assert open_base(pinned, run.registries).digest == image.digest
        with pytest.raises(ImageError, match="holds no sha256:000"):
            open_base(LayoutBase(tmp_path / "l", "sha256:" + "0" * 64), run.registries)


@pytest.mark.parametrize("text", ["r.example.test/a:v1", "r.example.test/a", "registry:r.example.test/a:v1"])
def test_a_registry_base_without_a_digest_is_an_error(text: str) -> None:
    with pytest.raises(UsageError, match="needs a digest"):
        parse_base(text)


# What a layout holds about its image ---------------------------------------------------------------


def test_signatures_in_a_layout_are_pushed_with_the_image(
    registry: FakeRegistry, image: Image, tmp_path: Path
) -> None:
    write_image(image, [LayoutOutput(tmp_path / "l")], tag="t:1", cache=NOWHERE)
    folder, blobs = tmp_path / "l", tmp_path / "l/blobs/sha256"
    (blobs / sha256(b"{}")[7:]).write_bytes(b"{}")
    part = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": sha256(b"{}"), "size": 2}
    subject = {"mediaType": MANIFEST, "digest": image.digest, "size": len(image.manifest)}
    manifest = json.dumps(
        {"schemaVersion": 2, "mediaType": MANIFEST, "config": part, "layers": [part], "subject": subject}
    ).encode()
    (blobs / sha256(manifest)[7:]).write_bytes(manifest)
    index = json.loads((folder / "index.json").read_text())
    index["manifests"].append({"mediaType": MANIFEST, "digest": sha256(manifest), "size": len(manifest)})
    (folder / "index.json").write_text(json.dumps(index))
    with client() as run:
        stored = stored_image(folder, "t:1")
        write_image(stored, [target(registry)], cache=NOWHERE, registries=run.registries)
        assert [item["digest"] for item in run.repository(registry).referrers(image.digest)] == [
            sha256(manifest)
        ]


# Profiles ------------------------------------------------------------------------------------------

SHIPPED = tomllib.loads((Path(__file__).parent.parent / "ralbuild/data/registries.toml").read_text())


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_every_profile_is_complete(name: str) -> None:
    profile = find_profile("h", name, {})
    assert profile.max_layers >= 125
    assert profile.upload[0] == "single"
    assert ("chunked" in profile.upload) == (profile.chunk_bytes > 0)


def test_an_image_above_a_cap_is_refused_before_anything_is_sent(
    registry: FakeRegistry, image: Image
) -> None:
    from dataclasses import replace

    profile = find_profile("h", "ghcr", {})
    big = replace(image.layers[1], digest=LayerDigest("0" * 64, profile.max_layer_bytes + 1))
    with pytest.raises(ImageError, match=r"takes at most 10000000000 \(documented limit\)") as caught:
        check_limits(replace(image, layers=(image.layers[0], big)), profile)
    assert "--reshard 5GB" in caught.value.problems[0].hint
    assert caught.value.exit_code == 6
    bigger = replace(image, layers=(big,))
    with client(profile="ghcr") as run, pytest.raises(ImageError, match="takes at most"):
        write_image(bigger, [target(registry)], cache=NOWHERE, registries=run.registries)
    assert registry.seen == []


def test_chunks_stay_below_the_number_a_registry_takes() -> None:
    ecr = find_profile("h", "ecr", {})
    size = 50_000_000_000
    assert -(-size // ecr.chunk(size)) <= ecr.max_chunks == 4200
    assert find_profile("h", "ecr-public", {}).chunk(9_000_000_000) * 1000 >= 9_000_000_000


def test_the_users_file_names_a_profile_for_a_host_and_makes_new_ones(tmp_path: Path) -> None:
    folder = tmp_path / "ralbuild"
    folder.mkdir()
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert find_profile("r.test", "", env).name == "generic"
    (folder / "registries.toml").write_text(
        '[host."r.test"]\nprofile = "mine"\n[profile.mine]\nbased_on = "harbor"\nmax_layer_bytes = 7\n'
    )
    mine = find_profile("r.test", "", env)
    assert (mine.name, mine.max_layer_bytes, mine.upload) == ("mine", 7, ("single",))
    assert find_profile("r.test", "ghcr", env).name == "ghcr"
    assert find_profile("other.test", "", env).name == "generic"
    with pytest.raises(UsageError, match="no profile 'gcr'") as caught:
        find_profile("r.test", "gcr", env)
    assert "ecr-public" in caught.value.problems[0].hint
    for text in (
        "[profile.x]\nmax_layer = 1\n",
        '[profile.x]\nupload = ["ftp"]\n',
        "x",
        "[profile]\na = 1\n",
    ):
        (folder / "registries.toml").write_text(text)
        with pytest.raises(UsageError, match=r"registries\.toml"):
            find_profile("r.test", "", env)


# Being stopped, and proxies ------------------------------------------------------------------------


def test_a_push_that_is_interrupted_ends_at_once_and_publishes_nothing(tmp_path: Path, image: Image) -> None:
    """The registry takes the first bytes of every blob and then nothing more."""
    write_image(image, [LayoutOutput(tmp_path / "l")], cache=NOWHERE)
    reached = threading.Event()

    def stall(handler: Handler) -> bool:
        if handler.command != "PUT":
            return False
        reached.set()
        time.sleep(120)
        return True

    with serve() as registry:
        registry.faults.append(stall)
        command = [sys.executable, "-m", "ralbuild.cli.main", "push", f"oci:{tmp_path / 'l'}"]
        process = subprocess.Popen(
            [*command, f"registry:{registry.host}/{NAME}:v1"], stderr=subprocess.PIPE, text=True,
            cwd=Path(__file__).parent.parent, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "x")},
        )  # fmt: skip
        assert reached.wait(120)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 130, said
        assert "interrupted" in said
        assert "Traceback" not in said
        assert registry.manifests == {}


def test_a_proxy_of_the_environment_carries_tls_and_never_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ralbuild.image.registry.transport import _proxy

    for name in ("https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert _proxy("r.example.test") is None
    monkeypatch.setenv("https_proxy", "http://proxy.example.test:3128")
    monkeypatch.setenv("no_proxy", "inside.example.test")
    assert _proxy("r.example.test") == ("proxy.example.test", 3128)
    assert _proxy("inside.example.test") is None
    assert _proxy("127.0.0.1") is None


def test_a_changed_rule_sends_kilobytes(registry: FakeRegistry, tmp_path: Path) -> None:
    for rules in ("bold: risk", "bold: audit"):
        image = make_image(tmp_path / "model", rules)
        with client() as run:
            written = write_image(image, [target(registry)], cache=NOWHERE, registries=run.registries)
    assert [layer.name for layer in written.layers if not layer.reused] == ["rules"]
    assert written.bytes_written < 10_000


def test_a_list_of_referrers_is_not_continued_on_another_host(registry: FakeRegistry) -> None:
    def listed(handler: Handler) -> bool:
        if "/referrers/" not in handler.path:
            return False
        handler.answer(
            200, b'{"manifests":[{"digest":"a"}]}', Link='<https://evil.example.test/x>; rel="next"'
        )
        return True

    registry.faults.append(listed)
    with client() as run:
        assert run.repository(registry).referrers(FULL) == ({"digest": "a"},)


def test_the_users_file_names_the_login_of_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker Hub's password is filed under another name than its registry's."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    auth = base64.b64encode(b"user:secret").decode()
    config_file(tmp_path, {"auths": {"https://login.example.test/v1/": {"auth": auth}}})
    (tmp_path / "ralbuild").mkdir()
    with serve(auth="bearer") as registry:
        file = tmp_path / "ralbuild/registries.toml"
        file.write_text(f'[host."{registry.host}"]\nlogin = "login.example.test"\n')
        with client() as run:
            run.uploader(registry).put(RECIPE, DIGEST)
        assert registry.blobs[FULL] == DATA
        file.write_text(f'[host."{registry.host}"]\nlogn = "x"\n')
        with client() as run, pytest.raises(UsageError, match="needs tables"):
            run.repository(registry)
