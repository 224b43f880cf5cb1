"""The PTX that ships, run: the built-in kernels equal their executors, the article's kernel is caught."""

from __future__ import annotations

import random
import re
import subprocess
from pathlib import Path

import kernel_reference
import numpy as np
import pytest
from compile_support import PINS, compiled, toolchain
from simulate_support import ARCHS, kernel, module, ptx, shared_bytes
from test_kernels_sample import ban_automaton
from test_kernels_transduce import RandomMachine

from ralbuild.config.load import load_config
from ralbuild.contract.bans import read_bans
from ralbuild.contract.transducer import read_transducer
from ralbuild.contract.vocab import TokenBytes, read_vocab, write_vocab
from ralbuild.fold.folding import fold
from ralbuild.simulate.buffers import Tables
from ralbuild.simulate.cases import Splitter, random_cases, random_draws, text_case
from ralbuild.simulate.compare import Case, compare_transduce
from ralbuild.simulate.compare_draws import DrawCase, compare_sample
from ralbuild.simulate.compare_feedback import compare_around
from ralbuild.simulate.draws import Draw, draw, noise
from ralbuild.simulate.faults import FaultError
from ralbuild.simulate.ptx.parser import parse_module
from ralbuild.simulate.session import Options, Session

SAMPLES = Path(__file__).parents[1] / "samples"


def words(seed: int) -> list[bytes]:
    """A vocabulary with every byte, cut words, a long token, and two tokens without bytes."""
    rng = random.Random(seed)
    letters = b"abcdefghijklmnopqrstuvwxyz RISK<&.-0123456789"
    cut = [bytes(rng.choice(letters) for _ in range(rng.randint(2, 6))) for _ in range(400)]
    own = [b" risk", b"risk", b"audit", b" compliance", b"guar", b"anteed", b" return", b"sec", b"x" * 70]
    return [bytes([byte]) for byte in range(256)] + cut + own + [b"", b""]


def folded_tables(sample: str):
    vocab = words(5)
    found = fold(load_config(SAMPLES / sample / "ral-config.yaml"), vocab)
    tables = Tables(
        read_transducer(found.transducer, "test"),
        read_bans(found.bans, "test"),
        read_vocab(found.vocab, "test"),
        (len(vocab) - 1, len(vocab) - 2),
    )
    return tables, found.rule_set.rules


def random_tables(seed: int) -> Tables:
    rng = np.random.default_rng(seed)
    vocab = [bytes([byte]) for byte in range(256)] + [rng.bytes(int(rng.integers(0, 12))) for _ in range(100)]
    pool = read_vocab(write_vocab([*vocab, b"", b""]), "test")
    return Tables(RandomMachine(seed).table, ban_automaton([b"ab", b"cac"]), pool, (356, 357))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("sample", ["finance", "redaction"])
def test_transduce_equals_the_executor_over_folded_rules(sample: str, arch: str) -> None:
    """64 texts where races are watched for; 8 on the others, whose PTX is the same text."""
    tables, rules = folded_tables(sample)
    races = arch == "sm_80"
    count = 64 if races else 8
    found = random_cases(tables, rules, count, 3 if races else int(arch[3:]))
    cases = [Case(case.profile, case.tokens[:24]) for case in found]
    result = compare_transduce(
        module("transduce", arch), kernel("transduce"), tables, cases, Options(races=races), count
    )
    assert (result.difference, result.fault, result.races) == (None, None, ())
    assert (result.cases, result.ok) == (count, True)


@pytest.mark.parametrize("seed", range(3))
def test_transduce_equals_the_executor_over_any_legal_table(seed: int) -> None:
    """Tables that no rule of today would give, with texts that never end and ids that are no token."""
    tables = random_tables(seed)
    rng = random.Random(seed)
    cases = [
        Case(rng.randrange(3), tuple(rng.choice([-1, *range(362)]) for _ in range(rng.randint(1, 7))))
        for _ in range(64)
    ]
    result = compare_transduce(
        module("transduce"), kernel("transduce"), tables, cases, Options(races=True), 64
    )
    assert (result.difference, result.fault, result.races) == (None, None, ())


def test_the_result_does_not_depend_on_the_wave_or_on_garbage() -> None:
    tables, rules = folded_tables("finance")
    cases = [Case(case.profile, case.tokens[:12]) for case in random_cases(tables, rules, 12, 8)]
    for options in (Options(wave=1), Options(wave=5), Options(poison=0x0123456789ABCDEF)):
        assert compare_transduce(module("transduce"), kernel("transduce"), tables, cases, options, 6).ok


@pytest.mark.parametrize("arch", ARCHS)
def test_sample_draws_what_the_formulas_say(arch: str) -> None:
    tables, _ = folded_tables("finance")
    races = arch == "sm_80"
    count = 32 if races else 4  # their PTX is the same but for its target
    options = Options(shared=shared_bytes("sample", arch), races=races)
    result = compare_sample(
        module("sample", arch), kernel("sample"), tables, random_draws(tables, count, 7), options
    )
    assert (result.difference, result.fault, result.races) == (None, None, ())
    assert (result.cases, result.ties) == (count, 0)


def test_sample_keeps_banned_phrases_out() -> None:
    """One letter a token; the ban automaton refuses whatever completes a phrase."""
    base = random_tables(1)
    letters = [bytes([letter]) for letter in b"abc "] + [b""]
    tables = Tables(base.transducer, base.bans, read_vocab(write_vocab(letters), "test"), (4,))
    rng = np.random.default_rng(2)
    states = len(base.bans.trans) // base.bans.classes
    cases = [
        DrawCase(rng.standard_normal(8).astype(np.float32), float(k % 3) / 2, 1.0, k, k, 1 + k % (states - 1))
        for k in range(48)
    ]
    result = compare_sample(
        module("sample"), kernel("sample"), tables, cases, Options(shared=shared_bytes("sample"))
    )
    assert result.ok
    assert result.difference is None


@pytest.mark.parametrize(("name", "slots"), [("penalize", 16), ("feedback", 1000)])
def test_what_stands_around_the_draw_equals_plain_numpy(name: str, slots: int) -> None:
    tables, _ = folded_tables("finance")
    options = Options(shared=shared_bytes(name), races=True)
    result = compare_around(module(name), kernel(name), tables, 3, 5, options)
    assert (result.difference, result.fault, result.races) == (None, None, ())
    assert (result.cases, result.ok) == (3 * slots, True)


def test_the_reference_draw_equals_the_tests_own() -> None:
    """Two texts of the same formulas, by two hands."""
    rng = np.random.default_rng(11)
    for k in range(60):
        logits = (rng.standard_normal(1100) * 3).astype(np.float32)
        temperature, top_p = float(rng.choice([0, 0.8, 1.4])), float(rng.choice([1.0, 0.6]))
        top_k, min_p = int(rng.choice([0, 7, 300])), float(rng.choice([0.0, 0.1]))
        seed, strict = int(rng.integers(-(2**62), 2**62)), bool(k % 3 == 0)
        wall = int(rng.integers(0, 5))
        mine = draw(
            Draw(logits, 1050, temperature, top_p, seed, k, 9, top_k, min_p, strict),
            lambda token, wall=wall: token % 5 > wall,
        )
        row = kernel_reference.Row(logits, 1050, temperature, top_k, top_p, min_p, seed, k, strict)
        theirs = kernel_reference.sample(row, lambda token, wall=wall: token % 5 > wall)
        assert (mine.token, mine.refused) == (9 if theirs.token is None else theirs.token, theirs.refused)
        assert mine.event == theirs.masked + (theirs.token is None)
    ids = np.arange(3000)
    assert (noise(-5, 3, ids) == kernel_reference.gumbel(kernel_reference.philox_uniform(-5, 3, ids))).all()


def broken(name: str, old: str, new: str, count: int = 1):
    text = ptx(name)
    assert text.count(old) >= 1, old
    return parse_module(text.replace(old, new, count))


def test_a_dropped_barrier_is_found_by_the_race_detector_alone() -> None:
    tables, rules = folded_tables("finance")
    cases = [Case(case.profile, case.tokens[:6]) for case in random_cases(tables, rules, 8, 3)]
    without = broken("transduce", "bar.sync", "// bar.sync")
    assert compare_transduce(without, kernel("transduce"), tables, cases, Options(), 8).ok
    result = compare_transduce(without, kernel("transduce"), tables, cases, Options(races=True), 8)
    assert {race.buffer for race in result.races} >= {"ring"}
    assert {race.scope for race in result.races} == {"within a warp"}


def test_a_wrong_kernel_is_named_by_case_token_state_and_rule() -> None:
    """Slots take half of the output each should have: the second slot's text lands in the first one's row."""
    tables, rules = folded_tables("finance")
    cases = [text_case(tables, b"the risk. ", 0)] * 2
    wrong = broken("transduce", ", %r52, 12;", ", %r52, 11;")
    result = compare_transduce(wrong, kernel("transduce"), tables, cases, Options(), 2)
    difference = result.difference
    assert difference is not None
    assert (difference.buffer, difference.case, difference.slot) == ("output", 0, 0)
    assert difference.token == cases[0].tokens[difference.step]
    assert "from byte 2040" in difference.found
    late = broken("transduce", "atom.global.gpu.acq_rel.add.u32", "atom.global.gpu.acq_rel.min.u32", -1)
    difference = compare_transduce(late, kernel("transduce"), tables, cases, Options(), 2).difference
    assert difference is not None
    assert (difference.buffer, difference.wanted, difference.found) == ("rule_events", "2", "0")
    assert [rules[number].text for number in difference.rules] == ["risk"]


def test_the_ptx_of_the_architectures_differs_in_its_target_alone() -> None:
    """So what is shown on one holds for the others."""
    for name in ("transduce", "sample", "html_enhancer", "penalize", "feedback"):
        texts = {re.sub(r"(?m)^\.target .*$", "", ptx(name, arch)) for arch in ARCHS}
        assert len(texts) == 1


def article(buffer: np.ndarray, terms: list[int], blocks: int = 8, **options: object) -> Session:
    arguments = {"output_ptr": buffer, "term_list_ptr": np.array(terms, np.int32), "term_count": len(terms)}
    session = Session(
        module("html_enhancer"), "html_enhancer_kernel", (blocks, 1, 1), arguments, Options(**options)
    )
    session.launch()
    return session


def tokens_without(value: int) -> np.ndarray:
    found = np.random.default_rng(0).integers(1, 40, 2048).astype(np.int8)
    found[found == value] = 1
    return found


@pytest.mark.parametrize("arch", ARCHS)
def test_the_articles_kernel_writes_past_the_end_of_its_buffer(arch: str) -> None:
    buffer = tokens_without(42)
    buffer[2047] = 42
    arguments = {"output_ptr": buffer, "term_list_ptr": np.array([42], np.int32), "term_count": 1}
    session = Session(module("html_enhancer", arch), "html_enhancer_kernel", (8, 1, 1), arguments)
    with pytest.raises(FaultError) as caught:
        session.launch()
    fault = caught.value.fault
    assert (fault.kind, fault.cta, fault.thread) == ("out of bounds", 7, 127)
    assert "0 bytes past the end of 'output_ptr' (2048 bytes)" in fault.detail
    assert "st.global.b8" in fault.text


def test_the_articles_kernel_with_term_zero_writes_where_its_mask_is_off() -> None:
    with pytest.raises(FaultError) as caught:
        article(tokens_without(42), [0], blocks=9)
    assert caught.value.fault.cta == 8


def test_the_articles_kernel_races_with_the_next_block_and_its_result_depends_on_the_order() -> None:
    buffer = np.zeros(2056, np.int8)
    buffer[:2048] = tokens_without(42)
    buffer[[255, 511, 256, 512]] = 42
    session = article(buffer.copy(), [42], races=True)
    assert "between blocks" in {race.scope for race in session.races}
    outcomes = []
    for order in (range(8), range(7, -1, -1)):
        copy = buffer.copy()
        arguments = {"output_ptr": copy, "term_list_ptr": np.array([42], np.int32), "term_count": 1}
        one = Session(module("html_enhancer"), "html_enhancer_kernel", (8, 1, 1), arguments, Options(wave=1))
        one.launch(list(order))
        outcomes.append(copy)
    assert int((outcomes[0] != outcomes[1]).sum()) == 2


def test_the_articles_kernel_never_matches_an_id_above_127() -> None:
    """300 as int8 is 44: the kernel leaves id 300 alone and changes what follows id 44 instead."""
    ids = np.array([5, 300, 7, 44, 9] + [1] * 2043)
    buffer = ids.astype(np.int8)
    before = buffer.copy()
    article(buffer, [300])
    assert (buffer == before).all()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ["transduce", "sample", "html_enhancer"])
def test_the_ptx_and_the_cubin_are_of_one_compile(name: str, arch: str, tmp_path: Path) -> None:
    """ptxas run again on the PTX gives the cubin bit for bit, so what was simulated is what is shipped."""
    found = compiled(name, arch)
    (tmp_path / "k.ptx").write_bytes(found.ptx)
    target = "sm_90a" if arch == "sm_90" else arch
    command = [str(toolchain().ptxas), "-v", f"--gpu-name={target}", "k.ptx", "-o", "k.cubin"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert PINS.ptx_max >= (8, 2)
    assert (tmp_path / "k.cubin").read_bytes() == found.cubin


def test_texts_are_split_in_every_way_that_the_vocabulary_allows() -> None:
    vocab: TokenBytes = read_vocab(
        write_vocab([b"a", b"ab", b"abc", b"b", b"c", b"bc", b"", b"\xff"]), "test"
    )
    splitter = Splitter(vocab)
    assert splitter.greedy(b"abcab?") == (2, 1)
    rng = random.Random(1)
    ways = {splitter.any_way(b"abc", rng) for _ in range(200)}
    assert ways == {(2,), (0, 5), (1, 4), (0, 3, 4)}
