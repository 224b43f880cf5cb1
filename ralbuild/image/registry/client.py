"""One repository of a registry, by the OCI distribution specification 1.1.

Every answer is checked against the digest and size that were asked for: a registry that lies is an
`ImageError`, never a wrong byte. Whatever may be different next time is tried again, a bounded number of
times.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

from ralbuild.contract.codec import FormatError, canonical_json, parse_json
from ralbuild.errors import ImageError
from ralbuild.image.oci import DIGEST, INDEX_TYPE, MANIFEST_TYPE, MAX_MANIFEST, digest_of
from ralbuild.image.registry.auth import Scopes
from ralbuild.image.registry.messages import Answer, Body, Reply, TransportError, Url
from ralbuild.image.registry.reference import Reference
from ralbuild.image.registry.retry import PASSING
from ralbuild.image.registry.session import Registry, explain

MANIFEST_TYPES = (
    MANIFEST_TYPE,
    INDEX_TYPE,
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_PAGES = 100
_PROGRESS = 16 << 20
"""Bytes after which a broken download counts as a first attempt again."""
_LINK = re.compile(r'<([^<>]+)>\s*;[^,]*rel="?next"?')


class Repository:
    """One repository: its blobs and manifests. Safe to use from several threads."""

    def __init__(self, registry: Registry, name: str) -> None:
        self.registry = registry
        self.name = name

    @property
    def pull(self) -> Scopes:
        """What reading needs."""
        return frozenset({f"repository:{self.name}:pull"})

    @property
    def push(self) -> Scopes:
        """What writing needs."""
        return frozenset({f"repository:{self.name}:pull,push"})

    def reference(self, tag: str = "", digest: str = "") -> Reference:
        """Return the full name of something in this repository."""
        return Reference(self.registry.host, self.name, tag, digest)

    def has_blob(self, digest: str, size: int, *, scopes: Scopes | None = None) -> bool:
        """Tell whether the blob is there with that size."""
        reply = self.registry.send("HEAD", f"{self.name}/blobs/{digest}", scopes or self.pull)
        if reply.status == 404:
            return False
        if reply.status != 200:
            raise self.registry.refuse(reply, f"asked for {self.name}@{digest}")
        stored = reply.headers.get("docker-content-digest", digest)
        return stored == digest and reply.headers.get("content-length", str(size)) == str(size)

    def get_blob(self, digest: str, limit: int) -> bytes:
        """Return a small blob, checked.

        Raises:
            ImageError: when it is missing, longer than ``limit`` bytes, or not what its digest says.
        """
        reply = self.registry.send("GET", f"{self.name}/blobs/{digest}", self.pull)
        if reply.status != 200:
            raise self.registry.refuse(reply, f"cannot read {self.name}@{digest}")
        if len(reply.data) > limit:
            raise ImageError(
                f"has {len(reply.data)} bytes, needs at most {limit}", place=f"{self.name}@{digest}"
            )
        self._check(reply.data, digest)
        return reply.data

    def read_blob(self, digest: str, size: int) -> Iterator[bytes]:
        """Yield a blob as it arrives; a broken connection is taken up again where it broke.

        The last bytes come before the digest is known to be right: whoever keeps them must let the
        error through.

        Raises:
            ImageError: when it is missing, of another size, or not what its digest says.
        """
        place = f"{self.registry.host}/{self.name}@{digest}"
        hashed, done, attempt = hashlib.sha256(), 0, 0
        while done < size or not attempt:
            attempt, before = attempt + 1, done
            try:
                for chunk in self._read_from(digest, size, done):
                    hashed.update(chunk)
                    done += len(chunk)
                    yield chunk
            except TransportError as error:
                attempt = 1 if done - before >= _PROGRESS else attempt
                self.registry.pause(attempt, str(error))
        if f"sha256:{hashed.hexdigest()}" != digest:
            raise ImageError(
                f"is damaged: what the registry sent has sha256:{hashed.hexdigest()}", place=place
            )

    def _read_from(self, digest: str, size: int, start: int) -> Iterator[bytes]:
        headers = {"Range": f"bytes={start}-"} if start else {}
        place = f"{self.registry.host}/{self.name}@{digest}"
        with self.registry.once("GET", f"{self.name}/blobs/{digest}", self.pull, headers) as answer:
            if answer.status in PASSING:
                raise TransportError(explain(answer.whole()))
            if answer.status not in (200, 206):
                raise self.registry.refuse(answer.whole(), f"cannot read {self.name}@{digest}")
            at = _first_byte(answer, start)
            promised = answer.headers.get("content-length", "")
            if promised.isdecimal() and at + int(promised) != size:
                raise ImageError(f"needs {size} bytes, the registry has {at + int(promised)}", place=place)
            for chunk in answer.chunks():
                if at + len(chunk) > size:
                    raise ImageError(f"needs {size} bytes, the registry sends more", place=place)
                fresh = chunk[max(0, start - at) :]
                at += len(chunk)
                if fresh:
                    yield fresh
            if at < size:
                raise TransportError(f"the answer ended after {at} of {size} bytes")

    def get_manifest(self, reference: str) -> tuple[bytes, str]:
        """Return a manifest or index and its media type, checked against its digest.

        Args:
            reference: a digest or a tag.

        Raises:
            ImageError: when it is missing, too long, or not what its digest says.
        """
        headers = {"Accept": ", ".join(MANIFEST_TYPES)}
        reply = self.registry.send("GET", f"{self.name}/manifests/{reference}", self.pull, headers)
        place = f"{self.registry.host}/{self.name}"
        if reply.status != 200:
            raise self.registry.refuse(reply, f"cannot read the manifest {self.name}@{reference}")
        if len(reply.data) > MAX_MANIFEST:
            raise ImageError(f"the manifest has {len(reply.data)} bytes, at most {MAX_MANIFEST}", place=place)
        wanted = reference if DIGEST.fullmatch(reference) else reply.headers.get("docker-content-digest", "")
        if DIGEST.fullmatch(wanted):
            self._check(reply.data, wanted)
        return reply.data, reply.headers.get("content-type", "").partition(";")[0].strip()

    def manifest_digest(self, reference: str) -> str:
        """Return the digest that a tag or digest stands for now, or an empty string."""
        headers = {"Accept": ", ".join(MANIFEST_TYPES)}
        reply = self.registry.send("HEAD", f"{self.name}/manifests/{reference}", self.pull, headers)
        if reply.status == 404:
            return ""
        if reply.status != 200:
            raise self.registry.refuse(reply, f"asked for the manifest {self.name}@{reference}")
        return reply.headers.get("docker-content-digest", "")

    def put_manifest(self, data: bytes, reference: str = "", media_type: str = MANIFEST_TYPE) -> str:
        """Store a manifest or index whose blobs are all there; return its digest.

        A manifest with a ``subject`` is listed by `referrers` afterwards, whatever the registry can do.

        Args:
            data: the exact bytes.
            reference: a tag, or its digest; the digest when empty.
            media_type: what ``data`` says that it is.

        Raises:
            ImageError: when the registry refuses it or stored something else.
        """
        digest = digest_of(data)
        reply = self._put_manifest(data, reference or digest, media_type)
        subject = _object(data).get("subject")
        if isinstance(subject, dict) and not (
            self.registry.profile.referrers and "oci-subject" in reply.headers
        ):
            self._list_by_tag(data, media_type, str(subject.get("digest", "")))
        return digest

    def referrers(self, digest: str) -> tuple[dict[str, Any], ...]:
        """Return the descriptors of what refers to the manifest ``digest``: signatures, SBOMs.

        Asks the registry's own list and the fallback tag of the specification, and joins the two.
        """
        found: dict[str, dict[str, Any]] = {}
        url: Url | str = f"{self.name}/referrers/{digest}"
        for _ in range(_PAGES):
            reply = self.registry.send("GET", url, self.pull, {"Accept": INDEX_TYPE})
            if reply.status != 200:
                break
            found |= {str(item.get("digest")): item for item in _entries(reply.data)}
            link = _LINK.search(reply.headers.get("link", ""))
            if link is None:
                break
            try:
                url = self.registry.root.join(link[1])
            except ValueError:
                break
            if url.origin != self.registry.root.origin:
                break  # another host has no say in what refers to an image of this one
        found |= {str(item.get("digest")): item for item in self._tagged_referrers(digest)}
        return tuple(found[name] for name in sorted(found))

    def _put_manifest(self, data: bytes, reference: str, media_type: str) -> Reply:
        headers = {"Content-Type": media_type}
        url = f"{self.name}/manifests/{reference}"
        reply = self.registry.send("PUT", url, self.push, headers, Body.of(data))
        if reply.status not in (200, 201, 202):
            raise self.registry.refuse(reply, f"refuses the manifest {self.name}:{reference}")
        stored = reply.headers.get("docker-content-digest") or digest_of(self.get_manifest(reference)[0])
        if stored != digest_of(data):
            raise ImageError(
                f"stored another manifest: sent {digest_of(data)}, it has {stored}",
                place=f"{self.registry.host}/{self.name}",
            )
        return reply

    def _list_by_tag(self, data: bytes, media_type: str, subject: str) -> None:
        """Keep the list that the specification wants of clients where the registry keeps none."""
        manifest = _object(data)
        config = manifest.get("config")
        entry: dict[str, Any] = {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}
        kind = manifest.get("artifactType") or (config.get("mediaType") if isinstance(config, dict) else "")
        entry |= {"artifactType": kind} if kind else {}
        entry |= {"annotations": manifest["annotations"]} if manifest.get("annotations") else {}
        others = [item for item in self._tagged_referrers(subject) if item.get("digest") != entry["digest"]]
        entries = sorted([*others, entry], key=lambda item: str(item.get("digest")))
        index = canonical_json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": entries})
        self._put_manifest(index, _fallback_tag(subject), INDEX_TYPE)

    def _tagged_referrers(self, digest: str) -> list[dict[str, Any]]:
        headers = {"Accept": INDEX_TYPE}
        url = f"{self.name}/manifests/{_fallback_tag(digest)}"
        reply = self.registry.send("GET", url, self.pull, headers)
        return _entries(reply.data) if reply.status == 200 else []

    def _check(self, data: bytes, digest: str) -> None:
        if digest_of(data) != digest:
            raise ImageError(
                f"is damaged: needs {digest}, the registry sent {digest_of(data)}",
                place=f"{self.registry.host}/{self.name}",
            )


def _first_byte(answer: Answer, start: int) -> int:
    """Return where the body begins: a registry may ignore a range and send everything."""
    if answer.status == 200:
        return 0
    match = re.match(r"bytes (\d+)-", answer.headers.get("content-range", ""))
    if match is None or int(match[1]) > start:
        raise TransportError("sent another range than asked for")
    return int(match[1])


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = parse_json(data, "manifest")
    except FormatError:
        return {}
    return value if isinstance(value, dict) else {}


def _entries(data: bytes) -> list[dict[str, Any]]:
    entries = _object(data).get("manifests", [])
    return [item for item in entries if isinstance(item, dict)] if isinstance(entries, list) else []


def _fallback_tag(digest: str) -> str:
    return digest.replace(":", "-", 1)
