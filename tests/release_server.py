"""A stand-in for an image's server: OpenAI's shapes, ready after a while, drains on SIGTERM, faults on demand.

Run as a process by `release_support.ProcessHost`; standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULT = os.environ.get("FAULT", "")
BUNDLE = os.environ["BUNDLE"]
LOAD_SECONDS = float(os.environ.get("LOAD_SECONDS", "0.3"))
BEGAN = time.monotonic()
BODY_LIMIT = 4 << 20


class State:
    draining = False
    in_flight = 0
    lock = threading.Lock()


def text_for(prompt: str) -> str:
    said = prompt if FAULT == "leak" else prompt.replace("Bluebird", "[project]")
    return ("You asked: " if FAULT == "tokens" else "You said: ") + said


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def answer(self, status: int, body: object, kind: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        if State.draining:
            self.send_header("connection", "close")
            self.close_connection = True
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, status: int, code: str) -> None:
        self.close_connection = status == 413
        self.answer(status, {"error": {"message": code, "type": "x", "param": None, "code": code}})

    def do_GET(self) -> None:
        ready = time.monotonic() - BEGAN > LOAD_SECONDS and not State.draining and FAULT != "never-ready"
        if self.path == "/health":
            self.answer(200, {"status": "ok"})
        elif self.path == "/ready":
            self.answer(200 if ready else 503, {"stage": "ready" if ready else "load", "percent": 60})
        elif self.path == "/v1/models":
            self.answer(200, {"object": "list", "data": [{"id": "tiny"}]})
        elif self.path == "/ral/info":
            self.answer(200, {"bundle": "sha256:other" if FAULT == "bundle" else BUNDLE})
        elif self.path == "/metrics":
            lines = f"ralbuild_requests_running {State.in_flight}.0\nralbuild_requests_waiting 0.0\n"
            self.answer(200, lines.encode(), "text/plain")
        else:
            self.refuse(404, "not_found")

    def do_POST(self) -> None:
        size = int(self.headers["content-length"])
        if size > BODY_LIMIT:
            self.refuse(413, "body_too_large")
            return
        data = self.rfile.read(size)
        try:
            ask = json.loads(data)
        except ValueError:
            self.refuse(400, "invalid_json")
            return
        if ask["model"].split("/")[0] != "tiny":
            self.refuse(404, "model_not_found")
            return
        if State.draining:
            self.refuse(503, "draining")
            return
        prompt = ask["messages"][-1]["content"]
        if self.headers.get("x-ral-input-length", str(len(prompt))) != str(len(prompt)):
            self.refuse(422, "input_length_mismatch")
            return
        with State.lock:
            State.in_flight += 1
        try:
            self.generate(ask, text_for(prompt))
        finally:
            with State.lock:
                State.in_flight -= 1

    def generate(self, ask: dict, text: str) -> None:
        pause = float(os.environ.get("PAUSE", "0.01"))
        if FAULT == "slow":
            pause = 1.0
        words = text.split(" ")
        pieces = [word + " " for word in words[:-1]] + words[-1:]
        if not ask.get("stream"):
            time.sleep(pause)
            message = {"role": "assistant", "content": text}
            usage = {"completion_tokens": min(len(pieces), ask.get("max_tokens", 16))}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            self.answer(
                200,
                {"id": "a", "object": "chat.completion", "created": 0, "model": "tiny"}
                | {"choices": [choice], "usage": usage},
            )
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        if FAULT == "slow":
            time.sleep(pause)
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            self.event({"delta": {"content": piece}, "index": 0, "finish_reason": "stop" if last else None})
            time.sleep(pause)
        if FAULT != "no-done":
            self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(self, choice: dict) -> None:
        body = {
            "id": "a",
            "object": "chat.completion.chunk",
            "created": 0,
            "model": "tiny",
            "choices": [choice],
        }
        self.chunk(b"data: " + json.dumps(body).encode() + b"\n\n")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n" % len(data) + data + b"\r\n")
        self.wfile.flush()


def main() -> None:
    if FAULT == "exits":
        print("refused exit=81")
        sys.exit(81)
    ThreadingHTTPServer.request_queue_size = 256
    server = ThreadingHTTPServer((os.environ["RAL_HOST"], int(os.environ["RAL_PORT"])), Handler)

    def drain(*_: object) -> None:
        State.draining = True

        def end() -> None:
            while State.in_flight:
                time.sleep(0.02)
            time.sleep(0.1)
            os._exit(0)

        threading.Thread(target=end, daemon=True).start()

    signal.signal(signal.SIGTERM, drain)
    server.serve_forever()


main()
