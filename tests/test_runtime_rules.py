"""Rules of the serving side: compiled and signed here, applied by a server that also has compiled rules.

Expected texts come from `re` and from transformers' `generate`; signatures from `cryptography`.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_support import Outcome
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from prometheus_client import CollectorRegistry
from runtime_fixtures import Image, Rules, make_image, make_model, refused, running
from supply_cases import make_key, ralbuild
from test_runtime_api import CHAT, ONE_THREAD, events, greedy, say, words_of

from ralbuild.contract.bundle import Engine
from ralbuild.contract.codec import pae
from ralbuild.contract.runtime_rules import PAYLOAD_TYPE
from ralbuild.runtime.ecdsa import read_public_key
from ralbuild.runtime.errors import ApiError, RuntimeRulesError
from ralbuild.runtime.exposition import RuntimeRuleMetrics
from ralbuild.runtime.metrics import Metrics
from ralbuild.runtime.rule_file import RuleFile
from ralbuild.runtime.runtime_rules import read_rule_set

ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


def pem(key: Any) -> bytes:
    return key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two key pairs: ``sign`` and ``other``."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("sign", "other"):
        make_key(folder, name)
    return folder


def compile_rules(
    folder: Path, keys: Path, text: str, *, by: str = "sign", out: str = "rules.json"
) -> Outcome:
    source = folder / "runtime-rules.yaml"
    source.write_text(f'version: "0.3"\n{text}')
    return ralbuild(
        "rules", "compile", source, "--key", keys / f"{by}.key", "--out", folder / out, cwd=folder
    )


class TestSignature:
    def test_it_accepts_what_cryptography_signs_and_nothing_that_was_changed(self) -> None:
        for number in range(4):
            key = ec.generate_private_key(ec.SECP256R1())
            data = bytes([number]) * (number * 7)
            signature = key.sign(data, ec.ECDSA(hashes.SHA256()))
            public = read_public_key(pem(key))
            assert public.verifies(data, signature)
            assert not public.verifies(data + b"x", signature)
            for at in range(0, len(signature), 9):
                changed = bytearray(signature)
                changed[at] ^= 1 << number % 8
                assert not public.verifies(data, bytes(changed))
            assert not read_public_key(pem(ec.generate_private_key(ec.SECP256R1()))).verifies(data, signature)

    def test_numbers_out_of_range_and_other_spellings_are_no_signature(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        public = read_public_key(pem(key))
        good = key.sign(b"data", ec.ECDSA(hashes.SHA256()))
        for r, s in ((0, 1), (1, 0), (0, 0), (ORDER, 1), (1, ORDER), (ORDER + 1, 5), (1, 1)):
            assert not public.verifies(b"data", encode_dss_signature(r, s))
        r_length = good[3]
        padded = bytes([0x30, good[1] + 1, 2, r_length + 1, 0]) + good[4:]  # a zero that need not be there
        for bad in (
            b"",
            b"\x30",
            good[:-1],
            good + b"\0",
            padded,
            b"\x30\x81" + good[1:],
            b"\x31" + good[1:],
        ):
            assert not public.verifies(b"data", bad)

    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (lambda: pem(ec.generate_private_key(ec.SECP384R1())), "P-256"),
            (lambda: pem(rsa.generate_private_key(65537, 2048)), "P-256"),
            (lambda: b"", "PEM"),
            (lambda: b"-----BEGIN PUBLIC KEY-----\n!!\n-----END PUBLIC KEY-----\n", "PEM"),
        ],
    )
    def test_other_keys_are_refused(self, make: Callable[[], bytes], reason: str) -> None:
        with pytest.raises(ValueError, match=reason):
            read_public_key(make())

    def test_a_point_beside_the_curve_is_refused(self) -> None:
        lines = pem(ec.generate_private_key(ec.SECP256R1())).splitlines()
        der = bytearray(base64.b64decode(b"".join(lines[1:-1])))
        der[-1] ^= 1
        with pytest.raises(ValueError, match="no"):
            read_public_key(b"\n".join([lines[0], base64.b64encode(bytes(der)), lines[-1]]))


class TestCompile:
    def test_the_same_file_and_key_give_the_same_bytes_and_re_s_text(
        self, tmp_path: Path, keys: Path
    ) -> None:
        text = (
            'serial: 4\nredact:\n  - {text: "bluebird", with: "[bird]"}\n  - {pattern: "acct-[0-9]{3,5}"}\n'
        )
        first = compile_rules(tmp_path, keys, text)
        assert (first.code, first.err) == (0, "")
        again = compile_rules(tmp_path, keys, text, out="again.json")
        assert (tmp_path / "rules.json").read_bytes() == (tmp_path / "again.json").read_bytes()
        assert first.out == again.out
        said = "Bluebirds of acct-12345678 and acct-1, BLUEBIRD acct-123."
        (tmp_path / "said.txt").write_text(said)
        check = ("rules", "check", tmp_path / "rules.json", "--key", keys / "sign.pub")
        shown = ralbuild(*check, "--text", tmp_path / "said.txt", cwd=tmp_path)
        expected = re.sub("acct-[0-9]{3,5}", "[redacted]", re.sub("(?i)bluebird", "[bird]", said))
        assert (shown.code, shown.out) == (0, expected)

    def test_it_does_not_replace_what_it_is_made_from(self, keys: Path, tmp_path: Path) -> None:
        own = tmp_path / "own.key"
        own.write_bytes((keys / "sign.key").read_bytes())
        (tmp_path / "link").symlink_to("runtime-rules.yaml")
        for out in ("runtime-rules.yaml", "link", "own.key"):
            done = compile_rules(tmp_path, tmp_path, "serial: 1\n", by="own", out=out)
            assert done.code == 2
            assert "--out: would replace" in done.err
        assert own.read_bytes() == (keys / "sign.key").read_bytes()
        assert "serial: 1" in (tmp_path / "runtime-rules.yaml").read_text()

    def test_openssl_accepts_the_signature_over_the_envelope_s_bytes(
        self, tmp_path: Path, keys: Path
    ) -> None:
        compile_rules(tmp_path, keys, 'serial: 0\nstop: ["END"]\n')
        envelope = json.loads((tmp_path / "rules.json").read_bytes())
        signed = pae(PAYLOAD_TYPE, base64.b64decode(envelope["payload"]))
        key = serialization.load_pem_public_key((keys / "sign.pub").read_bytes())
        assert isinstance(key, ec.EllipticCurvePublicKey)
        key.verify(base64.b64decode(envelope["signatures"][0]["sig"]), signed, ec.ECDSA(hashes.SHA256()))

    @pytest.mark.parametrize(
        ("text", "needle"),
        [
            ("", "lacks the key 'serial'"),
            ("serial: -1\n", "runtime-rules.yaml:2:9"),
            ("serial: 1\nban: [x]\n", "unknown key 'ban'"),
            ('serial: 1\nredact: [{text: "a", in: thinking}]\n', "'in' needs spans"),
            ('serial: 1\nrefuse: [{pattern: "a*"}]\n', "runtime-rules.yaml:3:"),
            ('serial: 1\nredact: [{text: "a", kind: card}]\n', "exactly one"),
            ('serial: "1"\n', "needs a whole number"),
            ("serial: 1\nserial: 2\n", "serial"),
            ("endpoint: x\nserial: 1\n", "rules listen on nothing"),
        ],
    )
    def test_a_mistake_is_named_and_leaves_no_file(
        self, tmp_path: Path, keys: Path, text: str, needle: str
    ) -> None:
        done = compile_rules(tmp_path, keys, text)
        assert done.code == 2
        assert needle in done.err
        assert sorted(path.name for path in tmp_path.iterdir()) == ["runtime-rules.yaml"]

    def test_a_file_of_another_key_is_not_read(self, tmp_path: Path, keys: Path) -> None:
        compile_rules(tmp_path, keys, 'serial: 1\nstop: ["secret words"]\n', by="other")
        done = ralbuild("rules", "check", tmp_path / "rules.json", "--key", keys / "sign.pub", cwd=tmp_path)
        assert done.code == 2
        assert "is not signed by the key" in done.err
        assert "secret" not in done.out + done.err


@pytest.fixture
def published(tmp_path: Path, keys: Path) -> Callable[..., None]:
    """Put a signed file where a server looks, by a rename."""

    def publish(text: str, by: str = "sign") -> None:
        assert compile_rules(tmp_path, keys, text, by=by, out="next.json").code == 0
        (tmp_path / "next.json").rename(tmp_path / "rules.json")

    return publish


class TestFile:
    """One server's view of the file, without a server."""

    def rules(self, tmp_path: Path, keys: Path, least: int = 0) -> tuple[RuleFile, CollectorRegistry]:
        registry = CollectorRegistry()
        metrics = RuntimeRuleMetrics(registry)
        return RuleFile(tmp_path / "rules.json", keys / "sign.pub", metrics, least), registry

    def test_a_server_starts_with_no_older_file_than_whoever_starts_it_says(
        self, tmp_path: Path, keys: Path, published: Callable[..., None]
    ) -> None:
        published("serial: 6\n")
        for least in (0, 6):
            rules, _ = self.rules(tmp_path, keys, least)
            assert (rules.info()["serial"], rules.info()["least_serial"]) == (6, least)
        with pytest.raises(RuntimeRulesError, match="serial 6; RAL_RUNTIME_RULES_LEAST is 7") as caught:
            self.rules(tmp_path, keys, 7)
        assert caught.value.exit_code == 87

    def test_a_file_that_may_not_come_into_force_changes_nothing(
        self, tmp_path: Path, keys: Path, published: Callable[..., None]
    ) -> None:
        published("serial: 5\nredact: [{text: blue, with: red}]\n")
        rules, registry = self.rules(tmp_path, keys)
        before, path = rules.current, tmp_path / "rules.json"
        good = path.read_bytes()
        envelope = json.loads(good)

        def without_signature() -> None:
            path.write_text(json.dumps(envelope | {"signatures": []}))

        def other_payload() -> None:
            payload = base64.b64encode(
                base64.b64decode(envelope["payload"]).replace(b"blue", b"grey")
            ).decode()
            path.write_text(json.dumps(envelope | {"payload": payload}))

        faults: list[tuple[Callable[[], object], str]] = [
            (lambda: published("serial: 6\n", by="other"), "is not signed"),
            (lambda: published("serial: 4\n"), "serial 4"),
            (lambda: published("serial: 5\nredact: [{text: blue, with: grey}]\n"), "serial 5"),
            (without_signature, "signatures"),
            (other_payload, "is not signed"),
            (lambda: path.write_bytes(good[:-9]), "not JSON"),
            (lambda: path.write_bytes(b""), "not JSON"),
            (lambda: path.write_bytes(b"[" * 100_000), "nested"),
            (lambda: path.write_bytes(b" " * (17 << 20)), "bytes"),
            (path.unlink, "No such file"),
            (path.mkdir, "regular file"),
        ]
        for number, (fault, reason) in enumerate(faults):
            fault()
            assert not rules.check()
            assert rules.current is before
            assert re.search(reason, rules.refused), rules.refused
            assert registry.get_sample_value("ralbuild_runtime_rules_stale") == 1
            found = registry.get_sample_value("ralbuild_runtime_rules_loads_total", {"result": "refused"})
            assert found == number + 1
            rules.check()  # the same fault is said once
            assert (
                registry.get_sample_value("ralbuild_runtime_rules_loads_total", {"result": "refused"})
                == found
            )
        path.rmdir()
        published("serial: 6\nredact: [{text: blue, with: green}]\n")
        assert rules.check()
        assert (rules.current.serial, rules.refused) == (6, "")
        assert registry.get_sample_value("ralbuild_runtime_rules_stale") == 0

    def test_the_same_file_again_ends_a_refusal(
        self, tmp_path: Path, keys: Path, published: Callable[..., None]
    ) -> None:
        published("serial: 5\nstop: [x]\n")
        rules, registry = self.rules(tmp_path, keys)
        path = tmp_path / "rules.json"
        good = path.read_bytes()
        path.write_bytes(b"{}")
        rules.check()
        assert rules.refused
        before = rules.current
        path.write_bytes(good)
        assert not rules.check()  # a worker has these rules already, and their counts
        assert not rules.refused
        assert rules.current is before
        assert registry.get_sample_value("ralbuild_runtime_rules_stale") == 0

    def test_a_folder_that_is_swapped_by_a_link_is_seen(
        self, tmp_path: Path, keys: Path, published: Callable[..., None]
    ) -> None:
        """As Kubernetes replaces a mounted ConfigMap."""
        for number in (1, 2):
            published(f"serial: {number}\n")
            folder = tmp_path / f"v{number}"
            folder.mkdir()
            (tmp_path / "rules.json").rename(folder / "rules.json")
        link = tmp_path / "data"
        link.symlink_to("v1")
        (tmp_path / "rules.json").symlink_to("data/rules.json")
        rules, _ = self.rules(tmp_path, keys)
        assert rules.current.serial == 1
        (tmp_path / "new").symlink_to("v2")
        (tmp_path / "new").rename(link)
        rules.check()
        assert rules.current.serial == 2

    def test_an_answer_ends_under_the_rules_it_began_under(
        self, tmp_path: Path, keys: Path, published: Callable[..., None]
    ) -> None:
        published("serial: 1\nredact: [{text: blue, with: red}]\n")
        rules, _ = self.rules(tmp_path, keys)
        metrics = Metrics("0")
        old = read_rule_set(rules.current.payload, metrics).open()
        published("serial: 2\nredact: [{text: blue, with: green}]\n")
        assert rules.check()
        new = read_rule_set(rules.current.payload, metrics).open()
        assert old is not None
        assert new is not None
        assert old.feed(b"a bl") + old.feed(b"ue bl") + old.finish() == b"a red bl"
        name = "ralbuild_runtime_rule_events_total"
        labels = {"serial": "2", "rule": "0", "kind": "redact", "place": "3:10"}
        assert (
            metrics.registry.get_sample_value(name, labels) == 0
        )  # the old rule's match is not the new one's
        assert new.feed(b"a blue") + new.finish() == b"a green"
        assert metrics.registry.get_sample_value(name, labels) == 1
        assert metrics.registry.get_sample_value(name, labels | {"serial": "1"}) is None
        assert rules.info()["rules"] == [{"id": 0, "kind": "redact", "place": "3:10"}]

    def test_what_clients_send_is_refused_by_the_rule_s_place(
        self, tmp_path: Path, keys: Path, published: Callable[..., None]
    ) -> None:
        published('serial: 1\nrefuse: [{text: "drop table", whole_words: true}]\n')
        rules = read_rule_set(self.rules(tmp_path, keys)[0].current.payload, Metrics("0"))
        assert rules.open() is None
        rules.admit(["drop tables", "", "drop", "table"], logprobs=True)
        with pytest.raises(ApiError) as caught:
            rules.admit(["fine", "please DROP TABLE users"], logprobs=False)
        assert (caught.value.status, caught.value.code) == (400, "content_refused")
        assert caught.value.body()["error"]["rule"] == "refuse@3:10"
        assert "drop" not in json.dumps(caught.value.body()).lower()

    @pytest.mark.parametrize("fault", ["missing", "unsigned", "no key"])
    def test_a_server_does_not_start_without_the_rules_that_it_was_told_to_have(
        self, tmp_path: Path, keys: Path, published: Callable[..., None], fault: str
    ) -> None:
        if fault != "missing":
            published("serial: 1\n", by="other")
        key = tmp_path / "none.pub" if fault == "no key" else keys / "sign.pub"
        with pytest.raises(RuntimeRulesError) as caught:
            RuleFile(tmp_path / "rules.json", key, RuntimeRuleMetrics(CollectorRegistry()))
        assert caught.value.exit_code == 87


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def tokens(model: Path) -> list[bytes]:
    return greedy(model, CHAT["messages"][0]["content"], 60)


@pytest.fixture(scope="module")
def words(tokens: list[bytes]) -> list[str]:
    return words_of(tokens)


@pytest.fixture(scope="module")
def plain(tokens: list[bytes]) -> str:
    return b"".join(tokens).decode(errors="replace")


@pytest.fixture
def image(model: Path, words: list[str], tmp_path: Path) -> Image:
    """One word is bold; every answer gets an appended line."""
    return make_image(
        tmp_path / "root",
        model,
        (Rules(bold=words[0], append=f"\n{words[1]}."),),
        engine=Engine(4, 512, "float32"),
    )


def test_a_server_applies_its_file_after_the_compiled_rules_and_takes_a_new_one_while_it_runs(
    image: Image, words: list[str], plain: str, tmp_path: Path, keys: Path, published: Callable[..., None]
) -> None:
    compiled = plain.replace(words[0], f"<b>{words[0]}</b>")
    appended = f"\n{words[1]}."

    def rule(serial: int, word: str, written: str) -> str:
        return f"serial: {serial}\nredact: [{{text: {json.dumps(word)}, with: {json.dumps(written)}, case_sensitive: true}}]\n"

    published(rule(1, words[1], "_"))
    folder = tmp_path / "mounted"
    folder.mkdir()
    shutil.move(tmp_path / "rules.json", folder / "rules.json")
    env = {"RAL_RUNTIME_RULES": str(folder / "rules.json"), "RAL_RUNTIME_RULES_KEY": str(keys / "sign.pub")}
    with running(image, ONE_THREAD | env) as runtime:
        # What the image appends is the image's: the rule does not reach it.
        assert say(runtime) == compiled.replace(words[1], "_") + appended
        lines = [line.removeprefix(b"data: ") for line in events(runtime, "/v1/chat/completions", CHAT)]
        streamed = [json.loads(line) for line in lines if line != b"[DONE]"]
        texts = [part["choices"][0]["delta"].get("content", "") for part in streamed if part["choices"]]
        assert "".join(texts) == compiled.replace(words[1], "_") + appended
        info = json.loads(runtime.get("/ral/info")[1])
        (row,) = info["runtime_rules"]["rules"]
        assert row["events"] == 2 * compiled.count(words[1])
        bundle = info["bundle"]
        status, body, _ = runtime.post("/v1/chat/completions", CHAT | {"logprobs": True})
        assert (status, body["error"]["param"]) == (400, "logprobs")

        def put(text: str, by: str = "sign") -> None:
            published(text, by)
            (tmp_path / "rules.json").rename(folder / "rules.json")

        def wait_for(found: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
            deadline = time.monotonic() + 20
            while not found(info := json.loads(runtime.get("/ral/info")[1])["runtime_rules"]):
                assert time.monotonic() < deadline, info
                time.sleep(0.05)
            return info

        put(rule(9, words[1], "!"), by="other")
        info = wait_for(lambda info: info["refused"] is not None)
        assert info["serial"] == 1
        assert "runtime rules refused" in runtime.log
        assert say(runtime) == compiled.replace(words[1], "_") + appended
        put(
            rule(2, f"</b>{plain[plain.index(words[0]) + 2]}", "|")
            + f'refuse: [{{text: "forbidden {words[0]}"}}]\n'
        )
        wait_for(lambda info: info["serial"] == 2)
        after = plain[plain.index(words[0]) + 2]
        assert say(runtime) == compiled.replace(f"</b>{after}", "|") + appended
        asked = {"messages": [{"role": "user", "content": f"A FORBIDDEN {words[0].upper()}?"}]}
        status, body, _ = runtime.post("/v1/chat/completions", CHAT | asked)
        assert (status, body["error"]["code"]) == (400, "content_refused")
        put(f"serial: 3\nstop: [{json.dumps(words[1])}]\n")
        wait_for(lambda info: info["serial"] == 3)
        assert say(runtime) == compiled.partition(words[1])[0] + appended
        assert json.loads(runtime.get("/ral/info")[1])["bundle"] == bundle
        shown = (runtime.get("/ral/info")[1] + runtime.get("/metrics")[1]).decode()
        assert "forbidden" not in shown
        assert "forbidden" not in runtime.log


def test_a_server_whose_file_is_wrong_ends_with_its_own_status(
    image: Image, tmp_path: Path, keys: Path, published: Callable[..., None]
) -> None:
    published("serial: 1\n", by="other")
    env = {"RAL_RUNTIME_RULES": str(tmp_path / "rules.json")}
    code, log = refused(image, env | {"RAL_RUNTIME_RULES_KEY": str(keys / "sign.pub")})
    assert code == 87
    assert "is not signed by the key" in log
    code, log = refused(image, env)
    assert code == 84
    assert "RAL_RUNTIME_RULES_KEY: is missing" in log
    published("serial: 1\n")
    old = {"RAL_RUNTIME_RULES_KEY": str(keys / "sign.pub"), "RAL_RUNTIME_RULES_LEAST": "2"}
    code, log = refused(image, env | old)
    assert code == 87
    assert "RAL_RUNTIME_RULES_LEAST is 2" in log
