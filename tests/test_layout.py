"""The layout sink: in place, all or nothing, reading no weight byte twice."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from image_cases import NOWHERE, make_image, make_plan, write_weights

from ralbuild.digests import DigestCache
from ralbuild.errors import HostError, ImageError
from ralbuild.image.assemble import Image, assemble_image
from ralbuild.image.outputs import LayoutOutput
from ralbuild.image.write import WrittenImage, write_image

SIGKILL = int(signal.SIGKILL)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    write_weights(folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> DigestCache:
    return DigestCache(tmp_path / "digests")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out" / "ral-image"


def build(
    target: Path, image: Image, cache: DigestCache = NOWHERE, tag: str = "", **more: Any
) -> WrittenImage:
    return write_image(image, [LayoutOutput(target)], tag=tag, cache=cache, **more)


def read_layout(target: Path) -> dict[str, str]:
    """Check a layout by the image-spec alone; return the manifest digest of each name."""
    assert json.loads((target / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads((target / "index.json").read_bytes())
    assert index["schemaVersion"] == 2
    images, named = {}, set()

    def blob(descriptor: dict[str, Any]) -> bytes:
        digest = descriptor["digest"].removeprefix("sha256:")
        named.add(digest)
        data: bytes = (target / "blobs/sha256" / digest).read_bytes()
        assert len(data) == descriptor["size"]
        assert hashlib.sha256(data).hexdigest() == digest
        return data

    for entry in index["manifests"]:
        manifest = json.loads(blob(entry))
        config = json.loads(blob(manifest["config"]))
        diff_ids = [f"sha256:{hashlib.sha256(blob(layer)).hexdigest()}" for layer in manifest["layers"]]
        assert config["rootfs"] == {"type": "layers", "diff_ids": diff_ids}
        images[entry.get("annotations", {}).get("org.opencontainers.image.ref.name", "")] = entry["digest"]
    assert {path.name for path in (target / "blobs/sha256").iterdir()} == named, "a blob that nothing names"
    assert sorted(path.name for path in target.iterdir()) == ["blobs", "index.json", "oci-layout"]
    return images


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and mtime of every file: what was not rewritten keeps both."""
    return {
        str(path.relative_to(folder)): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def bytes_read() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


# A new layout


def test_a_new_layout_is_whole_and_alone(target: Path, model: Path) -> None:
    image = make_image(model)
    written = build(target, image)
    assert read_layout(target) == {"": image.digest}
    assert written.manifest_digest == image.digest
    assert written.config_digest == image.config_digest
    assert [layer.reused for layer in written.layers] == [False] * 5
    assert [path.name for path in target.parent.iterdir()] == ["ral-image"]


def test_the_same_image_gives_the_same_files(tmp_path: Path, model: Path) -> None:
    for name in ("a", "b"):
        build(tmp_path / name, make_image(model), tag="demo:1")
    left, right = (
        {key: (tmp_path / side / key).read_bytes() for key in files(tmp_path / side)} for side in "ab"
    )
    assert left == right


def test_an_empty_folder_is_filled_in_place(target: Path, model: Path) -> None:
    """It may be a mount point, which cannot be renamed over."""
    target.mkdir(parents=True)
    inode = target.stat().st_ino
    image = make_image(model)
    build(target, image)
    assert read_layout(target) == {"": image.digest}
    assert target.stat().st_ino == inode


def test_a_link_to_a_folder_is_followed(target: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target.parent.mkdir()
    target.symlink_to(tmp_path / "real")
    image = make_image(model)
    build(target, image)
    assert read_layout(tmp_path / "real") == {"": image.digest}
    assert target.is_symlink()


def test_an_existing_folder_that_is_no_layout_is_refused_untouched(target: Path, model: Path) -> None:
    target.mkdir(parents=True)
    (target / "thesis.txt").write_text("years of work")
    with pytest.raises(ImageError, match="not an OCI image layout") as caught:
        build(target, make_image(model))
    assert caught.value.problems[0].place == str(target)
    assert [path.name for path in target.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("text", ["", "{}", '{"imageLayoutVersion":"9.0.0"}', "[]", "\xff"])
def test_another_version_of_the_layout_is_refused(target: Path, model: Path, text: str) -> None:
    target.mkdir(parents=True)
    (target / "oci-layout").write_text(text, encoding="latin-1")
    with pytest.raises(ImageError, match="not an OCI image layout"):
        build(target, make_image(model))


def test_a_file_in_the_way_is_refused_untouched(target: Path, model: Path) -> None:
    target.parent.mkdir()
    target.write_text("years of work")
    with pytest.raises(ImageError, match="is not a folder"):
        build(target, make_image(model))
    assert target.read_text() == "years of work"


@pytest.mark.parametrize("text", ["", "[]", "nonsense", '{"manifests":[1]}'])
def test_a_damaged_index_is_refused_and_nothing_is_removed(target: Path, model: Path, text: str) -> None:
    build(target, make_image(model))
    (target / "index.json").write_text(text)
    before = files(target)
    with pytest.raises(ImageError, match=r"index\.json"):
        build(target, make_image(model, "changed"))
    assert files(target) == before


def test_a_name_is_in_the_index_twice_for_containerd_and_the_specification(target: Path, model: Path) -> None:
    build(target, make_image(model), tag="team/demo:v1")
    (entry,) = json.loads((target / "index.json").read_bytes())["manifests"]
    assert entry["annotations"] == {
        "org.opencontainers.image.ref.name": "team/demo:v1",
        "io.containerd.image.name": "team/demo:v1",
    }
    assert entry["platform"] == {"os": "linux", "architecture": "amd64"}


# An update in place


def test_a_changed_rule_rewrites_only_small_files_and_reads_no_weights(
    target: Path, model: Path, cache: DigestCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 3600 * 10**9)  # the weights are not fresh
    build(target, make_image(model, cache=cache), cache)
    before, read = files(target), bytes_read()

    image = make_image(model, "bold: compliance", cache)
    written = build(target, image, cache)

    assert bytes_read() - read < 200_000
    assert written.bytes_written < 20_000
    assert {layer.name: layer.reused for layer in written.layers} == {
        "root": True,
        "weights model-00001-of-00002.safetensors": True,
        "weights model-00002-of-00002.safetensors": True,
        "tokenizer": True,
        "rules": False,
    }
    after = files(target)
    kept = {name for name in before if after.get(name) == before[name]}
    assert len(before) - len(kept) == 4  # index.json, config, manifest and the rules layer
    assert read_layout(target) == {"": image.digest}


def test_the_same_image_again_writes_no_blob(target: Path, model: Path, cache: DigestCache) -> None:
    build(target, make_image(model), cache)
    written = build(target, make_image(model), cache)
    assert written.bytes_written == 0
    assert all(layer.reused for layer in written.layers)


def test_without_a_memory_blobs_are_hashed_again_and_kept(target: Path, model: Path) -> None:
    build(target, make_image(model))
    before = files(target)
    assert build(target, make_image(model)).bytes_written == 0
    assert {name for name in before if files(target)[name] != before[name]} == {"index.json"}


def flip_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize(
    "damage",
    [flip_a_byte, lambda path: os.truncate(path, 100), Path.unlink, lambda path: os.truncate(path, 1 << 23)],
)
def test_a_damaged_blob_is_noticed_and_written_anew(
    target: Path, model: Path, cache: DigestCache, damage: Callable[[Path], None]
) -> None:
    image = make_image(model)
    build(target, image, cache)
    time.sleep(0.02)  # beyond the granularity of the file system's clock
    blob = target / "blobs/sha256" / image.layers[1].digest.sha256
    damage(blob)
    build(target, image, cache)
    assert read_layout(target) == {"": image.digest}


def test_images_of_other_names_stay(target: Path, model: Path, cache: DigestCache) -> None:
    first, second, third = (make_image(model, rules) for rules in ("1", "2", "3"))
    build(target, first, cache, "demo:1")
    build(target, second, cache, "demo:2")
    build(target, third, cache, "demo:2")
    assert read_layout(target) == {"demo:1": first.digest, "demo:2": third.digest}


def test_naming_an_image_that_had_no_name_does_not_list_it_twice(target: Path, model: Path) -> None:
    image = make_image(model)
    build(target, image)
    build(target, image, tag="demo:1")
    assert read_layout(target) == {"demo:1": image.digest}


def test_what_another_tool_put_into_the_layout_stays(target: Path, model: Path) -> None:
    """An artifact of a type that we do not know may have parts that we cannot tell: nothing is removed."""
    build(target, make_image(model, "old"))
    index = json.loads((target / "index.json").read_bytes())
    part = b"a part of it"
    part_path = target / "blobs/sha256" / hashlib.sha256(part).hexdigest()
    part_path.write_bytes(part)
    artifact = b'{"parts":["..."]}'
    digest = hashlib.sha256(artifact).hexdigest()
    (target / "blobs/sha256" / digest).write_bytes(artifact)
    entry = {"mediaType": "application/x-other", "digest": f"sha256:{digest}", "size": len(artifact)}
    entry["annotations"] = {"org.opencontainers.image.ref.name": "other"}
    index["manifests"].append(entry)
    index["annotations"] = {"by": "another tool"}
    (target / "index.json").write_text(json.dumps(index))

    build(target, make_image(model, "new"))
    after = json.loads((target / "index.json").read_bytes())
    assert entry in after["manifests"]
    assert after["annotations"] == {"by": "another tool"}
    assert part_path.read_bytes() == part


# Failure


def test_a_failed_first_build_leaves_nothing(target: Path, model: Path) -> None:
    image = make_image(model)
    write_weights(model, (5 << 20, 999))
    with pytest.raises(ImageError, match="changed while"):
        build(target, image)
    assert list(target.parent.iterdir()) == []


def test_a_failed_build_into_an_empty_folder_leaves_it_empty(target: Path, model: Path) -> None:
    target.mkdir(parents=True)
    image = make_image(model)
    write_weights(model, (5 << 20, 999))
    with pytest.raises(ImageError, match="changed while"):
        build(target, image)
    assert list(target.iterdir()) == []


def test_a_failed_update_leaves_the_old_image_as_it_was(target: Path, model: Path) -> None:
    old = make_image(model)
    build(target, old, tag="demo:1")
    write_weights(model, (6 << 20, 7777))
    image = make_image(model, "new")
    write_weights(model, (6 << 20, 999))  # the first shard fits, the second does not
    with pytest.raises(ImageError, match="changed while"):
        build(target, image, tag="demo:1")
    assert read_layout(target) == {"demo:1": old.digest}


def test_an_interrupt_leaves_the_old_image_as_it_was(target: Path, model: Path) -> None:
    old = make_image(model)
    build(target, old)
    write_weights(model, (6 << 20, 7777))

    def interrupt(_: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    image = make_image(model)
    with pytest.raises(KeyboardInterrupt):
        build(target, image, progress=interrupt)
    assert read_layout(target) == {"": old.digest}


def test_too_small_a_disk_is_told_with_the_bytes_that_are_missing(
    target: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(model)._replace(free=3 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    image = make_image(model)
    needed = sum(layer.digest.size for layer in image.layers)
    with pytest.raises(HostError, match=r"bytes are needed, 3145728 are free") as caught:
        build(target, image)
    assert needed <= int(str(caught.value).split(" bytes")[0].split()[-1]) <= needed + (2 << 20)
    assert list(target.parent.iterdir()) == []


def in_child(action: Callable[[], object]) -> int:
    """Run ``action`` in a forked process; return 0, 1 for an exception, or minus the signal."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


CHANGING = {
    "open",
    "write",
    "close",
    "copy_file_range",
    "replace",
    "rename",
    "unlink",
    "mkdir",
    "rmdir",
    "flock",
}


def kill_after(number: int) -> None:
    """Kill this process right after the n-th call that may change a file."""
    count = 0

    def watch(_frame: FrameType, event: str, function: Any) -> None:
        nonlocal count
        if event == "c_return" and getattr(function, "__name__", "") in CHANGING:
            count += 1
            if count == number:
                os.kill(os.getpid(), SIGKILL)

    sys.setprofile(watch)


@pytest.mark.parametrize(
    "before",
    ["an image", *(pytest.param(name, marks=pytest.mark.long) for name in ("nothing", "an empty folder"))],
)
def test_a_build_killed_at_any_moment_leaves_the_old_image_and_the_next_one_succeeds(
    target: Path, model: Path, cache: DigestCache, before: str
) -> None:
    write_weights(model, ((1 << 20) + 1, 5000))
    old, new = make_image(model, "old"), make_image(model, "new")
    moment, outcomes = 0, set()
    while True:
        moment += 1
        shutil.rmtree(target.parent, ignore_errors=True)
        if before == "an empty folder":
            target.mkdir(parents=True)
        elif before == "an image":
            build(target, old, cache)

        def run(moment: int = moment) -> None:
            kill_after(moment)
            build(target, new, cache)

        status = in_child(run)
        assert status in (0, -SIGKILL)
        if before != "an image" and not (target / "index.json").exists():
            outcomes.add("none")
        else:
            index = json.loads((target / "index.json").read_bytes())
            (entry,) = index["manifests"]
            outcomes.add({old.digest: "old", new.digest: "new"}[entry["digest"]])
        build(target, new, cache)
        assert read_layout(target) == {"": new.digest}
        assert [path.name for path in target.parent.iterdir()] == [target.name]
        if status == 0:
            break
    assert moment > 30
    assert outcomes == ({"old", "new"} if before == "an image" else {"none", "new"})


@pytest.mark.parametrize("before", ["nothing", "an empty folder", "an image"])
def test_builds_at_once_on_one_output_take_turns(
    target: Path, model: Path, cache: DigestCache, before: str
) -> None:
    images = [make_image(model, f"rules {number}") for number in range(6)]
    if before == "an empty folder":
        target.mkdir(parents=True)
    elif before == "an image":
        build(target, images[0], cache)
    pids = []
    for image in images:
        pid = os.fork()
        if pid == 0:
            try:
                build(target, image, cache)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * len(images)
    (digest,) = read_layout(target).values()
    assert digest in {image.digest for image in images}
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_a_build_that_waits_for_another_says_so(target: Path, model: Path) -> None:
    build(target, make_image(model, "old"))
    holder = os.open(target, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    notes: list[str] = []

    def release(text: str) -> None:
        notes.append(text)
        os.close(holder)

    image = make_image(model, "new")
    build(target, image, note=release)
    assert notes == [f"waiting for another build that writes {target}"]
    assert read_layout(target) == {"": image.digest}


def test_a_folder_that_cannot_be_written_is_this_machines_error(model: Path) -> None:
    with pytest.raises(HostError, match="cannot write") as caught:
        build(Path("/proc/ral-image"), make_image(model))
    assert caught.value.exit_code == 7


def test_the_digest_does_not_depend_on_where_when_or_as_whom(tmp_path: Path) -> None:
    digests: set[str] = set()
    for number, umask in enumerate((0o022, 0o077, 0o000)):
        folder = tmp_path / f"place {number}"
        old = os.umask(umask)
        try:
            for path in write_weights(folder / "model"):
                os.utime(path, (number * 1000, number * 1000))
                path.chmod(0o600 + number * 0o22)
            build(folder / "out", assemble_image(make_plan(folder / "model")))
        finally:
            os.umask(old)
        digests.update(read_layout(folder / "out").values())
    assert len(digests) == 1


@pytest.mark.parametrize("name", ["oci-layout", "index.json"])
def test_a_pipe_in_a_layout_does_not_block_a_build(name: str, target: Path, model: Path) -> None:
    image = make_image(model)
    build(target, image)
    (target / name).unlink()
    os.mkfifo(target / name)
    with pytest.raises(ImageError):
        build(target, image)


@pytest.mark.parametrize("plant", ["file", "link"])
def test_a_leaving_of_another_kind_does_not_block_a_new_layout(plant: str, target: Path, model: Path) -> None:
    target.parent.mkdir()
    partial = target.with_name(f".{target.name}.partial-build")
    elsewhere = target.with_name("elsewhere")
    elsewhere.mkdir()
    if plant == "file":
        partial.write_bytes(b"half an archive")
    else:
        partial.symlink_to(elsewhere)
    build(target, make_image(model))
    read_layout(target)
    assert sorted(target.parent.iterdir()) == [elsewhere, target]
    assert not list(elsewhere.iterdir())
