"""`ralbuild run`: an image of a layout folder, started on this machine without a container engine.

    prepare_tree   layers -> a folder that holds the image's whole file system, kept in the user's cache
    run_tree       starts the image's entrypoint in it, with few rights
    run_image      both, and waits

Two ways to start it. ``namespace``: the tree is the program's read-only root, as in a container. Where the
machine forbids that to ordinary users, ``direct``: the tree's own loader starts the tree's own Python from
where it lies, and RAL_ROOT tells the runtime what to put in front of its paths.
"""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import IO, Any, Literal

from ralbuild.contract.codec import canonical_json, to_plain
from ralbuild.contract.places import ENTRYPOINT, PYTHON, USER_ID
from ralbuild.errors import HostError, ImageError
from ralbuild.image import namespace
from ralbuild.image.base.files import cache_dir, exclusive
from ralbuild.image.base.report import Report
from ralbuild.image.disk import check_room, host_errors, remove_tree
from ralbuild.image.namespace import Job
from ralbuild.image.oci import Descriptor
from ralbuild.image.reader import open_image
from ralbuild.image.treecheck import changed_layers, is_tree_intact
from ralbuild.image.treepython import inside, python_command, python_home
from ralbuild.image.unpack import LayerStore, make_folder, make_tree

Mode = Literal["auto", "namespace", "direct"]

_RUNTIME = (PYTHON, "-m", "ralbuild.runtime")
"""What the static entrypoint script runs; its shell and absolute paths only work with the tree as root."""
_PATH_VARIABLES = ("LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "SSL_CERT_DIR", "SSL_CERT_FILE")
_MOUNT_POINTS = ("dev", "proc", "sys", "tmp")
_PROBE_SECONDS = 30
_FORMAT = "v2"
"""Of what is kept in the cache: the list of a layer's entries, where trees lie. Change it with them."""


def prepare_tree(layout: Path, report: Report, name: str = "") -> Path:
    """Return a folder with the image's file system, made from the layers when it is not in the cache yet.

    Args:
        layout: an OCI layout folder.
        report: told what is unpacked.
        name: which image, as the layout's index calls it; needed only where it has several.

    Raises:
        ImageError: when the layout holds no such image, or a layer is damaged or cannot be unpacked.
        HostError: when the cache cannot be written.
    """
    folder = cache_dir() / "run" / _FORMAT
    with open_image(layout, name) as stored, host_errors(folder, 0), exclusive(folder / ".lock"):
        image = stored.mounted()
        store = LayerStore(folder / "layers")
        tree = folder / image.digest.removeprefix("sha256:")
        complete = tree.with_name(f"{tree.name}.complete")
        changed = changed_layers(store, image)
        for layer in changed:
            store.remove(layer)
        missing = [layer for layer in image.layers if not store.has(layer)]
        if not missing and complete.is_file() and is_tree_intact(store, image, tree):
            return tree
        if complete.is_file():
            report.note("the unpacked image is not as its layers say, it is made again")
        total = sum(layer.size for layer in missing)
        check_room(folder, total)
        done = 0
        for layer in missing:
            report.progress(done, total, "B")
            store.add(image, layer)
            done += layer.size
        complete.unlink(missing_ok=True)
        _build_tree(store, image.layers, tree)
        complete.write_bytes(b"")
        return tree


def read_run_config(layout: Path, name: str = "") -> dict[str, Any]:
    """Return the ``config`` object of the image's configuration: Env, Entrypoint, Cmd, WorkingDir.

    Raises:
        ImageError: when the layout holds no such image.
    """
    with open_image(layout, name) as image:
        return dict(image.config.get("config") or {})


def run_tree(
    tree: Path,
    image_config: Mapping[str, Any],
    port: int,
    report: Report,
    *,
    host: str = "127.0.0.1",
    mode: Mode = "auto",
    folders: Mapping[str, Path] | None = None,
    env: Mapping[str, str] | None = None,
    output: int | IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start the image's entrypoint in ``tree`` and return the process to wait for and to signal.

    It takes SIGTERM, SIGINT and SIGHUP on the program's behalf and ends with the program's status. It
    ends, and the program with it, when the calling thread does.

    Args:
        tree: from `prepare_tree`.
        image_config: from `read_run_config`.
        port, host: where to listen; the program gets them as RAL_PORT and RAL_HOST.
        report: told which mode is used, and why.
        mode: ``auto`` takes ``namespace`` where this machine allows it, else ``direct``.
        folders: folders of this machine that the program may read, by their place under /run.
        env: more variables for the program; what lies in ``folders`` is named by its place.
        output: for the program's standard output and error; None inherits ours.

    Raises:
        HostError: when ``mode`` is ``namespace`` and this machine forbids it.
        ImageError: when the image names no program, or one that cannot be started in that mode.
    """
    jobs = {"namespace": _inside_job, "direct": _direct_job}
    reason = "" if mode == "direct" else _why_no_namespace(tree)
    if mode == "namespace" and reason:
        raise HostError(
            f"this machine does not allow it: {reason}", place="namespace", hint="use --mode direct"
        )
    chosen = "direct" if mode == "direct" or reason else "namespace"
    extra = {**(env or {}), "RAL_PORT": str(port), "RAL_HOST": host}
    shown = {place: str(folder.resolve()) for place, folder in (folders or {}).items()}
    job = jobs[chosen](tree, image_config, extra, shown)
    report.note(_describe(chosen, reason))
    return _start(job, output)


def run_image(
    layout: Path,
    port: int,
    report: Report,
    *,
    host: str = "127.0.0.1",
    mode: Mode = "auto",
    name: str = "",
    folders: Mapping[str, Path] | None = None,
    env: Mapping[str, str] | None = None,
) -> int:
    """Run an image until it ends; signals go to it. Return its exit status (128 and the signal's number).

    Raises:
        ImageError, HostError: as `prepare_tree` and `run_tree`, and for an image that is for GPUs.
    """
    config = read_run_config(layout, name)
    if (config.get("Labels") or {}).get("io.ralbuild.target") == "cuda":
        raise HostError(
            "an image for GPUs needs the driver's library, which only a container engine mounts",
            place=str(layout),
            hint="docker run --gpus all",
        )
    report.step("unpacking the image")
    tree = prepare_tree(layout, report, name)
    process = run_tree(tree, config, port, report, host=host, mode=mode, folders=folders, env=env)

    def forward(number: int, _frame: FrameType | None) -> None:
        process.send_signal(number)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, forward) for number in signals]
    try:
        status = process.wait()
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def _build_tree(store: LayerStore, layers: tuple[Descriptor, ...], tree: Path) -> None:
    temporary = tree.with_name(f".{tree.name}")
    remove_tree(temporary)
    make_folder(temporary)
    try:
        make_tree(store, layers, temporary)
        for place in (inside(temporary, name) for name in _MOUNT_POINTS):
            if not place.is_dir():
                make_folder(place)
        remove_tree(tree)
        temporary.rename(tree)
    finally:
        remove_tree(temporary)


def _program(image_config: Mapping[str, Any]) -> list[str]:
    argv = [*(image_config.get("Entrypoint") or []), *(image_config.get("Cmd") or [])]
    if not argv:
        raise ImageError("the image names no program to run")
    return [str(item) for item in argv]


def _environment(image_config: Mapping[str, Any], extra: Mapping[str, str]) -> dict[str, str]:
    """Return the image's variables and ours; nothing of this machine's environment gets in."""
    pairs = (str(item).partition("=") for item in image_config.get("Env") or [])
    return {**{name: value for name, _, value in pairs}, **extra}


def _inside_job(
    tree: Path, image_config: Mapping[str, Any], extra: Mapping[str, str], folders: dict[str, str]
) -> Job:
    argv, env = _program(image_config), _environment(image_config, extra)
    path = [""] if "/" in argv[0] else env.get("PATH", "/usr/bin").split(":")
    candidates = [f"{folder}/{argv[0]}" if folder else argv[0] for folder in path]
    found = next((name for name in candidates if inside(tree, name).is_file()), None)
    if found is None:
        raise ImageError(f"the image has no program {argv[0]}", place=str(tree))
    cwd = str(image_config.get("WorkingDir") or "/")
    return Job("namespace", str(tree), [found, *argv[1:]], env, cwd, USER_ID, probe=False, folders=folders)


def _direct_job(
    tree: Path, image_config: Mapping[str, Any], extra: Mapping[str, str], folders: dict[str, str]
) -> Job:
    argv = _program(image_config)
    if argv[0] == ENTRYPOINT:
        argv = [*_RUNTIME, *argv[1:]]
    if inside(tree, argv[0]) != inside(tree, PYTHON):
        raise ImageError(f"only Python can be started without a namespace, the image starts {argv[0]}")
    seen = {name: _where_it_is(value, folders) for name, value in extra.items()}
    env = _environment(image_config, {**seen, "RAL_ROOT": str(tree), "PYTHONHOME": python_home(tree)})
    for name in _PATH_VARIABLES:
        if name in env:
            env[name] = ":".join(_outside(tree, item) for item in env[name].split(":"))
    arguments = [_outside(tree, item) if inside(tree, item).exists() else item for item in argv[1:]]
    argv = [*python_command(tree), *arguments]
    return Job("direct", str(tree), argv, env, "/tmp", USER_ID, probe=False, folders={})  # noqa: S108


def _where_it_is(text: str, folders: dict[str, str]) -> str:
    """Return ``text`` with the place of a folder replaced by the folder."""
    for place, folder in folders.items():
        if text.startswith(f"{place}/"):
            return folder + text.removeprefix(place)
    return text


def _outside(tree: Path, text: str) -> str:
    """Return where this machine sees the absolute path ``text`` of the image; other text stays as it is."""
    return str(inside(tree, text)) if text.startswith("/") else text


def _why_no_namespace(tree: Path) -> str:
    """Return why a namespace cannot be used here, or the empty string."""
    process = _start(
        Job("namespace", str(tree), [], {}, "/", USER_ID, probe=True, folders={}), subprocess.PIPE
    )
    try:
        text, _ = process.communicate(timeout=_PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return "setting one up takes too long"
    return "" if process.returncode == 0 else text.decode(errors="replace").strip() or "no reason was given"


def _describe(mode: str, reason: str) -> str:
    if mode == "namespace":
        return "running in a namespace: read-only root, no capabilities, this machine's network"
    why = f" ({reason})" if reason else ""
    return f"running with the image's own loader, not in a namespace{why}: this machine's files are in reach"


def _start(job: Job, output: int | IO[bytes] | None) -> subprocess.Popen[bytes]:
    # -I and an empty environment: nothing of this machine's Python settings reaches the starter.
    command = [sys.executable, "-I", "-S", namespace.__file__, canonical_json(to_plain(job)).decode()]
    try:
        return _popen(command, output)
    except OSError as error:
        if error.errno != errno.E2BIG:
            raise HostError(f"the program cannot be started: {error.strerror}") from None
        raise ImageError("the image's settings are too long to start a program with") from None


def _popen(command: list[str], output: int | IO[bytes] | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env={},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output is not None else None,
        start_new_session=True,  # Ctrl-C reaches the program once, through us
    )
