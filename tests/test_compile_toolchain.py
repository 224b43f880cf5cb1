"""The toolchain is the pinned one or there is none."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint, version

import pytest
from compile_support import toolchain

from ralbuild.compile import toolchain as room
from ralbuild.compile.toolchain import find_toolchain
from ralbuild.errors import HostError
from ralbuild.pins import Pins, load_pins


def changed(**values: object) -> Pins:
    pins = load_pins()
    return replace(pins, toolchain=replace(pins.toolchain, **values))


def test_the_installed_toolchain_is_the_pinned_one() -> None:
    found = toolchain()
    assert found.triton_version == version("triton")
    said = subprocess.run([found.ptxas, "--version"], capture_output=True, text=True, check=True).stdout
    assert f"V{found.ptxas_version}" in said


def test_finding_it_imports_no_triton() -> None:
    code = (
        "import sys; from ralbuild.compile.toolchain import find_toolchain; from ralbuild.pins import load_pins;"
        "find_toolchain(load_pins()); print('triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"ptxas_sha256": "0" * 64},
            f"needs version 12.2.140 with SHA-256 {'0' * 64}, found 12.2.140 with 879f",
        ),
        ({"ptxas_version": "12.2.128"}, "needs version 12.2.128"),
        ({"ptxas_file": "nvidia/none"}, "nvidia/none: cannot be read: No such file or directory"),
        ({"ptxas_package": "no-such-package"}, "no-such-package: is not installed"),
        ({"triton_least": "3.99"}, "triton: needs Triton 3.99 or later, below 3.8, found 3.7"),
        ({"triton_below": "3.7.0"}, "triton: needs Triton 3.7.0 or later, below 3.7.0"),
    ],
)
def test_another_toolchain_is_refused_with_the_remedy(change: dict[str, str], message: str) -> None:
    with pytest.raises(HostError) as caught:
        find_toolchain(changed(**change))
    assert message in str(caught.value)
    assert "pip install" in caught.value.problems[0].hint


def test_a_package_that_would_run_inside_the_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = EntryPoint(name="x", value="evil.backend", group="triton.backends")
    monkeypatch.setattr(room, "entry_points", lambda group: [plugin])
    with pytest.raises(HostError, match=r"triton: has the unknown backends evil\.backend"):
        find_toolchain(load_pins())


def test_the_base_image_pins_are_digests() -> None:
    for pin in load_pins().images.values():
        algorithm, _, digest = pin.digest.partition(":")
        assert algorithm == "sha256"
        assert len(bytes.fromhex(digest)) == 32
        assert pin.tag.startswith(load_pins().cuda.version)
