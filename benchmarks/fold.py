"""What rules cost per token: the executor that serves the CPU target, for 1 to 3,000 rules.

    python -m benchmarks.fold [--json] [--repeat N]

Every rule count runs over the same tokens in every round, in a rotating order, and the medians are
compared; time is the thread's own, so other processes disturb little. The last line of ``--json`` is one
object: ``flatness`` (largest over smallest time per token of all rule counts), ``regex_ratio`` (a
regular expression per chunk, over ours, both at 1,000 rules) and ``build_seconds`` (folding 3,000 rules).
A token that meets a state for the second time is remembered (`ralbuild.contract.memo`): the first round fills
the memo and is not counted.

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

from ralbuild.config.load import load_config
from ralbuild.contract.transducer import Transducer, read_transducer
from ralbuild.fold.folding import fold

COUNTS = (1, 10, 100, 1_000, 3_000)
TOKENS = 3_000
MATCH_EVERY = 100
"""One word in so many is a term, the same one for every rule count."""
BASELINE = 1_000
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
WEIGHTS = tuple(1 / (rank + 2) for rank in range(26))


@dataclass(frozen=True, slots=True)
class Row:
    """One rule count: build time, table size, and nanoseconds per token of each way."""

    rules: int
    build_seconds: float
    states: int
    table_bytes: int
    ours_ns: float
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


def build(terms: Sequence[str], folder: Path) -> tuple[Transducer, float, int, int]:
    """Fold a config that marks ``terms``; return the machine, seconds, states and table bytes."""
    config = folder / "ral-config.yaml"
    transformer = {"name": "html_enhancer", "config": {"bold_terms": list(terms)}}
    plain = {"version": "0.3", "model": "m", "postprocessing": {"output_transformers": [transformer]}}
    config.write_text(json.dumps(plain))
    loaded = load_config(config)
    begin = time.thread_time()
    folded = fold(loaded, [bytes([byte]) for byte in range(256)])
    seconds = time.thread_time() - begin
    table = Transducer(read_transducer(folded.transducer, "table"))
    return table, seconds, folded.size.states, folded.size.table_bytes


def executor(machine: Transducer, tokens: Sequence[bytes]) -> Callable[[], None]:
    """Return a run of the reference executor over all tokens, as the CPU target makes it."""

    def run() -> None:
        slot = machine.start(0)
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


def measure(repeat: int, counts: Sequence[int]) -> list[Row]:
    """Build every rule count, then time all of them in turn."""
    rng = random.Random(2024)
    terms = words(rng, max(counts), 4, 12)
    tokens = make_text(rng, terms[0])
    data = [token.encode() for token in tokens]
    built, ours, theirs = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            built.append(build(terms[:count], Path(folder)))
            ours.append(executor(built[-1][0], data))
            theirs.append(regex(terms[:count], tokens))
            print(f"built {count} rules in {built[-1][1]:.2f} s", file=sys.stderr)
    times: list[list[int]] = [[] for _ in counts]
    baseline: list[list[int]] = [[] for _ in counts]
    for run in (*ours, *theirs):
        run()
    for number in range(repeat):
        for step in range(len(counts)):
            index = (number + step) % len(counts)
            times[index].append(thread_ns(ours[index]))
            if number < 3:  # slow, and far from any limit
                baseline[index].append(thread_ns(theirs[index]))
    return [
        Row(
            count,
            built[index][1],
            built[index][2],
            built[index][3],
            statistics.median(times[index]) / TOKENS,
            statistics.median(baseline[index]) / TOKENS,
        )
        for index, count in enumerate(counts)
    ]


def main() -> None:
    """Measure and print a table, and with --json an object on the last line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fold", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--repeat", type=int, default=15, metavar="N", help="rounds; default: 15")
    options = parser.parse_args()
    rows = measure(max(3, options.repeat), COUNTS)
    print("| rules | states | table | build s | ours us/token | regex per chunk us/token | ratio |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.rules:,} | {row.states:,} | {row.table_bytes / 1024:,.0f} KiB | {row.build_seconds:.2f} "
            f"| {row.ours_ns / 1000:.2f} | {row.regex_ns / 1000:.2f} | {row.regex_ns / row.ours_ns:.1f} |"
        )
    times = [row.ours_ns for row in rows]
    baseline = next(row for row in rows if row.rules == BASELINE)
    answer = {
        "flatness": round(max(times) / min(times), 3),
        "regex_ratio": round(baseline.regex_ns / baseline.ours_ns, 2),
        "build_seconds": round(rows[-1].build_seconds, 2),
        "ns_per_token": {str(row.rules): round(row.ours_ns) for row in rows},
        "regex_ns_per_token": {str(row.rules): round(row.regex_ns) for row in rows},
        "build": {str(row.rules): round(row.build_seconds, 2) for row in rows},
    }
    print(json.dumps(answer) if options.json else f"flatness {answer['flatness']}")


if __name__ == "__main__":
    main()
