"""The README's first command: fetch real weights, build an image, run it without docker, ask it.

Everything goes to `build/demo/`; the model and the base stay in the user's cache. Safe to repeat.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "demo"
RALBUILD = ROOT / ".venv" / "bin" / "ralbuild"
CONFIG = ROOT / "samples" / "finance" / "ral-config.yaml"
QUESTION = "What does a compliance audit check? Answer in one sentence."
READY_SECONDS = 600


def say(text: str = "") -> None:
    """Print one line at once."""
    print(text, flush=True)


def show(command: list[str]) -> None:
    """Print a command as a person would type it in the project's folder."""
    short = [str(part).replace(f"{ROOT}/.venv/bin/", "").replace(f"{ROOT}/", "") for part in command]
    say(f"\n$ {shlex.join(short)}")


def build(model: str) -> dict[str, Any]:
    """Build the image and return what `ralbuild image --json` says."""
    command = [str(RALBUILD), "image", "--model", model, "--config", str(CONFIG), "--target", "cpu"]
    command += ["--cache", str(OUT / ".ral_cache"), "--output", f"oci:{OUT / 'ral-image'}", "--json"]
    show(command)
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return dict(json.loads(done.stdout))


def free_port() -> int:
    """Return a port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for /ready, showing the stage; give up with the server's own words."""
    shown = ""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit(f"error: the server ended with status {server.returncode}:\n{log.read_text()}")
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except urllib.error.HTTPError as error:
            stage = json.load(error).get("stage", "")
            if stage and stage != shown:
                say(f"  {stage}")
                shown = stage
        except OSError:
            pass
        time.sleep(0.2)
    sys.exit(f"error: not ready after {READY_SECONDS} s:\n{log.read_text()}")


def ask(url: str) -> str:
    """Ask the one question and return the answer."""
    body = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 80,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


def serve_and_ask() -> tuple[str, str, float]:
    """Run the image's own file tree, ask, stop it; return answer, the log's patch line, seconds to ready."""
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", OUT / "server.log"
    command = [str(RALBUILD), "run", f"oci:{OUT / 'ral-image'}", "--port", str(port)]
    show(command)
    started = time.monotonic()
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        wait_until_ready(url, server, log)
        seconds = time.monotonic() - started
        say(f"  ready after {seconds:.1f} s")
        say(f"\n$ curl {url}/v1/chat/completions ...")
        answer = ask(url)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    patch = next(line for line in log.read_text().splitlines() if "RAL patch applied" in line)
    return answer, patch, seconds


def size(count: int) -> str:
    """Return a size in decimal units."""
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


def main() -> int:
    """Run the demo from start to end."""
    OUT.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    say("model: SmolLM2-135M-Instruct, real weights")
    fetched = subprocess.run(
        [sys.executable, str(ROOT / "ci" / "fetch_model.py")], check=True, stdout=subprocess.PIPE, text=True
    )
    model = fetched.stdout.strip()
    started = time.monotonic()
    image = build(model)
    build_seconds = time.monotonic() - started
    answer, patch, ready_seconds = serve_and_ask()

    weights = sum(layer["size"] for layer in image["layers"] if layer["kind"] == "weights")
    rules = sum(layer["size"] for layer in image["layers"] if layer["name"] == "rules")
    reused = sum(layer["reused"] for layer in image["layers"])
    summary = image["summary"]
    say()
    say(f"question  {QUESTION}")
    say(f"answer    {answer}")
    say()
    say(f"verified  {summary['verify']}")
    say(f"compiled  {summary['fold']}")
    say(f"          {summary['compile']}")
    total = sum(layer["size"] for layer in image["layers"])
    say(f"written   {size(image['written'])} of {size(total)}: weights {size(weights)}, rules {size(rules)}")
    say(f"reused    {reused} of {len(image['layers'])} layers")
    say(f"served    {patch}")
    say(f"times     build {build_seconds:.1f} s, unpack and start {ready_seconds:.1f} s")
    say(f"digest    {image['manifest']}")
    say()
    say("next: change a bold term in samples/finance/ral-config.yaml and run `make demo` again:")
    say("      only the rules layer is written. To look inside the image:")
    say("      .venv/bin/ralbuild inspect build/demo/ral-image")
    if "<b>" not in answer:
        say("error: the answer holds no bold term")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
