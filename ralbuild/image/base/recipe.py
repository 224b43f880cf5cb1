"""What the embedded base is made of, as data.

Any change here, or in how it is applied, needs another `RECIPE`: finished bases are found by it.
"""

from __future__ import annotations

from ralbuild.contract.places import APP_DIR, PACKAGES_DIR

RECIPE = "2"
"""Part of the base's key and of its labels."""
CONTRACT = "1"
"""`io.ralbuild.base.contract`: what an image may expect of any base, however it was made (docs/base.md)."""
DEBIAN_ARCHITECTURE = "amd64"
MACHINE = "x86_64"
PYTHON_VERSION = "3.11"
LIBRARY_DIR = "usr/lib/x86_64-linux-gnu"
LOADER = f"{LIBRARY_DIR}/ld-linux-x86-64.so.2"
STDLIB_DIR = f"usr/lib/python{PYTHON_VERSION}"

DEBIAN_PACKAGES = (
    "base-files",
    "ca-certificates",
    "dash",
    "libc-bin",
    "libgomp1",
    f"libpython{PYTHON_VERSION}-stdlib",
    "libstdc++6",
    "netbase",
    f"python{PYTHON_VERSION}-minimal",
    "tzdata",
)
"""What is asked for; apt adds what these depend on."""

DROPPED_PACKAGES = frozenset(
    {
        # For maintainer scripts, which are never run here.
        *("debconf", "debianutils", "dpkg", "libacl1", "libmd0", "libpcre2-8-0", "libselinux1", "libzstd1"),
        *("mawk", "openssl", "tar"),
        # Libraries of the extension modules in `DROPPED_MODULES`.
        *("libcom-err2", "libcrypt1", "libdb5.3", "libgssapi-krb5-2", "libk5crypto3", "libkeyutils1"),
        *("libkrb5-3", "libkrb5support0", "libncursesw6", "libnsl2", "libreadline8", "libsqlite3-0"),
        *("libtinfo6", "libtirpc-common", "libtirpc3", "libuuid1", "readline-common"),
    }
)
"""Dependencies left out. A package that no list names is kept: dropping is what needs a reason."""

DROPPED_MODULES = frozenset(
    {
        # Each would bring a library that someone must patch; a server imports none of them.
        *(
            "_crypt",
            "_curses",
            "_curses_panel",
            "_dbm",
            "_sqlite3",
            "_uuid",
            "nis",
            "ossaudiodev",
            "readline",
        ),
        # They serve the tests of Python itself, or a sound card.
        *(
            "_ctypes_test",
            "_testbuffer",
            "_testcapi",
            "_testclinic",
            "_testimportmultiple",
            "_testinternalcapi",
        ),
        *("_testmultiphase", "_xxsubinterpreters", "_xxtestfuzz", "xxlimited", "xxlimited_35"),
    }
)
"""Extension modules of the standard library that are left out."""

DROPPED_PATHS = (
    f"{LIBRARY_DIR}/audit/",
    f"{LIBRARY_DIR}/gconv/",
    *(
        f"{STDLIB_DIR}/{name}/"
        for name in ("ensurepip", "idlelib", "lib2to3", "pydoc_data", "test", "turtledemo")
    ),
    "usr/share/zoneinfo/right/",
)
"""Left out of the folders in `KEPT_PATHS`."""

_ETC = (
    "debian_version",
    "ethertypes",
    "host.conf",
    "ld.so.conf",
    "ld.so.conf.d/",
    "mime.types",
    "os-release",
)
_ETC_MORE = ("protocols", f"python{PYTHON_VERSION}/", "rpc", "services")
CERTIFICATES_DIR = "usr/share/ca-certificates/"
KEPT_PATHS = (
    "usr/bin/dash",
    f"usr/bin/python{PYTHON_VERSION}",
    f"{LIBRARY_DIR}/",
    f"{STDLIB_DIR}/",
    "usr/lib/locale/C.utf8/",
    "usr/lib/os-release",
    "usr/lib64/",
    CERTIFICATES_DIR,
    "usr/share/common-licenses/",
    "usr/share/zoneinfo/",
    *(f"etc/{name}" for name in (*_ETC, *_ETC_MORE)),
)
"""Files and folders (with a trailing slash) of the Debian packages that are kept, besides copyright files."""

MERGED_DIRS = ("bin", "lib", "lib64", "sbin")
"""Links to the folder of the same name under ``usr``, as on every Debian since 12."""

LINKS = {
    **{name: f"usr/{name}" for name in MERGED_DIRS},
    "etc/localtime": "../usr/share/zoneinfo/Etc/UTC",
    "usr/bin/python3": f"python{PYTHON_VERSION}",
    "usr/bin/sh": "dash",
    "var/run": "../run",
}
EMPTY_DIRS = ("dev", "proc", "root", "run", "sys", "usr/sbin", "var/lib", "var/log")
STICKY_DIRS = ("tmp", "var/tmp")

_USERS = """\
root:x:0:0:root:/root:/usr/sbin/nologin
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
ral:x:65532:65532:ral:/tmp:/usr/sbin/nologin
"""
_GROUPS = "root:x:0:\nnogroup:x:65534:\nral:x:65532:\n"
_NSSWITCH = """\
passwd:    files
group:     files
hosts:     files dns
networks:  files
protocols: files
services:  files
ethers:    files
rpc:       files
"""
TEXT_FILES = {
    "etc/group": _GROUPS,
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "etc/nsswitch.conf": _NSSWITCH,
    "etc/passwd": _USERS,
    "etc/timezone": "Etc/UTC\n",
}
CERTIFICATES_FILE = "etc/ssl/certs/ca-certificates.crt"
PACKAGE_RECORDS_DIR = "var/lib/dpkg/status.d"
"""One control file a package, where vulnerability scanners look when there is no dpkg database."""

ENVIRONMENT = (
    ("PATH", "/usr/bin"),
    ("LANG", "C.UTF-8"),
    ("HOME", "/tmp"),  # noqa: S108  the one place that an image with a read-only root may write to
    ("SSL_CERT_FILE", f"/{CERTIFICATES_FILE}"),
    ("PYTHONPATH", f"{APP_DIR}:{PACKAGES_DIR}"),
    ("PYTHONDONTWRITEBYTECODE", "1"),
    ("PYTHONUNBUFFERED", "1"),
    ("HF_HUB_OFFLINE", "1"),
    ("TRANSFORMERS_OFFLINE", "1"),
)
CUDA_ENVIRONMENT = (
    # For the container runtime, as in NVIDIA's own images: what of the driver to mount, and which is too old.
    ("NVIDIA_VISIBLE_DEVICES", "all"),
    ("NVIDIA_DRIVER_CAPABILITIES", "compute,utility"),
    ("NVIDIA_REQUIRE_CUDA", "cuda>=12.2"),
)
DISTRIBUTION_PACKAGES = ("ca-certificates", "libgomp1", "libstdc++6", f"python{PYTHON_VERSION}", "tzdata")
"""What a base that a container engine makes takes from its distribution, Debian 12 or Ubuntu 22.04."""
WORKING_DIR = "/tmp"  # noqa: S108
