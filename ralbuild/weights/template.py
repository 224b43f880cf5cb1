"""The chat template: found, rendered in a child process, and judged by what it writes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ralbuild.contract.codec import sha256_hex
from ralbuild.weights import child
from ralbuild.weights.findings import Findings
from ralbuild.weights.memo import Memo, remember
from ralbuild.weights.special import TOKENIZER, token_texts
from ralbuild.weights.tokenizer import Vocabulary

FILE = "chat_template.jinja"
CPU_SECONDS = 3
MEMORY_BYTES = 512 << 20
MAX_SOURCE = 1 << 20

_QUESTION, _ANSWER = "Which river runs through Paris?", "Zq-the-Seine-qZ"
_USER = {"role": "user", "content": _QUESTION}
_CONVERSATIONS = {
    "user": [_USER],
    "full": [_USER, {"role": "assistant", "content": _ANSWER}],
    "system": [{"role": "system", "content": "Answer briefly."}, _USER],
}
_ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}>")
_MARKER = re.compile(r"<\|[A-Za-z0-9_]+\|>")


@dataclass(frozen=True, slots=True)
class Template:
    """A chat template: its text and the file that it is in."""

    source: str
    file: str

    @property
    def sha256(self) -> str:
        """Digest of the text as it is rendered."""
        return sha256_hex(self.source.encode("utf-8", "surrogatepass"))


def find_template(
    small: Mapping[str, bytes], configs: Mapping[str, Mapping[str, Any]], findings: Findings
) -> Template | None:
    """Return the template that counts: ``chat_template.jinja`` beats the tokenizer's config."""
    inline = _inline(configs.get(TOKENIZER, {}))
    if FILE in small:
        try:
            source = small[FILE].decode()
        except UnicodeDecodeError as error:
            findings.add("W603", f"not UTF-8 at byte {error.start}", file=FILE)
            return None
        if inline is not None and inline != source:
            findings.add("W602", f"{FILE} differs from the one in {TOKENIZER}", file=FILE)
        return Template(source, FILE)
    if inline is None:
        unusable = f"chat_template in {TOKENIZER} is neither text nor a list with one named default"
        is_there = configs.get(TOKENIZER, {}).get("chat_template") is not None
        what = unusable if is_there else f"neither {FILE} nor chat_template in {TOKENIZER}"
        findings.add("W601", what, file=TOKENIZER if is_there else FILE)
        return None
    return Template(inline, TOKENIZER)


def _inline(config: Mapping[str, Any]) -> str | None:
    found = config.get("chat_template")
    if isinstance(found, list):  # several named templates
        named = {str(item.get("name")): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def check_template(
    template: Template,
    configs: Mapping[str, Mapping[str, Any]],
    vocabulary: Vocabulary,
    memo: Memo | None,
    findings: Findings,
) -> None:
    """Render the template, or take what it wrote before, and judge that."""
    tokens = {name: text for name, (text, _) in token_texts(configs).items()}
    answers = _render(template, tokens, memo, findings)
    if answers is None or not _all_well(answers, template, findings):
        return
    texts = {name: item["text"] for name, item in answers.items() if name != "used" and "text" in item}
    prompt, plain, full = texts["user+/0"], texts["user/0"], texts["full/0"]
    if any(texts.get(f"{name}/0") != texts.get(f"{name}/1") for name in ("user+", "full", "system+")):
        findings.add("W608", "the prompt holds today's date", file=template.file, found="strftime_now")
    if answers["used"]:
        findings.add("W608", "the template draws at random", file=template.file, found="random")
    if _ADDRESS.search(prompt):
        what = "the prompt holds an address in memory, which every run has otherwise"
        findings.add("W608", what, file=template.file, found=_ADDRESS.findall(prompt)[0])
    if "system+/0" not in texts:
        reason = answers["system+/0"].get("error", "")
        findings.add("W611", f"refuses a system message: {reason[:120]}", file=template.file)
    _check_turn(prompt, plain, full, template, findings)
    _check_markers(prompt, tokens, vocabulary, template, findings)


def _render(
    template: Template, tokens: dict[str, str], memo: Memo | None, findings: Findings
) -> dict[str, Any] | None:
    """Run the worker; None when it failed, which is a finding."""
    if len(template.source) > MAX_SOURCE:
        findings.add("W605", f"has {len(template.source)} characters", file=template.file, needed=MAX_SOURCE)
        return None
    asked = {"source": template.source, "tokens": tokens, "conversations": _CONVERSATIONS}
    request = json.dumps(asked).encode()
    answers: dict[str, Any] | None = remember(
        memo,
        request,
        "rendered chat template",
        lambda: child.run_limited("template_worker.py", request, CPU_SECONDS, MEMORY_BYTES),
        # A limit may have been this machine's bad day: that is tried again.
        lambda found: {"answers.json": json.dumps(found).encode()} if found is not None else {},
        lambda outputs: dict(json.loads(outputs["answers.json"])),
    )
    if answers is None:
        findings.add("W605", f"rendering took more than {CPU_SECONDS} s or 512 MB", file=template.file)
        return None
    return answers


def _all_well(answers: dict[str, Any], template: Template, findings: Findings) -> bool:
    """Tell whether what must render did; the system message may be refused."""
    kinds = {"escape": "W604", "limit": "W605", "error": "W603"}
    parse = answers.get("parse")
    failed = [parse] if parse else [answers[name] for name in ("user/0", "user+/0", "full/0")]
    for item in failed:
        for kind, rule in kinds.items():
            if kind in item:
                findings.add(rule, item[kind], file=template.file)
                return False
    if "escape" in answers["system+/0"]:
        findings.add("W604", answers["system+/0"]["escape"], file=template.file)
        return False
    return True


def _check_turn(prompt: str, plain: str, full: str, template: Template, findings: Findings) -> None:
    """Find out whether the prompt ends where an answer begins.

    The text before the answer of a finished conversation shows what must come first. A template
    without roles (``[INST] ... [/INST]``) needs nothing there, and is fine without a prompt.
    """
    if _QUESTION not in prompt:
        findings.add("W603", "the prompt does not hold the user's message", file=template.file)
        return
    before = full.partition(_ANSWER)[0]
    if prompt == plain and _ANSWER in full and before.rstrip() != prompt.rstrip():
        missing = before.removeprefix(prompt).strip()[:60]
        what = f"the prompt lacks {missing!r}, which comes before an answer"
        findings.add("W607", what, file=template.file, needed=missing)


def _check_markers(
    prompt: str, tokens: dict[str, str], vocabulary: Vocabulary, template: Template, findings: Findings
) -> None:
    bos = tokens.get("bos_token", "")
    if bos and prompt.startswith(bos):
        if prompt.removeprefix(bos).lstrip().startswith(bos):
            findings.add("W606", f"the prompt begins with {bos!r} twice", file=template.file, found=bos)
        elif vocabulary.adds and vocabulary.ids.get(bos) in vocabulary.adds:
            findings.add("W610", f"template and tokenizer both write {bos!r}", file=template.file)
    for marker in sorted(set(_MARKER.findall(prompt))):
        if marker not in vocabulary.ids:
            what = f"writes {marker!r}, which the tokenizer splits into letters"
            findings.add("W609", what, file=template.file, found=marker)
