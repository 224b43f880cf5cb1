"""Secrets never enter a layer: known shapes are found by line, ordinary text is not.

Tokens are put together here, so that no scanner takes this file for a leak.
"""

from __future__ import annotations

import base64
import json
import random
import string
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_support import MINIMAL, NO_KERNELS, ROOT, listing
from supply_cases import ralbuild, write_inputs

from ralbuild.supply.secrets import find_secrets

SMOLLM2 = Path.home() / ".cache/ralbuild/models/smollm2-135m-instruct"
_RANDOM = random.Random(7)


def letters(count: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    return "".join(_RANDOM.choice(alphabet) for _ in range(count))


def jwt() -> str:
    parts = [
        base64.urlsafe_b64encode(json.dumps(item).encode()).decode().rstrip("=")
        for item in ({"alg": "HS256"}, {"sub": "1234567890"})
    ]
    return f"{parts[0]}.{parts[1]}.{letters(43)}"


UPPER = string.ascii_uppercase + string.digits
TOKENS: dict[str, Callable[[], str]] = {
    "Hugging Face token": lambda: "hf" + "_" + letters(34, string.ascii_letters),
    "GitHub token": lambda: "ghp" + "_" + letters(36),
    "GitLab token": lambda: "glpat" + "-" + letters(20),
    "AWS access key": lambda: "AKIA" + letters(16, UPPER),
    "Google API key": lambda: "AIza" + letters(35),
    "OpenAI key": lambda: "sk-proj-" + letters(40) + "T3Blbk" + "FJ" + letters(40),
    "Anthropic key": lambda: "sk-" + "ant-api03-" + letters(93) + "AA",
    "Slack token": lambda: "xoxb" + "-" + letters(11, string.digits) + "-" + letters(24),
    "Stripe key": lambda: "sk" + "_live_" + letters(24),
    "npm token": lambda: "npm" + "_" + letters(36),
    "PyPI token": lambda: "pypi-" + "AgEIcHlwaS5vcmc" + letters(60),
    "JSON web token": jwt,
    "password in a URL": lambda: "postgres://app:" + letters(12) + "@db.internal/prod",
    "Vault token": lambda: "hvs" + "." + letters(24),
    "age key": lambda: "AGE-SECRET-" + "KEY-1" + letters(58, UPPER),
}


@pytest.mark.parametrize("kind", TOKENS)
def test_a_token_is_found_with_its_kind_and_line(kind: str) -> None:
    text = f'a: 1\nb: 2\ntoken: "{TOKENS[kind]()}"\n'
    (found,) = find_secrets([("x.json", text.encode())])
    assert (found.kind, found.place) == (kind, "x.json:3")


@pytest.mark.parametrize(
    "command",
    [["openssl", "genpkey", "-algorithm", "ED25519"], ["openssl", "genrsa", "-traditional", "2048"],
     ["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-aes256", "-pass", "pass:x"],
     ["openssl", "genrsa", "-traditional", "-aes128", "-passout", "pass:x", "2048"]],
)  # fmt: skip
def test_a_key_that_openssl_makes_is_found_as_text_and_inside_json(command: list[str]) -> None:
    key = subprocess.run(command, capture_output=True, check=True).stdout.decode()
    as_json = json.dumps({"a": 1, "private_key": key}, indent=1)
    for text, line in ((f"\n\n{key}", 3), (as_json, 3), (key.replace("\n", "\r\n"), 1)):
        (found,) = find_secrets([("k", text.encode())])
        assert (found.kind, found.line) == ("private key", line)


def test_ordinary_text_is_no_secret() -> None:
    """Rules about secrets, documentation, vocabularies, digests."""
    header = "-----BEGIN RSA " + "PRIVATE KEY-----"
    lines = [
        f'ban: ["{header}", "hf_", "AKIA"]', 'pattern: "hf_[A-Za-z0-9]{30,}"', "AKIA" + "IOSFODNN7EXAMPLE",
        "hf_" + "x" * 34, "https://example.org:8080/path@2x.png", "https://user:${PASSWORD}@host/", "sha256:" + "ab" * 32,
        "ghp_short", "see https://host/a:b and c@d.org", base64.b64encode(bytes(range(256))).decode(), "eyJhbGciOi.x.y",
    ]  # fmt: skip
    assert find_secrets([("text", "\n".join(lines).encode())]) == ()
    assert find_secrets([("noise", random.Random(1).randbytes(200_000))]) == ()


def test_no_false_alarm_in_the_samples() -> None:
    files = [path for path in (ROOT / "samples").rglob("*") if path.is_file()]
    assert len(files) >= 5
    assert find_secrets((str(path), path.read_bytes()) for path in files) == ()


@pytest.mark.real_model
def test_no_false_alarm_in_a_real_vocabulary() -> None:
    files = [path for path in SMOLLM2.iterdir() if path.suffix in (".json", ".jinja", ".txt")]
    assert any(path.name == "tokenizer.json" for path in files)
    assert find_secrets((path.name, path.read_bytes()) for path in files) == ()


def test_an_image_with_a_secret_is_never_written(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    token = TOKENS["Hugging Face token"]()
    (tmp_path / "ral-config.yaml").write_text(MINIMAL + NO_KERNELS + f"# {token}\n")
    settings = tmp_path / "model/tokenizer_config.json"
    settings.write_text(json.dumps({"eos_token": "<|im_end|>", "auth": token}, indent=1))
    before = listing(tmp_path)
    build = ("image", "--model", "model", "--base", "oci:base", "--quiet")
    done = ralbuild(*build, cwd=tmp_path)
    assert done.code == 6
    assert token not in done.out + done.err
    assert "ral-config.yaml:5: looks like a secret: Hugging Face token" in done.err
    assert "tokenizer_config.json:3: looks like a secret" in done.err
    new = {path for path in listing(tmp_path) if path not in before and not path.startswith(".ral_cache")}
    assert new == set()
    one = ralbuild(*build, "--ignore-secret", "ral-config.yaml:5", cwd=tmp_path)
    assert (one.code, "ral-config.yaml" in one.err) == (6, False)
    both = ralbuild(
        *build,
        "--ignore-secret",
        "ral-config.yaml:5",
        "--ignore-secret",
        "tokenizer_config.json:3",
        cwd=tmp_path,
    )
    assert both.code == 0, both.err
