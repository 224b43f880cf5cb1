"""The transducer kernel, run by Triton's interpreter, agrees byte for byte with the plain executor.

Tables are random machines, not compiled rules: every legal table counts, also those that no rule
of today would give.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kernel_interpreter import Interpreter, interpreter

from ralbuild.config.load import load_config
from ralbuild.contract.bans import read_bans
from ralbuild.contract.transducer import (
    COPY,
    DROP,
    EMIT,
    EVENT,
    STATE_BITS,
    Front,
    Transducer,
    TransducerTable,
    read_transducer,
    write_transducer,
)
from ralbuild.contract.transducer_table import DEAD, DONE
from ralbuild.contract.vocab import read_vocab, write_vocab
from ralbuild.fold.bans import Limits, build_bans
from ralbuild.fold.folding import fold
from ralbuild.simulate.buffers import Tables, table_buffers

STATES, CLASSES, HELD, RULES, PROFILES = 12, 7, 9, 4, 3
TOKENS, EOS = 40, (38, 39)
RING, OUTPUT = 32, 48
CANARY = 0xA5


@pytest.fixture(scope="module")
def kernels() -> Iterator[Interpreter]:
    with interpreter() as started:
        yield started


class RandomMachine:
    """A legal table: each state holds a fixed number of bytes, each program consumes the difference.

    Profile 0 has no stages before the rules; profile 1 has markers and redactions, profile 2 redactions only.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.strings = [b"", b"<b>", b"</b>", self.rng.bytes(45), b"&amp;"]
        self.programs: list[list[tuple[int, int]]] = [[(COPY, 1)]]
        first = PROFILES + 1  # the last profile's state behind a redaction that ends in a word, too
        held = [0] * first + [int(n) for n in self.rng.integers(0, HELD + 1, STATES - first)]
        rows = [[self.entry(held, state) for _ in range(CLASSES)] for state in range(STATES)]
        final = [(self.program(held[state]), self.program(held[state])) for state in range(STATES)]
        tails = [self.program(0) for _ in range(PROFILES)]
        numbers = iter(self.rng.integers(0, 2**31, 4000).tolist())
        bits = bytes(next(numbers) & 255 for _ in range(4 * 32))
        data = write_transducer(
            cls=[next(numbers) % CLASSES if k >= 7 else k for k in range(512)],
            trans=[entry for row in rows for entry in row],
            final=final,
            programs=self.programs,
            strings=self.strings,
            starts=list(range(PROFILES)),
            front=self.front(tails, numbers),
            words=(bytes(next(numbers) % 4 for _ in range(4352 // 8)) * 8, bits),
            max_held=HELD,
            rules=RULES,
        )
        self.table = read_transducer(data, "test")

    def front(self, tails: list[int], numbers: Iterator[int]) -> Front:
        """Markers of two classes, redactions that begin with class 1 and go on for up to three bytes."""
        none = (1 << 32) - 1
        # Markers: state 1 holds a byte of class 1; the same byte again completes one.
        actions = [(1, -1), (0, -1), (0, 0), (2, -1), (0, 1)]
        mark_next = [0, 1 | 1 << 16, 0, 0 | 3 << 16, 0 | 2 << 16, 0 | 4 << 16]
        # Class 3 is the inside of a character: there no candidate begins, ends or may be cut. Class 4 begins
        # a longer character: no candidate ends with it.
        redact_next = [
            0, 2, 1, 0, 3,
            0, 1, 2 if next(numbers) % 2 else 1, 1, 2,
            3 | 1 << 18, 3, DEAD | 1 << 18, 2, 2 | 3 << 18,
            DEAD | 2 << 18, 4 | 3 << 18, DONE | next(numbers) % 4 << 18, 3, 4 | 1 << 18,
            DEAD | 1 << 18, DONE | 2 << 18, DEAD | 3 << 18, 4, DEAD,
        ]  # fmt: skip
        kinds = [4 if 0xC2 <= byte < 0xF5 else 3 if 0x80 <= byte < 0xC0 else None for byte in range(256)]
        return Front(
            modes=[
                (none, none, 0, tails[0], 0),
                (0, 0, 1, none, 0),
                (none, 0, 2, tails[2], 3),
                (0, none, 0, tails[1], 0),
            ],
            mark_class=[
                0 if kinds[byte] == 3 or next(numbers) % 4 else 1 + next(numbers) % 2 for byte in range(254)
            ]
            + [1, 2],  # no marker begins within a character
            mark_next=mark_next,
            mark_actions=actions,
            markers=[(0, next(numbers) % 2, 3), (1, next(numbers) % 4, 1)],
            redact_class=[next(numbers) % 3 if kind is None else kind for kind in kinds * 2],
            redact_next=redact_next,
            redact_final=[0, 0, 1, 2, 3],
            accepts=[(), (0,), (1 << 3 | 1 << 1 | 1, 0), (2 << 3 | 2 << 1, 1 << 3 | 1 << 1)],
            redactions=[(2, 1), (1, 4), (3, 2), (1, 2), (3, 0), (0, 3)],
        )

    def entry(self, held: list[int], state: int) -> int:
        reachable = [to for to in range(STATES) if held[to] <= held[state] + 1]
        to = int(self.rng.choice(reachable))
        consumed = held[state] + 1 - held[to]
        plain = consumed == 1 and self.rng.random() < 0.5
        return to | (0 if plain else self.program(consumed)) << STATE_BITS

    def program(self, consumed: int) -> int:
        """Add a program that consumes exactly ``consumed`` bytes, with output and events between."""
        ops: list[tuple[int, int]] = []
        while consumed or self.rng.random() < 0.4:
            kind = int(self.rng.integers(0, 4))
            if kind == EMIT:
                ops.append((EMIT, int(self.rng.integers(0, len(self.strings)))))
            elif kind == EVENT:
                ops.append((EVENT, int(self.rng.integers(0, RULES))))
            elif consumed:
                taken = int(self.rng.integers(1, consumed + 1))
                ops.append((COPY if kind == COPY else DROP, taken))
                consumed -= taken
        self.programs.append(ops)
        return len(self.programs) - 1


def device_arrays(table: TransducerTable) -> dict[str, object]:
    """The table as the launcher binds it."""
    tokens = read_vocab(write_vocab([b"x"]), "test")
    bans = read_bans(build_bans([Limits()]), "test")
    arrays = table_buffers(Tables(table, bans, tokens, EOS))
    ours = ("fst_", "program", "string", "word", "mode", "mark", "redact", "accept")
    return {name: value for name, value in arrays.items() if name.startswith(ours)}


def fresh_slots(slots: int, table: TransducerTable) -> dict[str, np.ndarray]:
    """State of new requests; ring and output have a guard row that nothing may touch."""
    texts = [Transducer(table).start(slot % len(table.starts)) for slot in range(slots)]
    return {
        "fst_state": np.array([text.state for text in texts], np.int32),
        "front": np.array([text.registers(0) for text in texts], np.int32),
        "ring": np.full((slots + 1, RING), CANARY, np.uint8),
        "read_pos": np.zeros(slots, np.int32),
        "pending_pos": np.zeros(slots, np.int32),
        "output": np.full((slots + 1, OUTPUT), CANARY, np.uint8),
        "output_len": np.full(slots, -7, np.int32),
        "rule_events": np.zeros(max(1, table.rules), np.int32),
    }


def vocabulary(rng: np.random.Generator) -> tuple[list[bytes], dict[str, object]]:
    tokens = [rng.bytes(int(n)) for n in rng.integers(0, 12, TOKENS)]
    offsets = np.cumsum([0] + [len(token) for token in tokens]).astype(np.int32)
    arrays: dict[str, object] = {
        "token_offsets": offsets,
        "token_bytes": np.frombuffer(b"".join(tokens) + b"\0", np.uint8),
        "tokenizer_size": TOKENS,
        "eos_ids": np.array(EOS, np.int32),
        "eos_count": len(EOS),
    }
    return tokens, arrays


CONSTANTS = {"RING": RING, "OUTPUT": OUTPUT, "LANES": 32, "STATE_BITS": STATE_BITS}


@pytest.mark.parametrize("seed", range(6))
def test_every_step_of_every_slot_agrees_with_the_plain_executor(kernels: Interpreter, seed: int) -> None:
    slots, steps = 5, 8
    machine = RandomMachine(seed)
    tokens, arrays = vocabulary(machine.rng)
    arrays |= device_arrays(machine.table) | fresh_slots(slots, machine.table)
    plain = Transducer(machine.table)
    oracle = [plain.start(slot % PROFILES) for slot in range(slots)]
    ended = [False] * slots
    for _ in range(steps):
        picked = machine.rng.choice([-1, *range(TOKENS), *EOS], slots).astype(np.int32)
        arrays |= kernels.launch("transduce", slots, arrays | {"token": picked}, CONSTANTS)
        for slot, token in enumerate(picked):
            idle = token < 0 or ended[slot]
            end = not idle and token in EOS
            expected = b""
            if not idle:
                expected = oracle[slot].finish() if end else oracle[slot].feed(tokens[token])
                if oracle[slot].stopped and not end:
                    expected, end = expected + oracle[slot].finish(), True
            ended[slot] |= end
            length = arrays["output_len"][slot]
            assert length == len(expected)
            assert arrays["output"][slot].tobytes()[:length] == expected[:OUTPUT]
            assert arrays["fst_state"][slot] == (-1 if ended[slot] else oracle[slot].state)
            if not ended[slot]:
                read = int(arrays["read_pos"][slot])
                assert tuple(arrays["front"][slot]) == oracle[slot].registers(read)
    counts = np.bincount([rule for slot in oracle for rule in slot.events], minlength=RULES)
    assert arrays["rule_events"].tolist() == counts.tolist()
    assert (arrays["output"][slots] == CANARY).all()
    assert (arrays["ring"][slots] == CANARY).all()


CONFIG = """
version: "0.3"
model: "m"
actions:
  guard:
    ban: ["risk-free"]
    redact: [{text: "secret", with: "[x]"}, {text: "acct", whole_words: true}, {kind: card, with: "[c]"}]
    append: " Not advice."
routing: {rules: [{match: "finance", action: "guard"}]}
postprocessing:
  stop: ["STOP"]
  spans: [{open: "<t>", close: "</t>", do: drop}]
  output_transformers:
    - {name: "html_enhancer", config: {bold_terms: ["risk", "audit", "\u98ce\u9669"], escape: true}}
"""
TEXT = (
    "A RISK, asterisk & audit secretly acct<acct1> \u98ce\u9669\u98ce \u00e9risk 5 4111 1111 1111 1111 <t>risk</t>"
    "4111111111111112 sec"
)
STOPPED = "risk STOP risk"


def test_compiled_rules_come_out_as_the_plain_executor_writes_them(
    kernels: Interpreter, tmp_path: Path
) -> None:
    """One slot per profile, tokens of one to three bytes that split words and characters."""
    (tmp_path / "c.yaml").write_text(CONFIG, "utf-8")
    text = (TEXT + STOPPED).encode()
    cuts = [0, *np.cumsum(np.random.default_rng(1).integers(1, 4, len(text))).tolist()]
    words = [text[a:b] for a, b in itertools.pairwise(cuts) if a < len(text)] + [b""]
    folded = fold(load_config(tmp_path / "c.yaml"), words)
    table = read_transducer(folded.transducer, "test")
    slots = len(table.starts)
    state = fresh_slots(slots, table) | {
        "ring": np.zeros((slots, 1024), np.uint8),
        "output": np.zeros((slots, 4096), np.uint8),
    }
    arrays: dict[str, object] = {
        "token_offsets": np.cumsum([0] + [len(word) for word in words]).astype(np.int32),
        "token_bytes": np.frombuffer(text, np.uint8),
        "tokenizer_size": len(words),
        "eos_ids": np.array([len(words) - 1], np.int32),
        "eos_count": 1,
    }
    arrays |= device_arrays(table) | state
    written = [b""] * slots
    for token in range(len(words)):
        step = arrays | {"token": np.full(slots, token, np.int32)}
        arrays |= kernels.launch("transduce", slots, step, CONSTANTS | {"RING": 1024, "OUTPUT": 4096})
        for slot in range(slots):
            written[slot] += arrays["output"][slot].tobytes()[: arrays["output_len"][slot]]
    machine = Transducer(table)
    assert written == [machine.rewrite(profile, text)[0] for profile in range(slots)]
    assert any(b"<b>RISK</b>" in out for out in written)
    assert any(b"5 [c] 4111111111111112 sec" in out and b"STOP" not in out for out in written)


def test_a_step_that_emits_too_much_counts_every_byte_and_writes_none_outside(kernels: Interpreter) -> None:
    """One byte emits 200 bytes; the slot's 48 bytes are filled, the next slot's row stays as it was."""
    text = bytes(range(200))
    none = (1 << 32) - 1
    data = write_transducer(
        cls=[0] * 512,
        trans=[1 << STATE_BITS],
        final=[(1, 1)],
        programs=[[(COPY, 1)], [(EMIT, 0), (COPY, 1), (DROP, 0), (COPY, 0)]],
        strings=[text],
        starts=[0],
        front=Front(modes=[(none, none, 0, none, 0)]),
        words=(bytes(4352), bytes(32)),
        max_held=0,
        rules=1,
    )
    table = read_transducer(data, "test")
    _, arrays = vocabulary(np.random.default_rng(0))
    arrays |= {"token_offsets": np.arange(TOKENS + 1, dtype=np.int32)}
    arrays |= {"token_bytes": np.full(TOKENS, 65, np.uint8)}
    arrays |= device_arrays(table) | fresh_slots(1, table)
    arrays |= {"fst_state": np.zeros(1, np.int32), "token": np.array([5], np.int32)}
    out = kernels.launch("transduce", 1, arrays, CONSTANTS)
    assert out["output_len"][0] == 201
    assert out["output"][0].tobytes() == text[:OUTPUT]
    assert (out["output"][1] == CANARY).all()


@pytest.mark.parametrize("token", [-1, TOKENS, TOKENS + 1000])
def test_an_id_that_is_no_token_changes_nothing(kernels: Interpreter, token: int) -> None:
    machine = RandomMachine(99)
    _, arrays = vocabulary(machine.rng)
    arrays |= (
        device_arrays(machine.table) | fresh_slots(1, machine.table) | {"token": np.array([token], np.int32)}
    )
    out = kernels.launch("transduce", 1, arrays, CONSTANTS)
    assert out["output_len"][0] == 0
    for name in ("fst_state", "ring", "read_pos", "pending_pos", "output", "rule_events"):
        assert (out[name] == arrays[name]).all()
