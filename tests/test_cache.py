"""Whatever happens to the folder, the cache returns what the miss would make, and never fails a build."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ralbuild.cache import Cache
from ralbuild.contract.bundle import ObjectRef
from ralbuild.contract.codec import canonical_json, sha256_hex
from ralbuild.errors import CacheError

KEY, OTHER = sha256_hex(b"key"), sha256_hex(b"other")
MADE = {"a": b"first output", "b": b"second output", "empty": b""}


class Notes:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


class Counted:
    """A miss that counts how often it is asked."""

    def __init__(self, made: dict[str, bytes] | None = None) -> None:
        self.calls = 0
        self.made = made or MADE

    def __call__(self) -> dict[str, bytes]:
        self.calls += 1
        return self.made


def open_(root: Path) -> tuple[Cache, Notes]:
    notes = Notes()
    return Cache(root, notes), notes


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache that holds KEY and OTHER."""
    root = tmp_path / ".ral_cache"
    cache, _ = open_(root)
    cache.fetch(KEY, Counted(), "one")
    cache.fetch(OTHER, Counted({"a": b"other output"}), "two")
    return root


def refetch(root: Path, key: str = KEY) -> tuple[dict[str, bytes], int, list[str]]:
    cache, notes = open_(root)
    miss = Counted()
    return dict(cache.fetch(key, miss, "one")), miss.calls, notes.lines


def test_what_was_stored_is_returned_without_a_miss(root: Path) -> None:
    assert refetch(root) == (MADE, 0, [])


def test_objects_are_named_by_their_sha256(root: Path) -> None:
    found = {path.name: path.read_bytes() for path in (root / "objects").iterdir()}
    assert {sha256_hex(data): data for data in found.values()} == found
    listed = subprocess.run(
        ["sha256sum", *sorted(found)], cwd=root / "objects", capture_output=True, text=True, check=True
    )
    assert all(line.split()[0] == line.split()[1] for line in listed.stdout.splitlines())


def test_the_folder_and_its_files_are_for_the_owner_alone(root: Path) -> None:
    assert {path.stat().st_mode & 0o777 for path in root.rglob("*") if path.is_file()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (root, *root.iterdir())} == {0o700}


def index(root: Path, key: str = KEY) -> Path:
    return root / "index" / f"{key}.json"


def object_(root: Path, data: bytes) -> Path:
    return root / "objects" / sha256_hex(data)


def swap(first: Path, second: Path) -> None:
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def link_away(path: Path) -> None:
    """The same bytes, but under a name that others may change."""
    aside = path.with_name("aside")
    path.rename(aside)
    path.symlink_to(aside)


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def to_folder(path: Path) -> None:
    path.unlink()
    (path / "x").mkdir(parents=True, mode=0o700)


def name_size(path: Path, size: object) -> None:
    """An index whose checksum is right."""
    entry = json.loads(path.read_bytes())["entry"]
    entry["files"]["a"]["size"] = size
    path.write_bytes(canonical_json({"entry": entry, "sha256": sha256_hex(canonical_json(entry))}))


DAMAGE = {
    "an object that is a folder": lambda root: to_folder(object_(root, MADE["a"])),
    "an index file that is a folder": lambda root: to_folder(index(root)),
    "a size beyond all": lambda root: name_size(index(root), 10**30),
    "a large size": lambda root: name_size(index(root), 1 << 62),
    "a size below zero": lambda root: name_size(index(root), -1),
    "a size that is true": lambda root: name_size(index(root), True),
    "a flipped byte": lambda root: flip(object_(root, MADE["a"])),
    "a truncated object": lambda root: object_(root, MADE["a"]).write_bytes(b"first"),
    "a longer object": lambda root: object_(root, MADE["a"]).write_bytes(MADE["a"] + b"more"),
    "a missing object": lambda root: object_(root, MADE["b"]).unlink(),
    "swapped objects": lambda root: swap(object_(root, MADE["a"]), object_(root, MADE["b"])),
    "swapped index files": lambda root: swap(index(root), index(root, OTHER)),
    "a linked object": lambda root: link_away(object_(root, MADE["a"])),
    "a linked index file": lambda root: link_away(index(root)),
    "an object that is a pipe": lambda root: to_pipe(object_(root, MADE["a"])),
    "an object that others can write": lambda root: object_(root, MADE["a"]).chmod(0o666),
    "an index file that the group can write": lambda root: index(root).chmod(0o620),
    "an empty index file": lambda root: index(root).write_bytes(b""),
    "an index file of other JSON": lambda root: index(root).write_bytes(b'{"files": 1}'),
    "an index file that names a path": lambda root: index(root).write_bytes(
        index(root).read_bytes().replace(sha256_hex(MADE["a"]).encode(), b"../" * 20 + b"etc/")
    ),
    "an index file of an older format": lambda root: index(root).write_bytes(
        index(root).read_bytes().replace(b"ralbuild.cache/1", b"ralbuild.cache/0")
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_made_again_with_a_note_and_is_whole_afterwards(damage: str, root: Path) -> None:
    DAMAGE[damage](root)
    outputs, calls, lines = refetch(root)
    assert (outputs, calls) == (MADE, 1)
    assert len(lines) == 1
    assert lines[0].startswith("cache entry of one is not used, and made again: ")
    assert refetch(root) == (MADE, 0, [])


def test_a_folder_called_like_a_partial_file_is_no_error(root: Path) -> None:
    (root / "objects" / ".partial-99999999-x" / "y").mkdir(parents=True)
    assert refetch(root) == (MADE, 0, [])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_index_file_never_crashes_or_gives_other_outputs(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("cache") / "c"
    open_(root)[0].fetch(KEY, Counted(), "one")
    text = bytearray(index(root).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    index(root).write_bytes(text)
    outputs, _, _ = refetch(root)
    assert outputs == MADE


@pytest.mark.parametrize("folder", [".", "objects", "index"])
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_is_not_used(folder: str, mode: int, root: Path) -> None:
    (root / folder).chmod(mode)
    outputs, calls, lines = refetch(root)
    assert (outputs, calls) == (MADE, 1)
    assert lines == [
        f"the cache is not used in this run: {root / folder} can be written by others (mode {mode:04o})"
    ]


def test_a_folder_of_someone_else_is_not_used(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.geteuid()
    monkeypatch.setattr("ralbuild.cache.os.geteuid", lambda: me + 1)
    outputs, calls, lines = refetch(root)
    assert (outputs, calls) == (MADE, 1)
    assert f"belongs to user {me}, not to user {me + 1}" in lines[0]


def test_a_linked_folder_is_not_used(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    _, calls, lines = refetch(tmp_path / "link")
    assert calls == 1
    assert "is a symbolic link" in lines[0]


def test_without_a_usable_folder_objects_of_this_run_can_still_be_read(root: Path) -> None:
    root.chmod(0o777)
    cache, _ = open_(root)
    miss = Counted()
    assert cache.fetch(KEY, miss, "one") == cache.fetch(KEY, miss, "one") == MADE
    assert miss.calls == 1
    assert cache.read(cache.add(b"table")) == b"table"


def test_an_entry_that_the_caller_does_not_accept_is_made_again(root: Path) -> None:
    cache, notes = open_(root)
    miss = Counted({"a": b"better"})
    assert cache.fetch(KEY, miss, "one", lambda outputs: outputs["a"] == b"better") == {"a": b"better"}
    assert "does not pass the check" in notes.lines[0]


def test_when_the_miss_fails_nothing_is_stored(root: Path) -> None:
    before = sorted(root.rglob("*"))

    def miss() -> dict[str, bytes]:
        raise RuntimeError("words")

    with pytest.raises(RuntimeError, match="words"):
        open_(root)[0].fetch(sha256_hex(b"new"), miss, "new")
    assert sorted(root.rglob("*")) == before


def test_an_object_that_is_gone_is_an_error_of_its_own(root: Path) -> None:
    cache, _ = open_(root)
    with pytest.raises(CacheError, match="the object is not there") as caught:
        cache.read(ObjectRef("0" * 64, 1))
    assert caught.value.exit_code == 5


def test_a_name_that_is_taken_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(CacheError, match=r"cannot be created: (File exists|Not a directory)"):
        open_(tmp_path / "taken")
    with pytest.raises(CacheError, match="cannot be created"):
        open_(tmp_path / "taken" / "below")


def test_a_full_disk_is_a_note_and_not_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`/dev/full` refuses every write with ENOSPC, as a full disk does."""
    real = os.open

    def full(path: object, flags: int, mode: int = 0o777) -> int:
        return real("/dev/full", os.O_WRONLY) if flags & os.O_CREAT else real(path, flags, mode)

    monkeypatch.setattr("ralbuild.cache.os.open", full)
    cache, notes = open_(root)
    outputs = cache.fetch(sha256_hex(b"new"), Counted({"x": b"y" * 100_000}), "new")
    assert outputs == {"x": b"y" * 100_000}
    assert cache.read(ObjectRef(sha256_hex(outputs["x"]), 100_000)) == outputs["x"]
    assert notes.lines == ["the cache cannot be written: No space left on device"]


WRITER = """
import sys
from pathlib import Path
from ralbuild.cache import Cache
from ralbuild.contract.codec import canonical_json, sha256_hex
class Notes:
    def note(self, text): print(text)
cache = Cache(Path(sys.argv[1]), Notes())
print("ready", flush=True)
for turn in range(int(sys.argv[2])):
    key = sha256_hex(b"%d" % (turn % 20))
    outputs = cache.fetch(key, lambda: {"x": key.encode() * 20_000}, "x")
    assert outputs["x"] == key.encode() * 20_000
    if turn % 7 == 0:
        (cache.root / "index" / (key + ".json")).unlink(missing_ok=True)
"""


def writer(root: Path, turns: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), str(turns)], stdout=subprocess.PIPE, text=True
    )


def test_two_processes_at_once_share_a_cache(tmp_path: Path) -> None:
    processes = [writer(tmp_path / "c", 300) for _ in range(2)]
    assert [process.communicate()[0] for process in processes] == ["ready\n", "ready\n"]
    assert [process.returncode for process in processes] == [0, 0]
    assert not list((tmp_path / "c").glob("*/.partial-*"))


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03, 0.1])
def test_a_build_killed_at_any_time_leaves_no_half_entry(delay: float, tmp_path: Path) -> None:
    process = writer(tmp_path / "c", 1_000_000)
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(delay or 0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, notes = open_(tmp_path / "c")
    assert notes.lines == []
    for path in (tmp_path / "c" / "objects").iterdir():
        assert sha256_hex(path.read_bytes()) == path.name
    assert not list((tmp_path / "c").glob("*/.partial-*"))
    check = writer(tmp_path / "c", 40)
    assert check.communicate()[0] == "ready\n"
    assert check.returncode == 0
