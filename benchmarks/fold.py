"""What rules cost per token: the executor that serves the CPU target, for 1 to 3,000 rules.

    python -m benchmarks.fold [--json] [--repeat N]

Two series: bold terms alone, and rules of every sort (bold, redacted texts, patterns and kinds, replacements,
marked-up patterns). Every rule count runs over the same tokens in every round, in a rotating order, and the
medians are compared; time is the thread's own, so other processes disturb little. The last line of ``--json``
is one object: ``flatness`` (largest over smallest number of the interpreter's instructions per token, of all
rule counts), ``time_flatness`` (the same of time, in which caches and neighbours of the machine have a part),
``regex_ratio`` (time of a regular expression per chunk, over ours, both at 1,000 bold terms),
``build_seconds`` (folding 3,000), and the same of the mixed series under ``mixed``. A token that meets a
place for the second time is remembered (`ralbuild.contract.memo`): the first round fills the memo and is not
counted; ``first_ns_per_token`` is the least of rounds with an empty memo.

The baseline is what services do without a transducer: one alternation of all terms, substituted in each
chunk as it comes. It misses every term that two tokens share, so its price is a lower bound.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ralbuild.config.load import load_config
from ralbuild.contract.memo import Memo
from ralbuild.contract.transducer import Transducer, read_transducer
from ralbuild.fold.folding import fold

COUNTS = (1, 10, 100, 1_000, 3_000)
TOKENS = 3_000
MATCH_EVERY = 100
"""One word in so many is a term, the same one for every rule count."""
BASELINE = 1_000
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
WEIGHTS = tuple(1 / (rank + 2) for rank in range(26))
KINDS = ("email", "card", "iban", "phone", "ip", "us_ssn", "api_key")

Rules = Callable[[Sequence[str]], dict[str, Any]]
"""Terms to a config."""


@dataclass(frozen=True, slots=True)
class Row:
    """One rule count: build time, table size, instructions and nanoseconds per token of each way."""

    rules: int
    build_seconds: float
    states: int
    table_bytes: int
    instructions: float
    ours_ns: float
    first_ns: float
    regex_ns: float


def words(rng: random.Random, count: int, least: int, most: int) -> list[str]:
    """Return distinct words with about the letter frequencies of English."""
    found: dict[str, None] = {}
    while len(found) < count:
        size = rng.randint(least, most)
        found["".join(rng.choices(LETTERS, WEIGHTS, k=size))] = None
    return list(found)


def make_text(rng: random.Random, term: str) -> list[str]:
    """Return tokens as models write them: a word with its leading space, or punctuation."""
    plain = words(rng, 2_000, 2, 9)
    tokens = []
    for number in range(TOKENS):
        word = term if number % MATCH_EVERY == MATCH_EVERY - 1 else rng.choice(plain)
        tokens.append(f" {word}" if number % 9 else ". The")
    return tokens


def bold_rules(terms: Sequence[str]) -> dict[str, Any]:
    """Return a config that marks ``terms``."""
    transformer = {"name": "html_enhancer", "config": {"bold_terms": list(terms)}}
    return {"version": "0.3", "model": "m", "postprocessing": {"output_transformers": [transformer]}}


def mixed_rules(terms: Sequence[str]) -> dict[str, Any]:
    """Return a config with a rule for each term: all sorts among the first ten, the first is bold."""
    redact: list[dict[str, str]] = []
    bold: list[str] = []
    replace: list[dict[str, str]] = []
    markup: list[dict[str, str]] = []
    for number, term in enumerate(terms):
        if 0 <= number - 5 < len(KINDS):
            redact.append({"kind": KINDS[number - 5]})
        elif number % 5 == 1:
            redact.append({"text": f"{term} {terms[number - 1]}"})
        elif number % 5 == 2:
            redact.append({"pattern": f"{term}-[0-9]{{4,8}}"})
        elif number % 5 == 3:
            replace.append({"text": f"{term}ing", "with": term})
        elif number % 5 == 4:
            markup.append({"pattern": f"{term}[ -]?[0-9]{{1,3}}", "before": "<i>", "after": "</i>"})
        else:
            bold.append(term)
    named: list[tuple[str, dict[str, Any]]] = [
        ("html_enhancer", {"bold_terms": bold}),
        ("replace", {"rules": replace}),
        ("markup", {"rules": markup}),
    ]
    transformers = [{"name": name, "config": value} for name, value in named if any(value.values())]
    return {
        "version": "0.3",
        "model": "m",
        "routing": {"rules": [{"match": "r", "action": "guard"}]},
        "actions": {"guard": {"redact": redact}},
        "postprocessing": {"output_transformers": transformers},
    }


def build(rules: dict[str, Any], folder: Path) -> tuple[Transducer, float, int, int]:
    """Fold a config; return the machine, seconds, states and table bytes."""
    config = folder / "ral-config.yaml"
    config.write_text(json.dumps(rules))
    loaded = load_config(config)
    begin = time.thread_time()
    folded = fold(loaded, [bytes([byte]) for byte in range(256)])
    seconds = time.thread_time() - begin
    table = Transducer(read_transducer(folded.transducer, "table"))
    return table, seconds, folded.size.states, folded.size.table_bytes + folded.size.front_bytes


def executor(machine: Transducer, tokens: Sequence[bytes]) -> Callable[[], None]:
    """Return a run of the reference executor over all tokens, as the CPU target makes it."""
    profile = min(1, len(machine.table.starts) - 2)  # the action's where there is one; the input's is last

    def run() -> None:
        slot = machine.start(profile)
        for token in tokens:
            slot.feed(token)
            slot.events.clear()
        slot.finish()

    return run


def regex(terms: Sequence[str], tokens: Sequence[str]) -> Callable[[], None]:
    """Return a run of the baseline over all tokens."""
    longest_first = sorted(terms, key=lambda term: (-len(term), term))
    pattern = re.compile(rf"\b(?:{'|'.join(map(re.escape, longest_first))})\b", re.ASCII | re.IGNORECASE)

    def run() -> None:
        for token in tokens:
            pattern.sub(r"<b>\g<0></b>", token)

    return run


def thread_ns(run: Callable[[], None]) -> int:
    """Return the nanoseconds of processor time that ``run`` takes in this thread."""
    begin = time.thread_time_ns()
    run()
    return time.thread_time_ns() - begin


def measure(repeat: int, counts: Sequence[int], rules: Rules, *, baseline: bool) -> list[Row]:
    """Build every rule count, then time all of them in turn."""
    rng = random.Random(2024)
    terms = words(rng, max(counts), 4, 12)
    tokens = make_text(rng, terms[0])
    data = [token.encode() for token in tokens]
    built = []
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            built.append(build(rules(terms[:count]), Path(folder)))
            print(f"built {count} rules in {built[-1][1]:.2f} s", file=sys.stderr)
    ours = [executor(machine, data) for machine, *_ in built]
    theirs = [regex(terms[:count], tokens) for count in counts] if baseline else []
    firsts = [min(first_ns(machine, data) for _ in range(3)) for machine, *_ in built]
    times = in_turn(ours, repeat)
    slow = in_turn(theirs, min(3, repeat)) or [0.0] * len(counts)  # far from any limit
    return [
        Row(
            count,
            seconds,
            states,
            size,
            instructions(ours[k]) / TOKENS,
            times[k] / TOKENS,
            firsts[k] / TOKENS,
            slow[k] / TOKENS,
        )
        for k, (count, (_, seconds, states, size)) in enumerate(zip(counts, built, strict=True))
    ]


def instructions(run: Callable[[], None]) -> int:
    """Return the instructions that the interpreter executes for ``run``; a call into C is one."""
    count = 0

    def step(_: FrameType, event: str, __: object) -> Any:
        nonlocal count
        count += event == "opcode"
        return step

    def enter(frame: FrameType, _: str, __: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return step

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def first_ns(machine: Transducer, data: Sequence[bytes]) -> int:
    """Return the nanoseconds of a run that remembers nothing yet."""
    machine.memo = Memo()
    return thread_ns(executor(machine, data))


def in_turn(runs: Sequence[Callable[[], None]], repeat: int) -> list[float]:
    """Return the median nanoseconds of each run, all of them run by turns after a first time."""
    times: list[list[int]] = [[] for _ in runs]
    for run in runs:
        run()
    for number in range(repeat):
        for step in range(len(runs)):
            index = (number + step) % len(runs)
            times[index].append(thread_ns(runs[index]))
    return [statistics.median(found) for found in times]


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what is said of a series."""
    counts, times = [row.instructions for row in rows], [row.ours_ns for row in rows]
    return {
        "flatness": round(max(counts) / min(counts), 3),
        "time_flatness": round(max(times) / min(times), 3),
        "build_seconds": round(rows[-1].build_seconds, 2),
        "instructions_per_token": {str(row.rules): round(row.instructions, 1) for row in rows},
        "ns_per_token": {str(row.rules): round(row.ours_ns) for row in rows},
        "first_ns_per_token": {str(row.rules): round(row.first_ns) for row in rows},
        "build": {str(row.rules): round(row.build_seconds, 2) for row in rows},
        "table_bytes": {str(row.rules): row.table_bytes for row in rows},
    }


def show(title: str, rows: Sequence[Row]) -> None:
    """Print a series as a table."""
    print(f"{title}\n")
    print("| rules | states | table | build s | instructions | us/token | first us/token | regex us/token |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.rules:,} | {row.states:,} | {row.table_bytes / 1024:,.0f} KiB | {row.build_seconds:.2f} "
            f"| {row.instructions:.1f} | {row.ours_ns / 1000:.2f} | {row.first_ns / 1000:.1f} "
            f"| {row.regex_ns / 1000:.2f} |"
        )
    print()


def main() -> None:
    """Measure and print tables, and with --json an object on the last line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fold", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--repeat", type=int, default=15, metavar="N", help="rounds; default: 15")
    options = parser.parse_args()
    repeat = max(3, options.repeat)
    rows = measure(repeat, COUNTS, bold_rules, baseline=True)
    mixed = measure(repeat, COUNTS, mixed_rules, baseline=False)
    show("Bold terms", rows)
    show("Rules of every sort", mixed)
    baseline = next(row for row in rows if row.rules == BASELINE)
    answer = figures(rows) | {
        "regex_ratio": round(baseline.regex_ns / baseline.ours_ns, 2),
        "regex_ns_per_token": {str(row.rules): round(row.regex_ns) for row in rows},
        "mixed": figures(mixed),
    }
    print(
        json.dumps(answer)
        if options.json
        else f"flatness {answer['flatness']}, {answer['mixed']['flatness']}"
    )


if __name__ == "__main__":
    main()
