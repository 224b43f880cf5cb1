"""Locks the compile worker in before it imports a user's kernel file. Runs inside the worker only.

Importing a kernel executes it, so the process gives up what it does not need: other processes, the
network, every file but the compiler's, other users' rights. Each protection is used where the host
grants it; `enter` returns the names of those it could not have, and the build prints them.

Numbers and structure layouts are Linux's own (landlock.h, seccomp.h, filter.h, capability.h).
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)

_NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
_SET_PDEATHSIG, _SET_KEEPCAPS, _SET_SECCOMP, _SET_NO_NEW_PRIVS, _CAP_AMBIENT = 1, 8, 22, 38, 47
_CAP_DAC_READ_SEARCH = 2
_CAPABILITY_VERSION_3 = 0x20080522

_FIRST_UID, _UIDS = 61184, 4336
"""The range that systemd keeps for short-lived users: no account or daemon has such an id."""

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_FS_EXECUTE, _FS_WRITE, _FS_READ, _FS_READ_DIR, _FS_TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_FS_MAKE_DEVICES = 1 << 6 | 1 << 11
_FS_RIGHTS = (0x1FFF, 0x3FFF, 0x7FFF, 0x7FFF, 0xFFFF)
"""All file rights that Landlock version 1, 2, 3, 4, 5 can restrict."""
_TCP_RIGHTS = 3
_SCOPE_SOCKETS_AND_SIGNALS = 3

_CALLS = {
    # socket ptrace mount umount2 pivot_root unshare setns bpf perf_event_open keyctl add_key
    # process_vm_readv process_vm_writev open_by_handle_at userfaultfd io_uring_* pidfd_getfd
    "x86_64": (41, 101, 165, 166, 155, 272, 308, 321, 298, 250, 248, 310, 311, 304, 323, 425, 426, 427, 438),
    "aarch64": (198, 117, 40, 39, 41, 97, 268, 280, 241, 219, 217, 270, 271, 265, 282, 425, 426, 427, 438),
}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_CALLS = 0x40000000
_SECCOMP_ALLOW, _SECCOMP_EACCES = 0x7FFF0000, 0x0005000D
_BPF_LOAD, _BPF_EQUAL, _BPF_AT_LEAST, _BPF_RETURN = 0x20, 0x15, 0x35, 0x06


@dataclass(frozen=True, slots=True)
class Policy:
    """What the worker may use.

    Attributes:
        private: the only folder it may write to.
        readable: folders and files that it may read and execute.
        cpu_seconds, file_bytes, memory_bytes: limits of each process.
        processes: processes and threads in all.
    """

    private: str
    readable: tuple[str, ...]
    cpu_seconds: int
    file_bytes: int
    memory_bytes: int
    processes: int


def enter(policy: Policy) -> list[str]:
    """Apply every protection. Only a child of the calling process returns.

    Returns:
        The names of the protections that this host does not give.
    """
    missing: list[str] = []
    root = os.geteuid() == 0
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    own_user_namespace = _isolate(missing)
    landlock = _call(_LANDLOCK_CREATE, None, 0, 1)
    if root and not own_user_namespace:
        _leave_root(policy, landlock > 0, missing)
    else:
        _keep_capabilities(0)
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(_SET_NO_NEW_PRIVS, 1)
    if landlock <= 0 or not _restrict_files(policy, landlock):
        missing.append("file access rules (Landlock)")
    if not _restrict_calls():
        missing.append("system call filter (seccomp)")
    if os.geteuid() == 0:
        missing.append("process limit (it still runs as root)")
    _set_limits(policy)
    return missing


def _isolate(missing: list[str]) -> bool:
    """Leave the host's network, processes and IPC; tell whether that took a user namespace."""
    spaces = _NEWNET | _NEWPID | _NEWIPC
    by_user_namespace = False
    if os.geteuid() != 0 or _LIBC.unshare(spaces) != 0:
        if not _succeeds_in_a_child(lambda: _new_user_namespace(spaces)):
            missing += ["network namespace", "process namespace"]
            return False
        _new_user_namespace(spaces)
        by_user_namespace = True
    child = os.fork()  # the first child is the first process of the new namespace, and ends it
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    return by_user_namespace


def _new_user_namespace(spaces: int) -> None:
    uid, gid = os.geteuid(), os.getegid()
    if _LIBC.unshare(_NEWUSER | spaces) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _succeeds_in_a_child(action: Callable[[], None]) -> bool:
    """Try ``action`` where its half-done state does no harm."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def _leave_root(policy: Policy, landlock: bool, missing: list[str]) -> None:
    """Become a user without a name, files or processes.

    The compiler may lie in root's own home. Then the right to read past permissions is kept, and
    Landlock decides what can be read; without Landlock that would be everything, so root stays.
    """
    uid = _FIRST_UID + Path(policy.private).stat().st_ino % _UIDS
    open_to_all = all(_is_open_to_all(Path(path)) for path in (*policy.readable, policy.private))
    if not open_to_all and not landlock:
        missing.append("own user id")
        return
    _prctl(_SET_KEEPCAPS, 1)
    try:
        for folder, _, names in os.walk(policy.private):
            for path in (folder, *(f"{folder}/{name}" for name in names)):
                os.chown(path, uid, uid)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError:  # a user namespace may hold no other user
        missing.append("own user id")
    _keep_capabilities(0 if open_to_all else 1 << _CAP_DAC_READ_SEARCH)


def _is_open_to_all(path: Path) -> bool:
    """Tell whether a stranger could reach ``path``: every folder above it lets others pass."""
    return all(parent.stat().st_mode & 0o001 for parent in path.resolve().parents)


def _keep_capabilities(mask: int) -> None:
    """Drop all capabilities but those of ``mask``, and let programs that are started have them too."""
    header = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0)
    _LIBC.capset(header, struct.pack("<6I", mask, mask, mask, 0, 0, 0))
    for bit in range(32):
        if mask >> bit & 1:
            _prctl(_CAP_AMBIENT, 2, bit)


def _restrict_files(policy: Policy, version: int) -> bool:
    rights = _FS_RIGHTS[min(version, len(_FS_RIGHTS)) - 1]
    fields = [rights]
    if version >= 4:
        fields.append(_TCP_RIGHTS)
    if version >= 6:
        fields.append(_SCOPE_SOCKETS_AND_SIGNALS)
    attributes = struct.pack(f"<{len(fields)}Q", *fields)
    rules = _call(_LANDLOCK_CREATE, attributes, len(attributes), 0)
    if rules < 0:
        return False
    read = _FS_EXECUTE | _FS_READ | _FS_READ_DIR
    for path in policy.readable:
        _allow(rules, path, read)
    _allow(rules, "/dev/null", rights & (_FS_READ | _FS_WRITE | _FS_TRUNCATE))
    _allow(rules, "/dev/urandom", _FS_READ)
    _allow(rules, policy.private, rights & ~_FS_MAKE_DEVICES)
    done = _call(_LANDLOCK_RESTRICT, rules, 0) == 0
    os.close(rules)
    return done


def _allow(rules: int, path: str, rights: int) -> None:
    """Add a rule for ``path`` and all below it; a path that is not there needs none."""
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not os.path.isdir(path):  # noqa: PTH112 (the worker starts faster without more of pathlib)
        rights &= ~_FS_READ_DIR
    _call(_LANDLOCK_ADD, rules, 1, struct.pack("<Qi", rights, handle), 0)
    os.close(handle)


def _restrict_calls() -> bool:
    """Deny sockets of every kind, tracing, mounting, new namespaces and other ways around the rules."""
    machine = platform.machine()
    if machine not in _CALLS:
        return False
    tests = [(_BPF_EQUAL, number) for number in _CALLS[machine]]
    tests.insert(0, (_BPF_AT_LEAST, _X32_CALLS))
    program = [
        (_BPF_LOAD, 0, 0, 4),
        (_BPF_EQUAL, 0, len(tests) + 2, _AUDIT_ARCH[machine]),
        (_BPF_LOAD, 0, 0, 0),
    ]
    program += [(kind, len(tests) - index, 0, value) for index, (kind, value) in enumerate(tests)]
    program += [(_BPF_RETURN, 0, 0, _SECCOMP_ALLOW), (_BPF_RETURN, 0, 0, _SECCOMP_EACCES)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in program))
    filter_ = struct.pack("<H6xQ", len(program), ctypes.addressof(code))
    return _prctl(_SET_SECCOMP, 2, filter_) == 0


def _set_limits(policy: Policy) -> None:
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: policy.cpu_seconds,
        resource.RLIMIT_FSIZE: policy.file_bytes,
        resource.RLIMIT_AS: policy.memory_bytes,
        resource.RLIMIT_NPROC: policy.processes,
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _call(number: int, *arguments: int | bytes | None) -> int:
    return int(_LIBC.syscall(number, *(_word(value) for value in arguments)))


def _prctl(option: int, *arguments: int | bytes) -> int:
    filled = [*arguments, *[0] * (4 - len(arguments))]
    return int(_LIBC.prctl(option, *(_word(value) for value in filled)))


def _word(value: int | bytes | None) -> ctypes.c_long | bytes | None:
    """Pass numbers as whole registers; ctypes would pass 32 bits to a variadic function."""
    return ctypes.c_long(value) if isinstance(value, int) else value
