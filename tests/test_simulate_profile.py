"""`--profile`: uncoalesced accesses and bank conflicts counted by hand, source lines that add up, an estimate."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
from compile_support import ARTICLE_KERNEL, compiled
from model_factory import write_model
from simulate_support import program

from ralbuild.cli import simulate_cmd
from ralbuild.compile import aot
from ralbuild.simulate.profile import Profiler
from ralbuild.simulate.ptx.parser import parse_module
from ralbuild.simulate.roofline import BOARDS, estimate
from ralbuild.simulate.session import Session


def traffic(body: str, threads: int = 64):
    """The one line with an access of a kernel over 64 KiB."""
    profiler = Profiler()
    arguments = {"p0": np.zeros(1 << 16, np.uint8)}
    text = program(body, 1, threads)
    session = Session(parse_module(text), "t", (2, 1, 1), arguments, observers=[profiler])
    session.launch()
    (line,) = profiler.result(parse_module(text), "t", 1).lines.values()
    return line[1]


@pytest.mark.parametrize(
    ("stride", "size", "sectors", "scattered"),
    [
        (4, 4, 4, 0),  # 32 neighbours of 4 bytes: 128 bytes are 4 sectors
        (8, 4, 8, 1),
        (32, 4, 32, 1),
        (128, 4, 32, 1),
        (0, 4, 1, 0),  # one word for all
        (16, 16, 16, 0),
    ],
)
def test_sectors_and_uncoalesced_warps_are_those_of_the_addresses(
    stride: int, size: int, sectors: int, scattered: int
) -> None:
    registers = "{%r5,%r6,%r7,%r8}" if size == 16 else "%r5"
    vector = ".v4" if size == 16 else ""
    found = traffic(f"mul.wide.u32 %rd9, %i, {stride}; add.u64 %rd3, %rd0, %rd9;\nld.global{vector}.b32 {registers}, [%rd3];\nret;")  # fmt: skip
    warps = 4
    assert (found.requests, found.sectors, found.scattered) == (warps, warps * sectors, warps * scattered)
    assert found.bytes == warps * 32 * size


@pytest.mark.parametrize(("stride", "turns"), [(4, 1), (8, 2), (16, 4), (128, 32), (0, 1), (132, 1)])
def test_lanes_that_meet_in_a_bank_take_turns(stride: int, turns: int) -> None:
    body = f""".shared .align 16 .b8 buf[16384];
mov.b32 %r1, buf; mul.lo.s32 %r2, %t, {stride}; add.u32 %r3, %r1, %r2;
ld.shared.b32 %r4, [%r3];\nret;"""
    found = traffic(body)
    assert found.conflicts == 4 * (turns - 1)


def test_the_estimate_is_the_arithmetic_of_its_three_bounds() -> None:
    board = BOARDS["sm_80"]
    found = estimate("sm_80", blocks=4, warps=8, instructions=8000, sector_bytes=3_110_000)
    assert found is not None
    assert found.memory == pytest.approx(2.0)  # 3.11 MB at 1.555 TB/s
    assert found.issue == pytest.approx(8000 / 4 / 4 / board.clock * 1e6)
    assert found.chain == pytest.approx(1000 * 4 / board.clock * 1e6)
    assert found.bound == "chain"
    assert estimate("sm_75", 1, 1, 1, 1) is None


def test_the_source_lines_of_a_profile_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(aot, "run_worker", lambda spec, arch, *_, **__: compiled(spec.name, arch))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    Path("ral-config.yaml").write_text(
        'version: "0.3"\nmodel: tiny\nmax_seq_len: 512\nbuild: {targets: [sm_80]}\n'
        'postprocessing: {output_transformers: [{name: "html_enhancer", config: {bold_terms: ["risk"]}}]}\n'
    )
    Path("transformers").mkdir()
    Path("transformers/html_enhancer.py").write_bytes(ARTICLE_KERNEL.read_bytes())
    parser = argparse.ArgumentParser()
    simulate_cmd.add_arguments(parser)
    arguments = ["--model", "model", "--kernel", "html_enhancer", "--profile", "--quiet"]
    assert simulate_cmd.run(parser.parse_args([*arguments, "--json"])) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    source = answer["profile"]["source"]
    assert sum(item["warp_instructions"] for item in source) == answer["warp_instructions"]
    for key in ("requests", "bytes", "sectors", "uncoalesced", "bank_conflicts"):
        assert sum(item[key] for item in source) == sum(item[key] for item in answer["profile"]["lines"])
    stores = [item for item in source if "tl.store" in item["text"]]
    assert [item["place"].rpartition(":")[2] for item in stores] == ["22"]
    assert answer["profile"]["estimate"]["board"] == "A100 40 GB"
    assert simulate_cmd.run(parser.parse_args(arguments)) == 0
    assert "estimate, not a measurement" in capsys.readouterr().out
