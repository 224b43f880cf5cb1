"""Rules the usual way: a proxy that runs regular expressions over the text of the answer so far.

    python -m benchmarks.middleware --upstream http://127.0.0.1:8000 --port 8001 --terms terms.txt

For every piece it rewrites the whole text so far, keeps back what could still become a match and sends
the rest. It does what a careful middleware does, with connections kept open and one compiled expression.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route


class Rewriter:
    """The terms of one answer, in bold: whole words, any case."""

    def __init__(self, terms: list[str]) -> None:
        words = "|".join(re.escape(term) for term in sorted(terms, key=len, reverse=True))
        self._pattern = re.compile(rf"\b(?:{words})\b", re.IGNORECASE) if terms else None
        self._held = max(map(len, terms), default=0)

    def rewrite(self, text: str, *, end: bool) -> str:
        """Return what is certain of the rewritten ``text``, which is the whole answer so far."""
        if self._pattern is None:
            return text
        sure = len(text) if end else max(0, len(text) - self._held - 1)
        out, at = [], 0
        for match in self._pattern.finditer(text):
            if match.end() > sure:
                break
            out += [text[at : match.start()], "<b>", match.group(), "</b>"]
            at = match.end()
        return "".join(out) + text[at:sure]


def make_app(upstream: str, terms: list[str]) -> Starlette:
    """Return the proxy for streamed chat completions."""
    client = httpx.AsyncClient(base_url=upstream, timeout=600)
    rewriter = Rewriter(terms)

    async def chat(request: Request) -> StreamingResponse:
        body = await request.body()
        sent = client.build_request(
            "POST", "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
        response = await client.send(sent, stream=True)
        return StreamingResponse(
            rewritten(response, rewriter), response.status_code, media_type="text/event-stream"
        )

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])


async def rewritten(response: httpx.Response, rewriter: Rewriter) -> AsyncIterator[str]:
    """Yield the events of ``response`` with rewritten text."""
    text, sent = "", 0
    async for line in response.aiter_lines():
        if not line.startswith("data: {"):
            yield f"{line}\n"
            continue
        event = json.loads(line[6:])
        for choice in event.get("choices", []):
            text += choice["delta"].get("content") or ""
            out = rewriter.rewrite(text, end=choice.get("finish_reason") is not None)
            choice["delta"]["content"] = out[sent:]
            sent = max(sent, len(out))
        yield f"data: {json.dumps(event)}\n"
    await response.aclose()


def main() -> None:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upstream", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--terms", type=Path, required=True, help="a file with one term a line")
    options = parser.parse_args()
    app = make_app(options.upstream, options.terms.read_text().splitlines())
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
