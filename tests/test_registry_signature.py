"""A signature that is read from a registry holds for exactly one manifest, and for one key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from registry_server import FakeRegistry, serve
from supply_cases import Work, build, make_key, ralbuild, signed_work

from ralbuild.errors import GateError, ImageError, UsageError
from ralbuild.release.signed import check_signature
from ralbuild.release.source import Source


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    work = signed_work(tmp_path_factory.mktemp("signed"))
    make_key(work.root, "other")
    build(work.root, output="plain")
    return work


@pytest.fixture
def registry(work: Work) -> Iterator[FakeRegistry]:
    with serve() as found:
        for layout in ("out", "plain"):
            done = ralbuild("push", f"oci:{layout}", f"registry:{found.host}/team/{layout}", cwd=work.root)
            assert done.code == 0, done.err
        yield found


def source(registry: FakeRegistry, name: str, digest: str) -> Source:
    reference = f"{registry.host}/team/{name}@{digest}"
    return Source(reference, "registry", reference)


def test_only_the_key_that_signed_this_manifest_is_accepted(work: Work, registry: FakeRegistry) -> None:
    signed = source(registry, "out", work.digest)
    both = [work.root / "other.pub", work.root / "sign.pub"]
    assert check_signature(signed, both[1:]) == check_signature(signed, both)
    with pytest.raises(GateError, match="signature: none by a key"):
        check_signature(signed, both[:1])
    # The same image without a signature in another repository, and a digest that is not there.
    for other in (source(registry, "plain", work.digest), source(registry, "out", "sha256:" + "0" * 64)):
        with pytest.raises(GateError, match="signature: none by a key"):
            check_signature(other, both)


def test_a_signature_that_the_registry_damages_is_an_error(work: Work, registry: FakeRegistry) -> None:
    signed = source(registry, "out", work.digest)
    for digest, data in registry.blobs.items():
        if b"dsseEnvelope" in data:
            registry.blobs[digest] = data.replace(b'"sig"', b'"sgi"')
    with pytest.raises(ImageError, match="damaged"):
        check_signature(signed, [work.root / "sign.pub"])


def test_an_engine_keeps_no_signatures(work: Work) -> None:
    with pytest.raises(UsageError, match="cannot be checked"):
        check_signature(Source("docker:x", "docker", "x"), [work.root / "sign.pub"])


def test_a_layout_is_read_whole(work: Work, tmp_path: Path) -> None:
    layout = Source("oci:out", "oci", str(work.root / "out"))
    assert check_signature(layout, [work.root / "sign.pub"]).endswith("checks")
    with pytest.raises(GateError, match="signature"):
        check_signature(layout, [work.root / "other.pub"])
