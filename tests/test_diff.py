"""`ralbuild diff` and `inspect`: what changed by its place, and bytes that other tools agree with."""

from __future__ import annotations

import html.parser
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from supply_cases import Work, build, make_key, ralbuild, signed_work, write_small_base

from ralbuild.contract.bundle import Kernel, KernelObject, ObjectRef
from ralbuild.image.diff import _kernels

BOLD = (
    "postprocessing:\n  output_transformers:\n    - name: html_enhancer\n      config: {bold_terms: [%s]}\n"
)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    """Images: ``out`` (signed), ``bold`` with another rule, ``patched`` on another base, ``weights`` with others."""
    work = signed_work(tmp_path_factory.mktemp("signed"))
    root = work.root
    config = root / "ral-config.yaml"
    plain = config.read_text()
    config.write_text(plain.replace("max_seq_len: 512", "max_seq_len: 256") + BOLD % "risk")
    build(root, output="bold")
    config.write_text(plain)
    write_small_base(root / "newbase", version="2025c-1", content=b"patched\n")
    build(root, "--base", "oci:newbase", output="patched")
    return work


def diff(root: Path, old: str, new: str) -> dict[str, Any]:
    done = ralbuild("diff", f"oci:{old}", f"oci:{new}", "--json", cwd=root)
    assert done.code == 0, done.err
    return json.loads(done.out)


def sizes(layout: Path) -> dict[str, int]:
    """Return size by digest of every blob of the image, as skopeo names them."""
    store = ["skopeo", "inspect", "--raw", f"oci:{layout}:team/tiny:1"]
    raw = subprocess.run(store, capture_output=True, check=True).stdout
    manifest = json.loads(raw)
    out = {item["digest"]: item["size"] for item in (manifest["config"], *manifest["layers"])}
    return out | {"manifest " + str(hash(raw)): len(raw)}


def test_a_changed_rule_is_named_by_its_line(work: Work) -> None:
    found = diff(work.root, "out", "bold")
    (rule,) = found["rules"]
    assert (rule["kind"], rule["name"], rule["detail"]) == ("added", "bold 'risk'", "html_enhancer")
    assert rule["place"].startswith("ral-config.yaml:9:")
    assert [(item["kind"], item["place"], item["name"]) for item in found["config"]][:2] == [
        ("removed", "ral-config.yaml:3", "max_seq_len: 512"),
        ("added", "ral-config.yaml:3", "max_seq_len: 256"),
    ]
    assert ("max_seq_len", "512 -> 256") in {(item["name"], item["detail"]) for item in found["settings"]}
    assert {item["name"] for item in found["tables"]} == {"transducer"}
    assert found["packages"] == found["model"] == found["kernels"] == []
    states = [(layer["state"], layer["kind"]) for layer in found["layers"]]
    assert states == [
        *[("same", "base")] * 2,
        *[("same", "weights")] * 2,
        *[("same", "small")] * 3,
        ("new", "small"),
        ("gone", "small"),
    ]


def test_a_rule_that_only_moved_is_the_same_rule(work: Work, tmp_path: Path) -> None:
    shutil.copytree(work.root, tmp_path / "w")
    root = tmp_path / "w"
    config = root / "ral-config.yaml"
    config.write_text(config.read_text() + BOLD % "risk, audit")
    build(root, output="one")
    config.write_text(
        config.read_text().replace("model: tiny", "\nmodel: tiny").replace("risk, audit", "audit, yield")
    )
    build(root, output="two")
    found = {(item["kind"], item["name"]) for item in diff(root, "one", "two")["rules"]}
    assert found == {("removed", "bold 'risk'"), ("added", "bold 'yield'")}


def test_the_bytes_to_push_are_the_blobs_that_skopeo_sees_in_one_only(work: Work) -> None:
    for new in ("bold", "patched"):
        before, after = sizes(work.root / "out"), sizes(work.root / new)
        expected = sum(size for digest, size in after.items() if digest not in before)
        moved = diff(work.root, "out", new)["bytes"]
        assert moved["push"] == moved["pull"] == expected
        assert moved["total"] == sum(after.values())


def test_another_base_moves_everything_above_it_into_dockers_own_store(work: Work) -> None:
    """moby's layer store knows a layer by its chain id, a hash over all below it (image-spec, config.md)."""
    found = diff(work.root, "out", "patched")
    layers = [layer for layer in found["layers"] if layer["state"] != "gone"]
    assert [layer["restacked"] for layer in layers] == [False, False, True, True, True, True, True, True]
    everything = sum(layer["size"] for layer in layers)
    assert found["bytes"]["unpack"] == everything
    assert found["bytes"]["pull_docker"] > everything > found["bytes"]["pull"]
    assert [(item["kind"], item["name"], item["detail"]) for item in found["packages"]] == [
        ("changed", "deb tzdata", "2025b-0+deb12u2 -> 2025c-1")
    ]
    assert found["rules"] == found["config"] == []


def test_an_image_does_not_differ_from_itself(work: Work) -> None:
    found = diff(work.root, "out", "out")
    assert found["same"]
    assert [
        name for name in ("rules", "config", "kernels", "model", "labels", "packages") if found[name]
    ] == []
    assert found["bytes"] | {"total": 0} == {"push": 0, "pull": 0, "pull_docker": 0, "unpack": 0, "total": 0}
    assert "the same image" in ralbuild("diff", "oci:out", "oci:out", cwd=work.root).out


def test_a_kernel_change_says_whether_source_or_code_changed() -> None:
    ref = ObjectRef("ab" * 32, 10)
    made = KernelObject("sm_80", ref, ref, 32, 0, 0, ("k",))
    old = Kernel("k", "k", "00" * 32, False, 4, {}, (), (made,))
    other = replace(made, cubin=replace(ref, sha256="cd" * 32), registers=40)
    (change,) = _kernels((old,), (replace(old, source_sha256="11" * 32, objects=(other,)),))
    assert change.detail == "source changed; sm_80 other code (32 -> 40 registers)"
    (change,) = _kernels((old,), (replace(old, objects=(made, replace(made, arch="sm_90"))),))
    assert change.detail == "new for sm_90"
    assert [item.kind for item in _kernels((old,), (replace(old, name="x"),))] == ["removed", "added"]


@pytest.mark.parametrize("columns", [40, 60, 140])
@pytest.mark.parametrize("verb", [("inspect", "oci:out"), ("diff", "oci:out", "oci:patched")])
def test_no_line_is_wider_than_the_terminal(work: Work, columns: int, verb: tuple[str, ...]) -> None:
    done = ralbuild(*verb, cwd=work.root, env={"COLUMNS": str(columns)})
    assert done.code == 0, done.err
    assert max(len(line) for line in done.out.splitlines()) <= columns


def test_inspect_tells_the_image_s_part_from_the_serving_side_s(work: Work) -> None:
    answer = json.loads(ralbuild("inspect", "oci:out", "--json", cwd=work.root).out)
    by = {
        side: {item["what"] for item in answer["boundary"] if item["by"] == side}
        for side in ("image", "serving")
    }
    assert {"rules", "routes", "kernels", "weights", "tokenizer", "engine"} <= by["image"]
    assert {"runtime rules", "route", "prompts", "access", "host"} <= by["serving"]
    assert answer["runtime_rules"] is None
    assert answer["sbom"] == {
        "model files": 8, "model license": "Apache-2.0", "Debian packages": 2, "Python packages": 1, "kernels": 0, "rules": 9,
    }  # fmt: skip
    assert {item["what"] for item in answer["artifacts"]} == {
        "signature", "signature for cosign 1 and 2", "bill of materials", "signed bill of materials", "signed provenance",
    }  # fmt: skip


def test_inspect_shows_the_serving_side_s_rules_only_when_their_signature_holds(work: Work) -> None:
    source, signed = work.root / "runtime-rules.yaml", work.root / "rules.json"
    source.write_text(
        'version: "0.3"\nserial: 7\nredact: [{text: bluebird}]\nrefuse: [{text: x}, {text: y}]\n'
    )
    assert ralbuild("rules", "compile", source, "--key", "sign.key", "--out", signed, cwd=work.root).code == 0
    make_key(work.root, "other")
    shown = ("inspect", "oci:out", "--runtime-rules", signed, "--rules-key")
    text = ralbuild(*shown, "sign.pub", cwd=work.root, env={"COLUMNS": "140"}).out
    assert "runtime rules  1 redact, 2 refuse; serial 7, signed by" in text
    assert "rules of the serving side, after them (3)" in text
    assert "bluebird" in text
    refused = ralbuild(*shown, "other.pub", cwd=work.root)
    assert refused.code == 2
    assert "is not signed by the key" in refused.err
    assert "bluebird" not in refused.out + refused.err


class Page(html.parser.HTMLParser):
    """Collects what a page shows, draws and would load."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.loads: list[str] = []
        self.open: list[str] = []
        self.rects = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.loads += [f"{tag} {name}" for name in ("src", "href", "data", "action") if name in values]
        self.loads += [tag] if tag in ("script", "iframe", "object", "embed", "link") else []
        self.rects += tag == "rect"
        if tag == "rect" and "x" in values:
            start, wide = (float(str(values[name]).rstrip("%")) for name in ("x", "width"))
            assert 0 <= start <= start + wide <= 100.01
        if tag not in ("meta", "rect") or (tag == "rect" and values.get("height")):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.rects += tag == "rect"

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("verb", [("inspect", "oci:out"), ("diff", "oci:out", "oci:bold")])
def test_a_page_is_whole_loads_nothing_and_draws_every_layer(
    work: Work, verb: tuple[str, ...], tmp_path: Path
) -> None:
    done = ralbuild(*verb, "--html", tmp_path / "page.html", cwd=work.root)
    assert done.code == 0, done.err
    source = (tmp_path / "page.html").read_text()
    page = Page()
    page.feed(source)
    assert (page.loads, page.open) == ([], [])
    assert "url(" not in source
    assert "@import" not in source
    assert page.rects >= 2 * 7, "each layer in a whole bar, and a bar of its own or in the other image's"
    assert work.digest in page.text
    assert "prefers-color-scheme: dark" in source
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_what_a_config_says_cannot_become_markup(work: Work, tmp_path: Path) -> None:
    shutil.copytree(work.root, tmp_path / "w")
    root = tmp_path / "w"
    config = root / "ral-config.yaml"
    config.write_text(config.read_text() + BOLD % '"<script>alert(1)</script>", "a\\x1b[31mb"')
    build(root, output="odd")
    for verb in (("inspect", "oci:odd"), ("diff", "oci:out", "oci:odd")):
        done = ralbuild(*verb, "--html", "page.html", cwd=root)
        assert done.code == 0, done.err
        assert "\x1b" not in done.out
        assert "<script" not in (root / "page.html").read_text()
        assert "&lt;script&gt;" in (root / "page.html").read_text()


def test_a_page_that_cannot_be_written_is_an_error_of_this_machine(work: Work) -> None:
    done = ralbuild("inspect", "oci:out", "--html", "missing/page.html", cwd=work.root)
    assert (done.code, "missing/page.html" in done.err) == (7, True)
    assert done.out == ""


def test_only_images_of_ralbuild_are_compared(work: Work) -> None:
    done = ralbuild("diff", "oci:out", "oci:base", cwd=work.root)
    assert (done.code, "is it an image of ralbuild?" in done.err) == (6, True)
