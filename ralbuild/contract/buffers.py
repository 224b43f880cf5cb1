"""The buffers of the decode loop that a kernel parameter can be bound to, by name.

One table, used by the compiler (types, alignment), the launcher (allocation) and the docs.
Shapes are in elements: B slots, V logits a row, R ring bytes a slot, O output bytes a slot.
"""

from __future__ import annotations

from dataclasses import dataclass

RING_BYTES = 1024
"""R: raw text kept per slot; a power of two above the longest token plus the longest hold-back."""
OUTPUT_BYTES = 4096
"""O: bytes that one step may emit per slot."""
BIAS_ROOM = 1024
"""K: tokens of one text that may have a logit bias."""
PROMPT_FLAG, COUNT_MASK = -0x8000, 0x7FFF
"""Parts of an entry of `counts`: the id is in the prompt; how often it was drawn, up to this."""
COUNTERS = ("steps", "tokens", "ended", "refused", "masked", "dead")
"""Entries of `counters`, by `feedback`'s order."""

FRONT_REGISTERS = 8
"""Words that the stages before the rules keep per slot; `Slot.registers` gives them."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A device buffer or scalar: Triton type, shape as text, and what it holds."""

    type: str
    shape: str
    meaning: str


BUFFERS: dict[str, Buffer] = {
    "logits": Buffer("*fp32", "B, V", "logits of this step, one row a slot"),
    "vocab_size": Buffer("i32", "", "V, columns of a logits row"),
    "tokenizer_size": Buffer("i32", "", "ids at and above this are masked"),
    "temperature": Buffer("*fp32", "B", "0 takes the largest logit"),
    "top_k": Buffer("*i32", "B", "tokens kept; 0 keeps all"),
    "top_p": Buffer("*fp32", "B", "nucleus mass; 1 keeps all"),
    "min_p": Buffer("*fp32", "B", "least share of the largest probability; 0 keeps all"),
    "repetition_penalty": Buffer("*fp32", "B", "above 0; 1 changes nothing"),
    "presence_penalty": Buffer("*fp32", "B", "taken once from the logit of a drawn id"),
    "frequency_penalty": Buffer("*fp32", "B", "taken from the logit of a drawn id for each time"),
    "counts": Buffer("*i16", "B, V", "by id: times drawn, and the sign bit for ids of the prompt"),
    "bias_ids": Buffer("*i32", "B, K", "ids with a logit bias, each once"),
    "bias_values": Buffer("*fp32", "B, K", "what is added to their logits"),
    "bias_count": Buffer("*i32", "B", "entries used of bias_ids"),
    "seed": Buffer("*i64", "B", "Philox key of the request"),
    "step": Buffer("*i32", "B", "tokens sampled so far for the request"),
    "eos_id": Buffer("i32", "", "id that the sampler falls back to; one of eos_ids"),
    "eos_ids": Buffer("*i32", "E", "every id that ends a text"),
    "eos_count": Buffer("i32", "", "E"),
    "token": Buffer("*i32", "B", "sampled id; -1 when the slot is idle"),
    "token_offsets": Buffer("*i32", "N + 1", "start of each token in token_bytes"),
    "token_bytes": Buffer("*u8", "", "bytes of all tokens"),
    "ban_class": Buffer("*u8", "256", "byte to class, ban automaton"),
    "ban_next": Buffer("*i32", "S * C", "next state, ban automaton"),
    "ban_classes": Buffer("i32", "", "C of the ban automaton"),
    "ban_accepts": Buffer("*u8", "S", "1 where the text may end, ban automaton"),
    "ban_strict": Buffer("*i32", "B", "1 when the profile has an allow: illegal tokens are masked first"),
    "ban_state": Buffer("*i32", "B", "state of the ban automaton"),
    "ban_events": Buffer("*i32", "B", "candidates refused by the last step"),
    "draw_event": Buffer("*i32", "B", "last step: 1 it masked the whole row, 2 and no token was legal"),
    "fst_class": Buffer("*u8", "512", "symbol to class, transducer"),
    "fst_next": Buffer("*i32", "S * C", "packed state and program, transducer"),
    "fst_final": Buffer("*i32", "S, 2", "program at the end of a part; where a word goes on"),
    "fst_classes": Buffer("i32", "", "C of the transducer"),
    "program_offsets": Buffer("*i32", "P + 1", "start of each program in program_ops"),
    "program_ops": Buffer("*i32", "", "packed operations"),
    "string_offsets": Buffer("*i32", "K + 1", "start of each string in string_pool"),
    "string_pool": Buffer("*u8", "", "bytes that EMIT writes"),
    "word_pages": Buffer("*u8", "4352", "page of bits for each 256 code points"),
    "word_bits": Buffer("*u8", "pages * 32", "1 for each word character"),
    "modes": Buffer("*i32", "M, 5", "first states, program at the end, first row: docs"),
    "mark_class": Buffer("*u8", "256", "byte to class, markers"),
    "mark_next": Buffer("*i32", "SM * CM", "packed state and action, markers"),
    "mark_actions": Buffer("*i32", "A, 2", "bytes released, number of the marker plus 1"),
    "marker_rows": Buffer("*i32", "K, 3", "rule, flags (1 keep, 2 stop), next mode"),
    "mark_classes": Buffer("i32", "", "CM"),
    "redact_class": Buffer("*u8", "512", "symbol to class, redactions"),
    "redact_next": Buffer("*i32", "SR * CR", "packed state and list of accepts, redactions"),
    "redact_final": Buffer("*i32", "SR", "list of accepts at the end of the text"),
    "accept_offsets": Buffer("*i32", "lists + 1", "start of each list in accept_rows"),
    "accept_rows": Buffer("*i32", "", "form, check (1 Luhn, 2 mod 97), 1 behind a word: docs"),
    "redact_rows": Buffer("*i32", "N, 2", "rule and string, by form, for each set of redactions"),
    "redact_classes": Buffer("i32", "", "CR"),
    "front": Buffer("*i32", "B, 8", "registers of markers and redactions, see docs/kernels.md"),
    "fst_state": Buffer("*i32", "B", "state of the transducer; -1 once the text has ended"),
    "ring": Buffer("*u8", "B, R", "raw text, by position modulo R"),
    "read_pos": Buffer("*i32", "B", "bytes read"),
    "pending_pos": Buffer("*i32", "B", "first undecided byte"),
    "output": Buffer("*u8", "B, O", "text decided in this step"),
    "output_len": Buffer("*i32", "B", "bytes decided in this step; what exceeds O is lost"),
    "rule_events": Buffer("*i32", "rules", "matches by rule id, all slots"),
    "slots": Buffer("i32", "", "B"),
    "max_steps": Buffer("*i32", "B", "tokens that the request may have"),
    "done": Buffer("*i32", "B", "1 once the text has ended, or the slot is free"),
    "input_id": Buffer("*i64", "B", "the model's next input id"),
    "position": Buffer("*i64", "B", "the position of that input"),
    "counters": Buffer("*i64", "6", "since start: steps, tokens, ended, refused, masked, dead"),
    "terms": Buffer("*i32", "T", "token ids of the terms in a user kernel's own config"),
    "term_count": Buffer("i32", "", "T"),
}
