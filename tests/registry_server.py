"""A registry on loopback that keeps everything in memory, remembers what was asked, and fails on request.

It is written from the distribution specification, not from our client. A fault is a function that sees
a request first and tells whether it has dealt with it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

INDEX = "application/vnd.oci.image.index.v1+json"


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Seen:
    method: str
    path: str
    authorization: str
    size: int


Fault = Callable[["Handler"], bool]


@dataclass
class FakeRegistry:
    """State and behaviour; change the attributes before or while it serves."""

    url: str = ""
    host: str = ""
    blobs: dict[str, bytes] = field(default_factory=dict)
    promised: dict[str, int] = field(default_factory=dict)
    """Digest to size of blobs that every repository claims to have; nobody can fetch them."""
    linked: set[tuple[str, str]] = field(default_factory=set)
    manifests: dict[tuple[str, str], tuple[bytes, str]] = field(default_factory=dict)
    sessions: dict[str, bytearray] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    auth: str = ""
    password: str = "user:secret"
    token_uses: int = 1_000_000
    identity: str = ""
    tokens: dict[str, int] = field(default_factory=dict)
    issued: list[list[str]] = field(default_factory=list)
    upload_host: str = ""
    patch_status: int = 202
    mounts: bool = True
    referrers: bool = True
    digest_header: bool = True
    keep: bool = True

    def count(self, method: str, pattern: str = "") -> int:
        return sum(item.method == method and bool(re.search(pattern, item.path)) for item in self.seen)

    def add_blob(self, repository: str, data: bytes) -> str:
        self.blobs[sha256(data)] = data
        self.linked.add((repository, sha256(data)))
        return sha256(data)

    def add_manifest(self, repository: str, value: Any, kind: str, tag: str = "") -> str:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        for reference in (sha256(data), tag):
            if reference:
                self.manifests[repository, reference] = (data, kind)
        return sha256(data)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    registry: FakeRegistry

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, data: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, status: int, code: str, **headers: str) -> None:
        self.answer(
            status, json.dumps({"errors": [{"code": code, "message": code.lower()}]}).encode(), **headers
        )

    def body(self) -> bytes:
        left, out = int(self.headers.get("Content-Length", 0)), bytearray()
        self.digest = hashlib.sha256()
        while left and (chunk := self.rfile.read(min(left, 1 << 16))):
            left -= len(chunk)
            self.digest.update(chunk)
            if self.registry.keep or len(out) < 1 << 20:
                out += chunk
        return bytes(out)

    def drop(self) -> None:
        """Hang up."""
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def dispatch(self) -> None:
        authorization = self.headers.get("Authorization", "")
        size = int(self.headers.get("Content-Length") or 0)
        self.registry.seen.append(Seen(self.command, self.path, authorization, size))
        for fault in list(self.registry.faults):
            if fault(self):
                return
        parts = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        if parts.path == "/token":
            self.token()
        elif self.allowed(authorization):
            match = re.fullmatch(r"/v2/(.+)/(blobs|manifests|referrers)/(.*)", parts.path)
            if match is None:
                self.answer(200 if parts.path == "/v2/" else 404)
            else:
                getattr(self, match[2])(match[1], match[3])

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = dispatch  # noqa: N815

    def allowed(self, authorization: str) -> bool:
        registry = self.registry
        if not registry.auth:
            return True
        basic = "Basic " + base64.b64encode(registry.password.encode()).decode()
        token = authorization.removeprefix("Bearer ")
        if registry.auth == "basic" and authorization == basic:
            return True
        if registry.auth == "bearer" and registry.tokens.get(token, 0) > 0:
            registry.tokens[token] -= 1
            return True
        self.body()
        challenge = f'Bearer realm="{registry.url}/token",service="fake",scope="unused"'
        self.refuse(
            401,
            "UNAUTHORIZED",
            WWW_Authenticate=challenge if registry.auth == "bearer" else 'Basic realm="x"',
        )
        return False

    def token(self) -> None:
        registry = self.registry
        basic = "Basic " + base64.b64encode(registry.password.encode()).decode()
        form = parse_qs(self.body().decode())
        good = self.headers.get("Authorization") == basic
        if registry.identity:
            good = form.get("refresh_token") == [registry.identity]
        if not good:
            self.refuse(401, "DENIED")
            return
        query = parse_qs(urlsplit(self.path).query)
        registry.issued.append(sorted(query.get("scope", form.get("scope", []))))
        name = f"token-{len(registry.issued)}"
        registry.tokens[name] = registry.token_uses
        self.answer(200, json.dumps({"token": name, "expires_in": 300}).encode())

    def blobs(self, repository: str, rest: str) -> None:
        if rest.startswith("uploads/"):
            self.uploads(repository, rest.removeprefix("uploads/"))
            return
        if self.command == "HEAD" and rest in self.registry.promised:
            size = str(self.registry.promised[rest])
            self.answer(200, Content_Length=size, Docker_Content_Digest=rest)
            return
        if (repository, rest) not in self.registry.linked:
            self.refuse(404, "BLOB_UNKNOWN")
            return
        data = self.registry.blobs[rest]
        begin = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if begin:
            at = int(begin[1])
            self.answer(206, data[at:], Content_Range=f"bytes {at}-{len(data) - 1}/{len(data)}")
        else:
            self.answer(200, data, Docker_Content_Digest=rest)

    def uploads(self, repository: str, session: str) -> None:
        registry = self.registry
        if self.command == "POST":
            self.begin(repository)
        elif session not in registry.sessions:
            self.body()
            self.refuse(404, "BLOB_UPLOAD_UNKNOWN")
        elif self.command == "DELETE":
            del registry.sessions[session]
            self.answer(204)
        elif self.command == "PATCH":
            registry.sessions[session] += self.body()
            self.answer(
                registry.patch_status, Location=f"/v2/{repository}/blobs/uploads/{session}?state=a%2Fb"
            )
        else:
            self.close_upload(repository, session)

    def begin(self, repository: str) -> None:
        registry = self.registry
        digest, source = self.query.get("mount", ""), self.query.get("from", "")
        if registry.mounts and (source, digest) in registry.linked:
            registry.linked.add((repository, digest))
            self.answer(201, Location=f"/v2/{repository}/blobs/{digest}", Docker_Content_Digest=digest)
            return
        name = f"s{len(registry.sessions)}-{len(registry.seen)}"
        registry.sessions[name] = bytearray()
        where = registry.upload_host or ""
        self.answer(202, Location=f"{where}/v2/{repository}/blobs/uploads/{name}?state=a%2Fb")

    def close_upload(self, repository: str, session: str) -> None:
        registry, wanted = self.registry, self.query.get("digest", "")
        rest = self.body()
        held = bytes(registry.sessions.pop(session))
        found = sha256(held + rest) if registry.keep else f"sha256:{self.digest.hexdigest()}"
        if found != wanted:
            self.refuse(400, "DIGEST_INVALID")
            return
        registry.blobs[wanted] = held + rest
        registry.linked.add((repository, wanted))
        self.answer(201, Location=f"/v2/{repository}/blobs/{wanted}", Docker_Content_Digest=wanted)

    def manifests(self, repository: str, reference: str) -> None:
        registry = self.registry
        if self.command == "PUT":
            data, kind = self.body(), self.headers["Content-Type"]
            value = json.loads(data)
            parts = [item["digest"] for item in (value.get("config"), *value.get("layers", [])) if item]
            if not all((repository, part) in registry.linked or part in registry.promised for part in parts):
                self.refuse(400, "MANIFEST_BLOB_UNKNOWN")
                return
            registry.add_manifest(repository, data, kind, reference)
            extra = {"Docker_Content_Digest": sha256(data)} if registry.digest_header else {}
            if registry.referrers and "subject" in value:
                extra["OCI_Subject"] = value["subject"]["digest"]
            self.answer(201, **extra)
        elif (repository, reference) in registry.manifests:
            data, kind = registry.manifests[repository, reference]
            extra = {"Docker_Content_Digest": sha256(data)} if registry.digest_header else {}
            self.answer(200, data, Content_Type=kind, **extra)
        else:
            self.refuse(404, "MANIFEST_UNKNOWN")

    def referrers(self, repository: str, digest: str) -> None:
        if not self.registry.referrers:
            self.answer(404)
            return
        found = {
            sha256(data): {"mediaType": kind, "digest": sha256(data), "size": len(data)}
            for (name, _), (data, kind) in self.registry.manifests.items()
            if name == repository and json.loads(data).get("subject", {}).get("digest") == digest
        }
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": list(found.values())}
        self.answer(200, json.dumps(index).encode(), Content_Type=INDEX)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """A client that hangs up is part of the tests."""


@contextmanager
def serve(tls: Path | None = None, **behaviour: Any) -> Iterator[FakeRegistry]:
    """Serve on a free port; ``tls`` is a PEM file with certificate and key."""
    registry = FakeRegistry(**behaviour)
    server = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"registry": registry}))
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    registry.host = f"127.0.0.1:{server.server_port}"
    registry.url = f"{'https' if tls else 'http'}://{registry.host}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield registry
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def times(count: int, method: str, pattern: str, act: Callable[[Handler], None]) -> Fault:
    """Return a fault that does ``act`` for the first ``count`` requests that match."""
    left = [count]

    def fault(handler: Handler) -> bool:
        if handler.command != method or not re.search(pattern, handler.path) or not left[0]:
            return False
        left[0] -= 1
        act(handler)
        return True

    return fault


ALWAYS = 1 << 30
