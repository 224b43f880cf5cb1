"""Private keys and well-known tokens in what would go into a layer: looked for before anything is written.

A layer can be read by everybody who can pull the image, and stays in registries after a new one is
pushed. Each pattern is a token's documented shape, so that ordinary text does not look like one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ralbuild.errors import ImageError, Problem

_KEY_START = r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY(?: BLOCK)?-----"
# After it: line ends as such or as JSON writes them, headers of old formats, then key material.
_KEY_BODY = r"(?:\\[rn]|\s|[A-Za-z-]+: [^\n\\]{1,80})*[A-Za-z0-9+/=]{40}"
_GITLAB = ("glpat-", "gldt-", "glrt-", "glsoat-", "glagent-", "glptt-", "glcbt-", "glft-")
_PATTERNS = (
    ("private key", ("PRIVATE KEY",), _KEY_START + _KEY_BODY),
    ("age key", ("AGE-SECRET-KEY-1",), r"AGE-SECRET-KEY-1[0-9A-Z]{58}"),
    ("Anthropic key", ("sk-ant-",), r"\bsk-ant-[a-z]{3,8}[0-9]{2}-[A-Za-z0-9_-]{80,}"),
    ("AWS access key", ("AKIA", "ASIA"), r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    ("Azure storage key", ("AccountKey=",), r"\bAccountKey=[A-Za-z0-9+/]{86}=="),
    ("DigitalOcean token", ("_v1_",), r"\bdo[opr]_v1_[0-9a-f]{64}\b"),
    ("Docker Hub token", ("dckr_",), r"\bdckr_(?:pat|oat)_[A-Za-z0-9_-]{27,}"),
    (
        "GitHub token",
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
        r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{82})\b",
    ),
    ("GitLab token", _GITLAB, rf"\b(?:{'|'.join(_GITLAB)})[A-Za-z0-9_-]{{20,}}"),
    ("Google API key", ("AIza",), r"\bAIza[0-9A-Za-z_-]{35}(?![0-9A-Za-z_-])"),
    ("Google OAuth secret", ("GOCSPX-",), r"\bGOCSPX-[A-Za-z0-9_-]{28}"),
    ("Grafana token", ("glsa_",), r"\bglsa_[A-Za-z0-9]{32}_[0-9a-f]{8}\b"),
    ("Hugging Face token", ("hf_", "api_org_"), r"\b(?:hf|api_org)_[A-Za-z0-9]{30,}\b"),
    ("JSON web token", (".eyJ",), r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{20,}"),
    ("npm token", ("npm_",), r"\bnpm_[A-Za-z0-9]{36}\b"),
    ("OpenAI key", ("T3BlbkFJ",), r"\bsk-(?:[a-z]+-)?[A-Za-z0-9_-]{20,}T3BlbkFJ[A-Za-z0-9_-]{20,}"),
    ("password in a URL", ("://",), r"://[^\s/:@\"'{}$<>]{1,64}:[^\s/:@\"'{}$<>]{6,64}@[A-Za-z0-9.-]{2,}"),
    ("PyPI token", ("pypi-AgE",), r"\bpypi-AgE[A-Za-z0-9_-]{50,}"),
    ("SendGrid key", ("SG.",), r"\bSG\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}"),
    ("Slack token", ("xox",), r"\bxox[abeoprs]-[0-9A-Za-z-]{20,}"),
    ("Slack webhook", ("hooks.slack.com",), r"hooks\.slack\.com/services/T\w{8,}/B\w{8,}/\w{20,}"),
    ("Stripe key", ("k_live_",), r"\b[rs]k_live_[0-9A-Za-z]{20,}"),
    ("Vault token", ("hvs.", "hvb.", "hvr."), r"\bhv[sbr]\.[A-Za-z0-9_-]{24,}"),
    ("Weights & Biases key", ("WANDB_API_KEY",), r"WANDB_API_KEY[\"']?\s*[:=]\s*[\"']?[0-9a-f]{40}\b"),
)
"""Kind, texts of which one must be there (a fast way to say no), and the shape."""
_COMPILED = tuple((kind, texts, re.compile(shape)) for kind, texts, shape in _PATTERNS)
_PLACEHOLDER = re.compile(r"EXAMPLE|(?i:xxxxx|placeholder|redacted|changeme)|(.)\1{9}")
"""Documentation writes tokens like this; no random token does."""


@dataclass(frozen=True, slots=True)
class Secret:
    """What looks like a secret: its kind, the file, and the line from 1. Never the secret itself."""

    kind: str
    file: str
    line: int

    @property
    def place(self) -> str:
        """``file:line``, also the word that `--ignore-secret` takes."""
        return f"{self.file}:{self.line}"


def find_secrets(files: Iterable[tuple[str, bytes]]) -> tuple[Secret, ...]:
    """Return what looks like a secret in text files, in the order of the files and of their lines.

    Args:
        files: name and content of each; what is not UTF-8 is looked at byte by byte.
    """
    found = []
    for name, data in files:
        text = data.decode("utf-8", errors="surrogateescape")
        hits = [
            (match.start(), kind)
            for kind, texts, shape in _COMPILED
            if any(word in text for word in texts)
            for match in shape.finditer(text)
            if _PLACEHOLDER.search(match[0]) is None
        ]
        found += [Secret(kind, name, text.count("\n", 0, at) + 1) for at, kind in sorted(hits)]
    return tuple(found)


def refuse_secrets(files: Iterable[tuple[str, bytes]], ignored: Iterable[str]) -> None:
    """Look at what the user's files bring into a layer, before anything is written.

    Args:
        files: name and content of each.
        ignored: places (``file:line``) whose text is no secret, whatever it looks like.

    Raises:
        ImageError: for everything that looks like a secret.
    """
    known = frozenset(ignored)
    hint = "remove it; if it is none, pass --ignore-secret "
    found = [
        Problem(f"looks like a secret: {item.kind}", item.place, hint + item.place)
        for item in find_secrets(files)
        if item.place not in known
    ]
    if found:
        raise ImageError.of(found)
