"""What `ralbuild simulate --profile` prints: by line of the PTX, by line of the source, and an estimate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ralbuild.compile.source_lines import SourceLines
    from ralbuild.simulate.gate import KernelRun
    from ralbuild.simulate.profile import Traffic

SHOWN = 16
"""Source lines that the text shows, those with the most instructions; JSON has all."""


def profile_answer(run: KernelRun, lines: SourceLines | None) -> dict[str, Any]:
    """Return a run's profile as plain values."""
    from ralbuild.simulate.roofline import estimate

    assert run.profile is not None
    done, profile = run.comparison, run.profile
    launches = max(1, profile.launches)
    issued = done.counters.warps if done.counters else 0
    found = estimate(run.arch, done.blocks, done.warps, issued / launches, profile.global_bytes / launches)
    answer: dict[str, Any] = {
        "global_bytes": profile.global_bytes,
        "bank_conflicts": profile.conflicts,
        "lines": [
            {"line": line, "text": text, **_traffic(traffic)}
            for line, (text, traffic) in profile.lines.items()
        ],
        "source": _by_source(run, lines) if lines else [],
        "estimate": None,
    }
    if found is not None:
        answer["estimate"] = {
            "board": found.board,
            "memory_us": round(found.memory, 2),
            "issue_us": round(found.issue, 2),
            "chain_us": round(found.chain, 2),
            "bound": found.bound,
        }
    return answer


def _traffic(traffic: Traffic) -> dict[str, int]:
    return {
        "requests": traffic.requests,
        "bytes": traffic.bytes,
        "sectors": traffic.sectors,
        "least_sectors": traffic.ideal,
        "uncoalesced": traffic.scattered,
        "bank_conflicts": traffic.conflicts,
    }


@dataclass(slots=True)
class _Line:
    """What the instructions of one source line did."""

    text: str
    traffic: Traffic
    instructions: int = field(default=0)


def _by_source(run: KernelRun, lines: SourceLines) -> list[dict[str, Any]]:
    """Add up by line of the source; what has none stands under an empty place."""
    from ralbuild.simulate.profile import Traffic

    assert run.profile is not None
    found: dict[tuple[str, int], _Line] = {}

    def at(line: int) -> _Line:
        return found.setdefault(lines.lines.get(line, ("", 0)), _Line(lines.text(line), Traffic()))

    for line, count in (run.comparison.counters.by_line if run.comparison.counters else {}).items():
        at(line).instructions += count
    for line, (_, traffic) in run.profile.lines.items():
        at(line).traffic.add(traffic)
    return [
        {
            "place": f"{file}:{line}" if file else "",
            "text": item.text,
            "warp_instructions": item.instructions,
            **_traffic(item.traffic),
        }
        for (file, line), item in sorted(found.items())
    ]


def profile_rows(profile: dict[str, Any]) -> list[str]:
    """Return the lines that people read."""
    rows = []
    found = profile["estimate"]
    if found:
        rows.append(
            f"  estimate, not a measurement, for {found['board']}: at least "
            f"{found['memory_us']} us for memory, {found['issue_us']} us to issue, "
            f"{found['chain_us']} us as a chain; bound by {found['bound']}"
        )
    total = sum(item["warp_instructions"] for item in profile["source"]) or 1
    busiest = sorted(profile["source"], key=lambda item: (-item["warp_instructions"], item["place"]))[:SHOWN]
    rows += [
        f"  {100 * item['warp_instructions'] / total:5.1f} %  {item['sectors']:>9,} sectors  "
        f"{item['uncoalesced']:>7,} uncoalesced  {item['bank_conflicts']:>5,} conflicts  "
        f"{item['place'].rpartition('/')[2] or '(no line)'}  {item['text']}"
        for item in busiest
    ]
    rows += [
        f"  {item['line']:>5}  {item['requests']:>9,} requests  {item['bytes']:>12,} B  "
        f"{item['sectors']:>9,} sectors (least {item['least_sectors']:,})  "
        f"{item['bank_conflicts']:>6,} conflicts  {item['text']}"
        for item in profile["lines"]
    ]
    return rows
