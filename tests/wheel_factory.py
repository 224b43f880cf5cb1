"""Wheels made by hand, correct unless a test asks otherwise."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path


def record_digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def make_wheel(
    folder: Path,
    name: str,
    files: Mapping[str, bytes],
    version: str = "1.0",
    *,
    record: Mapping[str, str | None] | None = None,
    executable: tuple[str, ...] = (),
    requires: tuple[str, ...] = (),
) -> Path:
    """Write a wheel; ``record`` overrides the digest of files (None leaves one out of RECORD).

    ``requires`` are the requirements that its metadata declares.
    """
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {text}\n" for text in requires)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}".encode()
    content = {
        **files,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = {path: record_digest(data) for path, data in content.items()} | dict(record or {})
    lines = [f"{path},{digest}," for path, digest in rows.items() if digest is not None] + [
        f"{info}/RECORD,,"
    ]
    content[f"{info}/RECORD"] = ("\n".join(lines) + "\n").encode()
    target = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path, data in content.items():
            entry = zipfile.ZipInfo(path, (2020, 1, 1, 0, 0, 0))
            entry.external_attr = (0o100755 if path in executable else 0o100644) << 16
            archive.writestr(entry, data)
    return target
