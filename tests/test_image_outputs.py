"""`--output` and `--tag`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ralbuild.errors import UsageError
from ralbuild.image.outputs import (
    ArchiveOutput,
    DockerOutput,
    LayoutOutput,
    Output,
    RegistryOutput,
    parse_output,
    parse_tag,
)
from ralbuild.image.registry.reference import Reference


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("oci:./x", LayoutOutput(Path("x"))),
        ("oci:/a b/c:d", LayoutOutput(Path("/a b/c:d"))),
        ("archive:f.tar", ArchiveOutput(Path("f.tar"))),
    ],
)
def test_an_output_names_a_folder_or_a_file(text: str, expected: Output) -> None:
    assert parse_output(text) == expected


@pytest.mark.parametrize(
    ("text", "host", "repository", "tag"),
    [
        ("registry:localhost:5000/demo", "localhost:5000", "demo", "latest"),
        ("registry:r.example.test/a/b:v1", "r.example.test", "a/b", "v1"),
        ("registry:[::1]:5000/a:v1", "[::1]:5000", "a", "v1"),
    ],
)
def test_a_registry_is_named_with_its_host(text: str, host: str, repository: str, tag: str) -> None:
    assert parse_output(text) == RegistryOutput(Reference(host, repository, tag))


def test_docker_is_an_output_of_its_own() -> None:
    assert parse_output("docker") == DockerOutput()


@pytest.mark.parametrize(
    ("text", "wording"),
    [
        ("docker:demo", "needs docker alone"),
        ("registry:demo", "needs HOST/"),
        ("registry:team/demo:v1", "the host must be written out"),
        ("registry:r.example.test/Demo", "needs HOST/"),
        ("registry:r.example.test/a@sha256:" + "0" * 64, "needs HOST/NAME"),
        ("registry:user:secret@r.example.test/a", "needs HOST/"),
    ],
)
def test_what_is_no_place_to_push_to_is_refused_with_a_hint(text: str, wording: str) -> None:
    with pytest.raises(UsageError, match=wording) as caught:
        parse_output(text)
    assert caught.value.problems[0].hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["", "oci", "oci:", "archive:", "dir:x", "./x", "OCI:x"])
def test_anything_else_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(UsageError, match="needs oci:DIR, archive:FILE, docker or registry:"):
        parse_output(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("demo", "demo:latest"),
        ("demo:1", "demo:1"),
        ("team/demo-x_y.z:V1.0-rc_1", "team/demo-x_y.z:V1.0-rc_1"),
        ("localhost:5000/team/demo", "localhost:5000/team/demo:latest"),
        ("Registry.example.test/demo:1", "Registry.example.test/demo:1"),
        ("a__b/c---d:1", "a__b/c---d:1"),
    ],
)
def test_a_tag_is_an_image_name_with_latest_as_its_default(text: str, expected: str) -> None:
    assert parse_tag(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":1",
        "demo:",
        "Demo:1",
        "demo:a b",
        "demo:1\n",
        "demo:" + "x" * 129,
        "/demo",
        "demo/",
        "a//b",
        "demo:-1",
        "demo@sha256:" + "0" * 64,
        "x" * 256,
    ],
)
def test_a_name_that_engines_refuse_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="needs an image name"):
        parse_tag(text)
