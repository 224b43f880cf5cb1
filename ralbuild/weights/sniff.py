"""What a file is by its first bytes, whatever its name says."""

from __future__ import annotations

from ralbuild.weights.findings import Findings

SNIFFED = 512
"""Bytes that are enough to tell."""

_MAGIC: tuple[tuple[bytes, str, str], ...] = (
    (b"version https://git-lfs", "W101", "a git-lfs pointer, not the file itself"),
    (b"<!doctype", "W102", "an HTML page"),
    (b"<html", "W102", "an HTML page"),
    (b"<?xml", "W102", "an XML page"),
    (b"PK\x03\x04", "W103", "a zip archive (a PyTorch pickle?)"),
    (b"PK\x05\x06", "W103", "an empty zip archive"),
    (b"GGUF", "W105", "a GGUF file"),
    (b"ggml", "W107", "a GGML file"),
    (b"tjgg", "W107", "a GGML file"),
    (b"\x89HDF", "W107", "an HDF5 file"),
    (b"\x93NUMPY", "W107", "a NumPy array"),
    (b"\x1f\x8b", "W107", "a gzip archive"),
    (b"\x28\xb5\x2f\xfd", "W107", "a zstd archive"),
    (b"\x7fELF", "W107", "a program"),
    (b'{"error"', "W107", "a server's error message"),
)


def sniff(start: bytes) -> tuple[str, str] | None:
    """Return the rule that a file beginning with ``start`` breaks and what it is, or None."""
    if not start:
        return "W106", "an empty file"
    if start[4:8] == bytes(4) and start[8:9] in (b"{", b" "):
        return None  # a header's length, whatever else those four bytes spell
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    for magic, rule, what in _MAGIC:
        if text[: len(magic)].lower() == magic.lower():
            return rule, what
    if start[0] == 0x80 and len(start) > 2 and 2 <= start[1] <= 5:
        return "W104", "a Python pickle"
    return None


def report_other_format(start: bytes, name: str, findings: Findings) -> bool:
    """Record what ``name`` is when its first bytes tell; return whether they did."""
    known = sniff(start)
    if known is None:
        return False
    rule, what = known
    findings.add(rule, f"this is {what}", file=name, found=what)
    return True
