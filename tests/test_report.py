"""Progress: standard output stays clean, text is text, and every mode tells the same story."""

from __future__ import annotations

import io
import json

import pytest

from ralbuild.report import JsonReport, LineReport, RichReport, format_bytes, format_seconds, make_report


def tell(report) -> None:
    with report.stage("verify") as stage:
        report.step("reading a[0] [bold]")
        report.progress(5, 10, "B")
        report.note("left out: x[1].bin")
        stage.summary = "2 tensors [/]"


@pytest.mark.parametrize("kind", [LineReport, RichReport, JsonReport])
def test_text_with_brackets_is_never_markup(kind, capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    report = kind(out)
    tell(report)
    assert "left out: x[1].bin" in out.getvalue()
    assert "2 tensors [/]" in out.getvalue()
    assert capsys.readouterr().out == ""
    assert [stage.name for stage in report.stages] == ["verify"]


def test_json_is_one_object_a_line() -> None:
    out = io.StringIO()
    tell(make_report("json", stream=out))
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["begin", "step", "progress", "note", "end"]


def test_quiet_says_nothing() -> None:
    out = io.StringIO()
    tell(make_report("auto", quiet=True, stream=out))
    assert out.getvalue() == ""


def test_auto_is_plain_where_nothing_can_move(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_report("auto", stream=io.StringIO()), LineReport)


def test_a_failed_stage_is_not_reported_as_done() -> None:
    report = LineReport(io.StringIO())
    with pytest.raises(ValueError), report.stage("fold"):
        raise ValueError
    assert report.stages == []


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (269_060_552, "269 MB"), (1_234_567, "1.23 MB"), (46_000_000_000, "46 GB")],
)  # fmt: skip
def test_sizes_are_decimal(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.042, "0.04 s"), (12.34, "12.3 s"), (200, "3 min 20 s")])
def test_durations_are_short(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
