"""Tar header bytes: the whole of `packing: v1`, so that a layer's digest is a function of its content.

Written by hand and not with `tarfile`, whose headers differ between Python versions. A header is
ustar (POSIX.1-1988) with owner 0:0, empty names and device 0:0. What ustar cannot say goes into a PAX
record before it: a path or link target that is longer than 100 bytes or not ASCII, and a size of 8 GiB
or more. Such a size is also written in base 256 into the ustar field, because readers that ignore PAX
(busybox, Clair) would take the file for empty.

A weight file's header is padded with a PAX comment until the file's bytes start at a multiple of 4096,
where a file system can share them with the original instead of copying. docs/image-plan.md has the rules.
"""

from __future__ import annotations

from ralbuild.contract.places import MODEL_DIR

WEIGHTS_MTIME = 0
"""Seconds since 1970 of a weight layer's entries, whatever the image's date."""
PACKING = "v1"
"""Recorded in every image. Any change to the bytes that this module writes needs another value."""
BLOCK = 512
ALIGN = 4096
"""Weight bytes start at a multiple of this many bytes in their layer."""
END = bytes(2 * BLOCK)
"""Two zero blocks end an archive."""
FILE_MODE, EXECUTABLE_MODE, DIR_MODE, STICKY_DIR_MODE, LINK_MODE = 0o644, 0o755, 0o755, 0o1777, 0o777

_NAME_BYTES = 100
_OCTAL_SIZE_LIMIT = 8 << 30
_MTIME_LIMIT = 8 << 30
_FILE, _SYMLINK, _DIRECTORY, _PAX = b"0", b"2", b"5", b"x"


def padding(size: int) -> bytes:
    """Return the zeros that fill the last block of ``size`` bytes of content."""
    return bytes(-size % BLOCK)


def directory_header(path: str, mtime: int, mode: int = DIR_MODE) -> bytes:
    """Return the header of the directory ``path`` (no leading or trailing slash)."""
    return _entry(f"{path}/", _DIRECTORY, mode, 0, mtime)


def symlink_header(path: str, target: str, mtime: int) -> bytes:
    """Return the header of the symbolic link ``path`` that points to ``target``."""
    return _entry(path, _SYMLINK, LINK_MODE, 0, mtime, target)


def file_header(path: str, mode: int, size: int, mtime: int) -> bytes:
    """Return the header of a regular file; its bytes and `padding` follow."""
    return _entry(path, _FILE, mode, size, mtime)


def aligned_file_header(path: str, mode: int, size: int, mtime: int, offset: int) -> bytes:
    """Return a file header after which the file's bytes start at a multiple of `ALIGN`.

    ``offset`` is where in the archive the header itself starts, a multiple of `BLOCK`.
    """
    records = _pax_records(path, size, "")
    last = _ustar(path, _FILE, mode, size, mtime)
    room = -(offset + BLOCK + len(records) + len(last)) % ALIGN
    if room < len(_record("comment", "")):
        room += ALIGN
    return _pax_header(records + _filler(room), mtime) + last


MAX_WEIGHT_LAYERS = 100
"""Docker runs 125 layers; the base and the small layers need some."""


def bundles(count: int) -> list[range]:
    """Return which of ``count`` weight files, in order, share a layer: as few in one as the limit allows.

    Only the number decides, so a file of another size changes no layer but its own.
    """
    step = max(1, -(-count // MAX_WEIGHT_LAYERS))
    return [range(at, min(at + step, count)) for at in range(0, count, step)]


class WeightLayer:
    """What lies between the bytes of the weight files of one layer, file after file.

    Args:
        mtime: time of every entry, in seconds since 1970.
    """

    def __init__(self, mtime: int) -> None:
        self._mtime = mtime
        self.size = 0

    def start(self, name: str, size: int) -> bytes:
        """Return what precedes the bytes of the next file, ``models/<name>`` of ``size`` bytes."""
        if self.size == 0:
            before = weight_layer_header(name, size, self._mtime)
        else:
            before = padding(self.size)
            path = f"{MODEL_DIR.strip('/')}/{name}"
            before += aligned_file_header(path, FILE_MODE, size, self._mtime, self.size + len(before))
        self.size += len(before) + size
        return before

    def end(self) -> bytes:
        """Return what follows the last file; `size` is then that of the layer."""
        after = padding(self.size) + END
        self.size += len(after)
        return after


def weight_layer_header(name: str, size: int, mtime: int) -> bytes:
    """Return what precedes a weight file's bytes in its layer: a multiple of `ALIGN` bytes.

    Args:
        name: basename of the file; in the image it is ``models/<name>``.
        size: of the file, in bytes.
        mtime: time of both entries, in seconds since 1970.
    """
    folder = MODEL_DIR.strip("/")
    first = directory_header(folder, mtime)
    return first + aligned_file_header(f"{folder}/{name}", FILE_MODE, size, mtime, len(first))


def _entry(path: str, kind: bytes, mode: int, size: int, mtime: int, target: str = "") -> bytes:
    records = _pax_records(path, size, target)
    last = _ustar(path, kind, mode, size, mtime, target)
    return _pax_header(records, mtime) + last if records else last


def _pax_records(path: str, size: int, target: str) -> bytes:
    records = b""
    if _needs_pax(target):
        records += _record("linkpath", target)
    if _needs_pax(path):
        records += _record("path", path)
    if size >= _OCTAL_SIZE_LIMIT:
        records += _record("size", str(size))
    return records


def _needs_pax(text: str) -> bool:
    return not text.isascii() or len(text) > _NAME_BYTES


def _record(key: str, value: str) -> bytes:
    """Return ``<length> <key>=<value>\\n``, where the length counts its own digits."""
    body = f" {key}={value}\n".encode()
    length = len(body)
    while length != len(body) + len(str(length)):
        length = len(body) + len(str(length))
    return str(length).encode() + body


def _filler(size: int) -> bytes:
    """Return comment records of exactly ``size`` bytes (at least one empty comment)."""
    shortest = _record("comment", "")
    for spaces in range(max(size - len(shortest) - 3, 0), size - len(shortest) + 1):
        record = _record("comment", " " * spaces)
        if len(record) == size:
            return record
    # No record has 100 or 1000 bytes: one more digit in its length makes it one byte longer.
    return shortest + _filler(size - len(shortest))


def _pax_header(records: bytes, mtime: int) -> bytes:
    head = _ustar("././@PaxHeader", _PAX, FILE_MODE, len(records), mtime)
    return head + records + padding(len(records))


def _ustar(path: str, kind: bytes, mode: int, size: int, mtime: int, target: str = "") -> bytes:
    if not 0 <= mtime < _MTIME_LIMIT:
        raise ValueError(f"a tar header cannot hold the time {mtime}")
    fields = [
        _name(path),
        b"%07o\0" % mode,
        b"%07o\0" % 0,  # uid
        b"%07o\0" % 0,  # gid
        _number(size),
        _number(mtime),
        b" " * 8,  # the checksum is taken with spaces in its place
        kind,
        _name(target),
        b"ustar\x0000",
        bytes(32),  # user name
        bytes(32),  # group name
        b"%07o\0" % 0,  # device, major and minor
        b"%07o\0" % 0,
        bytes(167),  # prefix, not used
    ]
    header = b"".join(fields)
    return header[:148] + b"%06o\0 " % sum(header) + header[156:]


def _name(text: str) -> bytes:
    """Return the 100-byte field: the text, or what a reader without PAX support may show for it."""
    return text.encode("ascii", "replace")[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")


def _number(value: int) -> bytes:
    if value < _OCTAL_SIZE_LIMIT:
        return b"%011o\0" % value
    return b"\x80" + value.to_bytes(11, "big")
