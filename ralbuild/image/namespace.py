"""Starts one program inside a file tree with few rights. Run as a script; standard library only.

The one argument is JSON, the fields of `Job`. In mode ``namespace`` the tree becomes the read-only root of
new mount, process, IPC and host name namespaces (as root also without a user namespace of its own, else in
one), with an empty /tmp, a small /dev and the machine's network. In mode ``direct`` the program is started
where it is. Either way it has no capabilities, cannot gain any (no_new_privs), and dies with this process.

Exit status: the program's own, 128 and the signal's number when a signal ended it, 125 when it could not
be started (the reason is on standard error). With ``probe`` nothing is started: 0 says that it could be.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from dataclasses import dataclass
from types import FrameType

CANNOT_START = 125

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
_CLONE_NEWUSER, _CLONE_NEWPID = 0x10000000, 0x20000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_NOATIME, _MS_NODIRATIME, _MS_BIND, _MS_REC, _MS_PRIVATE, _MS_RELATIME = (
    *(1 << 10, 1 << 11, 1 << 12),
    *(1 << 14, 1 << 18, 1 << 21),
)
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
_SYS_PIVOT_ROOT = 155  # x86-64
_DEVICES = ("null", "zero", "full", "random", "urandom")
# Flags of the file system below that a user namespace may not clear: statvfs flag to mount flag.
_LOCKED = {
    os.ST_NOSUID: _MS_NOSUID,
    os.ST_NODEV: _MS_NODEV,
    os.ST_NOEXEC: _MS_NOEXEC,
    os.ST_NOATIME: _MS_NOATIME,
    os.ST_NODIRATIME: _MS_NODIRATIME,
    os.ST_RELATIME: _MS_RELATIME,
}
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Job:
    """What to start.

    Attributes:
        mode: ``namespace`` or ``direct``.
        root: the tree, an absolute path.
        argv, env, cwd: of the program, as it sees paths.
        user: user and group id inside the namespace.
        probe: set up, then leave with 0.
        folders: folders of this machine that it may read, by their place under /run; in mode ``direct`` the
            program sees them where they are.
    """

    mode: str
    root: str
    argv: list[str]
    env: dict[str, str]
    cwd: str
    user: int
    probe: bool
    folders: dict[str, str]


def main() -> int:
    """Run the job of the first argument."""
    job = Job(**json.loads(sys.argv[1]))
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    try:
        return _run_inside(job) if job.mode == "namespace" else _run_directly(job)
    except OSError as error:
        sys.stderr.write(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}\n")
        return CANNOT_START


def _run_directly(job: Job) -> int:
    os.chdir(job.cwd)
    _drop_rights()
    if not job.probe:
        os.execve(job.argv[0], job.argv, job.env)  # noqa: S606
    return 0


def _run_inside(job: Job) -> int:
    uid, gid = os.geteuid(), os.getegid()
    flags = _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWPID
    try:
        _call("unshare", flags if uid == 0 else flags | _CLONE_NEWUSER)
    except OSError as error:
        # "No space left on device" is how the kernel says that their number is limited, perhaps to none.
        raise OSError(error.errno, f"the kernel refuses new namespaces ({error.strerror})") from None
    if uid != 0:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{job.user} {uid} 1")
        _write("/proc/self/gid_map", f"{job.user} {gid} 1")
    child = os.fork()
    if child == 0:
        os._exit(_be_first_process(job, privileged=uid == 0))
    return _wait(child)


def _wait(child: int) -> int:
    """Pass signals on to the program until it ends; return its status as a shell would."""

    def forward(number: int, _frame: FrameType | None) -> None:
        os.kill(child, number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _be_first_process(job: Job, *, privileged: bool) -> int:
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _enter(job.root, job.folders)
        os.chdir(job.cwd)
        if privileged:
            os.setgroups([])
            os.setresgid(job.user, job.user, job.user)
        _drop_rights()
        if privileged:
            os.setresuid(job.user, job.user, job.user)
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a new user id clears it
        if not job.probe:
            os.execve(job.argv[0], job.argv, job.env)  # noqa: S606
        return 0
    except OSError as error:
        sys.stderr.write(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}\n")
        sys.stderr.flush()
    return CANNOT_START


def _enter(root: str, folders: dict[str, str]) -> None:
    """Make the tree the root of the file system, read-only, with /tmp, /dev, /proc and /sys in it."""
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    _mount(root, root, "", _MS_BIND | _MS_REC)
    _mount("tmpfs", f"{root}/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")  # noqa: S108
    _make_dev(f"{root}/dev")
    if folders:
        _mount("tmpfs", f"{root}/run", "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "mode=755")
    for place, folder in folders.items():
        os.makedirs(f"{root}{place}")  # noqa: PTH103
        _mount(folder, f"{root}{place}", "", _MS_BIND)
        _make_read_only(f"{root}{place}", _MS_NODEV | _MS_NOEXEC)
    try:
        _mount("proc", f"{root}/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    except OSError:  # some containers forbid a new one
        _mount("/proc", f"{root}/proc", "", _MS_BIND | _MS_REC)
    _mount("/sys", f"{root}/sys", "", _MS_BIND | _MS_REC)
    _make_read_only(root)
    os.chdir(root)
    # With both names the same the old root ends up on top of the new one, and is taken away (pivot_root(2)).
    _call("syscall", _SYS_PIVOT_ROOT, b".", b".")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir("/")


def _make_read_only(place: str, flags: int = 0) -> None:
    kept = _locked_flags(place) | _MS_NOSUID | flags
    _mount("none", place, "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | kept)


def _make_dev(folder: str) -> None:
    _mount("tmpfs", folder, "tmpfs", _MS_NOSUID, "mode=755")
    for name in _DEVICES:
        with open(f"{folder}/{name}", "wb"):  # noqa: PTH123
            pass
        _mount(f"/dev/{name}", f"{folder}/{name}", "", _MS_BIND)
    os.mkdir(f"{folder}/shm")  # noqa: PTH102
    _mount("tmpfs", f"{folder}/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, f"{folder}/{name}")  # noqa: PTH211


def _drop_rights() -> None:
    """Empty the capability bounding set, so that no exec brings any back, and forbid set-id programs."""
    for number in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)  # fails for numbers that this kernel does not know
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _locked_flags(path: str) -> int:
    found = os.statvfs(path).f_flag
    return sum(flag for bit, flag in _LOCKED.items() if found & bit)


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    options = data.encode() or None
    if _libc.mount(source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), f"mount {kind or source} on {target}")


def _call(name: str, *arguments: int | bytes) -> None:
    if getattr(_libc, name)(*arguments):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), name)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:  # noqa: PTH123
        file.write(text)


if __name__ == "__main__":
    raise SystemExit(main())
