"""The story of one changed rule, run for real and written down: build, sign, push, gate, switch, go back.

    python -m benchmarks.story --model DIR --out docs/story.md

Needs docker, docker-registry, haproxy, openssl, curl and jq, and the ports 8000 and 5000 of the loopback
interface. Every command runs in a new folder; the page shows each with what it printed, unchanged. Four
kinds of clients (benchmarks/traffic.py) ask while the second half runs; a failed request fails the story.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.image import registry
from benchmarks.real_model import add_model_option, model_folder
from benchmarks.traffic import Traffic

PORT, REGISTRY_PORT = 8000, 5000
REGISTRY = f"127.0.0.1:{REGISTRY_PORT}"
MODEL = "smollm2-135m-instruct"
REQUESTS = 500
"""The clients stop when so many were answered; if none fails, less than one in 167 does, 95 times in 100."""
QUESTION = "What does a compliance audit check? Answer in one sentence."
UP = f"ralbuild release up {REGISTRY}/chat@$(cat v{{}}.digest) --key sign.pub --site site"
RULES = "--runtime-rules rules.json --rules-key sign.pub"
CONFIG = f"""version: "0.3"
model: "{MODEL}"
max_batch_size: 16
max_seq_len: 2048
postprocessing:
  output_transformers:
    - name: html_enhancer
      config: {{bold_terms: ["risk", "compliance", "audit"]}}
build: {{targets: []}}
"""
ASK = f"""#!/bin/sh
curl -s http://127.0.0.1:{PORT}/v1/chat/completions -H 'content-type: application/json' -d '{{
  "model": "{MODEL}", "temperature": 0, "max_tokens": 24,
  "messages": [{{"role": "user", "content": "{QUESTION}"}}]}}' | jq -r '.choices[0].message.content'
"""


@dataclass(frozen=True, slots=True)
class Step:
    """A paragraph and the commands below it; with ``refused`` the first of them ends with status 8."""

    prose: str
    commands: tuple[str, ...]
    refused: bool = False


BEFORE = (
    Step(
        "A folder with weights, a config with three bold terms, and a key. The image is built and signed\n"
        "without docker.",
        (
            "cat ral-config.yaml",
            "openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out sign.key",
            "openssl pkey -in sign.key -pubout -out sign.pub",
            "ralbuild image --model weights --config ral-config.yaml --output oci:v1 --sign sign.key --sbom",
        ),
    ),
    Step(
        "It goes to a registry, and the machine that serves takes it from there by its digest, when its\n"
        "signature is ours. The machine gets a second file as well: rules of the serving side, none so far.",
        (
            f"ralbuild push oci:v1 registry:{REGISTRY}/chat:1 > v1.digest",
            "cat runtime-rules.yaml",
            "ralbuild rules compile runtime-rules.yaml --key sign.key --out rules.json",
            f"ralbuild release init --site site --listen 127.0.0.1:{PORT} --watch 5 {RULES}",
            UP.format(1),
        ),
    ),
    Step(
        "What it answers now becomes the gate of the releases to come.",
        (
            "cat ask",
            "./ask",
            f'ralbuild probe --url http://127.0.0.1:{PORT} --record probes.yaml --prompt "{QUESTION}"',
            "cat probes.yaml",
        ),
    ),
)
AFTER = (
    Step(
        "One more bold term. The new image shares everything with the old one but its last layer.",
        (
            """sed -i 's/"audit"]/"audit", "company"]/' ral-config.yaml""",
            "ralbuild image --model weights --config ral-config.yaml --output oci:v2 --sign sign.key --sbom",
            "ralbuild diff oci:v1 oci:v2",
            f"ralbuild push oci:v2 registry:{REGISTRY}/chat:2 > v2.digest",
        ),
    ),
    Step(
        "Before it is released, every byte of it and its signature are checked.",
        ("ralbuild verify-image oci:v2 --key sign.pub",),
    ),
    Step(
        "The gate refuses it: the recorded answer is the old rule's. No request has reached the new\n"
        "container, and it is gone.",
        (
            UP.format(2) + " --probes probes.yaml",
            "echo $?",
        ),
        refused=True,
    ),
    Step(
        "The new rule is meant, so the expected answer changes with it, as it would in the same commit. Now\n"
        "it passes, and serves.",
        (
            "sed -i 's/company/<b>company<\\/b>/' probes.yaml",
            UP.format(2) + " --probes probes.yaml",
            "./ask",
            "ralbuild release status --site site",
        ),
    ),
    Step(
        "And back: the old image was stopped, so it starts again, passes the gate, and serves.",
        (
            "ralbuild release rollback --site site",
            "./ask",
            "ralbuild release status --site site",
        ),
    ),
    Step(
        "A machine that holds one model at a time parks the requests while it swaps.",
        (
            UP.format(2) + " --mode in-place",
            "./ask",
        ),
    ),
    Step(
        "Some rules cannot wait for an image: a word has to go today. It is published to what serves,\n"
        "without a switch; the image and its digest stay.",
        (
            "printf 'version: \"0.3\"\\nserial: 2\\nredact:\\n  - {text: company}\\n' > runtime-rules.yaml",
            "ralbuild rules compile runtime-rules.yaml --key sign.key --out rules.json",
            "ralbuild release rules rules.json --site site",
            "./ask",
            f"ralbuild inspect oci:v2 {RULES} | sed -n '/^decided by/,/^routes/p'",
        ),
    ),
)


def main() -> int:
    """Run the story and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_option(parser)
    parser.add_argument("--out", type=Path, required=True, help="the page")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(working_folder(model_folder(options.model)))
        stack.enter_context(registry(folder, ".registry", REGISTRY_PORT))
        stack.callback(clean_up, folder)
        parts = [tell(folder, step) for step in BEFORE]
        with Traffic(PORT, MODEL, QUESTION, each=3, pause=0.05) as traffic:
            parts += [tell(folder, step) for step in AFTER]
            traffic.wait_for(REQUESTS)
        parts.append(outcome(traffic))
    page = "\n".join([HEAD, *parts])
    assert str(folder) not in page
    options.out.write_text(page)
    print(outcome(traffic), end="")
    return 1 if traffic.failures else 0


HEAD = """# One changed rule, from the config to the clients and back

Written by `python -m benchmarks.story` from a real run: SmolLM2-135M-Instruct, a docker engine, Debian's
registry and HAProxy, all on one machine of two shared processors, whose times are no measure. Nothing below
was edited.
"""


def tell(folder: Path, step: Step) -> str:
    """Run the commands of a step; return its part of the page."""
    lines = [step.prose, "", "```console"]
    code = 0
    for number, command in enumerate(step.commands):
        # One shell for each command, as if typed: `$?` is that of the command before.
        script = command.replace("$?", str(code))
        done = subprocess.run(
            ["bash", "-c", script], cwd=folder, env=environment(folder), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        code = done.returncode
        print(f"$ {command}\n{done.stdout}", file=sys.stderr, flush=True)
        lines += [f"$ {command}", *done.stdout.splitlines()]
        expected = 8 if step.refused and number == 0 else 0
        if code != expected:
            raise SystemExit(f"{command}: ended with {code}, expected {expected}")
    return "\n".join([*lines, "```", ""])


def outcome(traffic: Traffic) -> str:
    """Return what the clients saw."""
    kinds = sorted({answer.kind for answer in traffic.answers})
    counts = ", ".join(f"{sum(answer.kind == kind for answer in traffic.answers)} {kind}" for kind in kinds)
    return (
        "While all of this happened, from the changed term on, clients of four kinds asked without pause:\n"
        f"{len(traffic.answers)} requests were answered ({counts}),\n"
        f"{len(traffic.failures)} failed, and the slowest took {traffic.longest:.1f} s.\n"
    )


def environment(folder: Path) -> dict[str, str]:
    """Return this process's variables, with `ralbuild` and nothing that changes what is printed."""
    env = {**os.environ, "PATH": f"{folder / '.bin'}:{os.environ['PATH']}:/usr/sbin"}
    return env | {
        "COLUMNS": "110",
        "NO_COLOR": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
    }


@contextmanager
def working_folder(model: Path) -> Iterator[Path]:
    """Make the folder that the story begins with."""
    folder = Path(tempfile.mkdtemp(prefix="story."))
    try:
        (folder / "weights").symlink_to(model.resolve())
        (folder / "ral-config.yaml").write_text(CONFIG)
        (folder / ".bin").mkdir()
        for path, text in (
            (folder / "ask", ASK),
            (folder / "runtime-rules.yaml", 'version: "0.3"\nserial: 1\n'),
            (folder / ".bin" / "ralbuild", f'#!/bin/sh\nexec {sys.executable} -m ralbuild.cli.main "$@"\n'),
        ):
            path.write_text(text)
            path.chmod(0o755)
        yield folder
    finally:
        shutil.rmtree(folder)


def clean_up(folder: Path) -> None:
    """Stop the proxy, and take containers and images away."""
    site = folder / "site"
    subprocess.run([folder / ".bin" / "ralbuild", "release", "proxy", "stop", "--site", site], check=False)
    listing = ["docker", "ps", "-aq", "--filter", f"label=io.ralbuild.release.site={site}"]
    for box in subprocess.run(listing, capture_output=True, text=True, check=False).stdout.split():
        subprocess.run(["docker", "rm", "-f", box], stdout=subprocess.DEVNULL, check=False)
    digests = [path.read_text().strip() for path in sorted(folder.glob("v*.digest"))]
    for digest in filter(None, digests):
        subprocess.run(["docker", "rmi", f"{REGISTRY}/chat@{digest}"], stdout=subprocess.DEVNULL, check=False)


if __name__ == "__main__":
    sys.exit(main())
