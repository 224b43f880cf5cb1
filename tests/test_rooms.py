"""The house rules that a reader relies on: import order, one door per package, the room that ships."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ralbuild"

ORDER = [
    "errors", "files", "engine", "contract", "pins", "digests", "signing", "config", "weights", "fold", "kernels", "compile",
    "cache", "simulate", "render", "image", "supply", "report", "checking", "release", "debug", "proof", "pipeline", "doctor",
    "cli",
]  # fmt: skip
"""A module may import only rooms to its left, and its own. docs/architecture.md draws it."""

DOORS = {
    "yaml": {"config/strict_yaml.py"},
    "pydantic": {"config/model.py", "config/load.py", "config/probes.py", "config/runtime_rules.py"},
    "pydantic_core": {"config/load.py"},
    "jinja2": {"render.py", "runtime/chat.py", "weights/template_worker.py"},
    "rich": {"report.py", "debug/show.py"},
    "triton": {
        "compile/worker.py",
        "kernels/transduce.py",
        "kernels/sample.py",
        "kernels/penalize.py",
        "kernels/feedback.py",
        "runtime/interpreted.py",
    },
    "tokenizers": {"weights/tokenizer_worker.py", "weights/tokenizer.py", "runtime/tokens.py"},
    "cryptography": {"signing.py"},
    "docker": {"engine.py"},
    "requests": {"engine.py"},
    "httpx": {"debug/proxy.py"},
}
"""Package to the only modules that may import it."""

RUNTIME_PACKAGES = {"torch", "transformers", "starlette", "uvicorn", "safetensors", "prometheus_client"}
"""Only `runtime` imports these, and those of `RUNTIME_GUESTS`."""

RUNTIME_GUESTS = {"weights/model_worker.py", "debug/proxy.py"}
"""The canary's own process, and the debug proxy, which is a server as well."""


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports(path: Path) -> list[tuple[str, int]]:
    out: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            out += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            if node.module == "ralbuild":
                out += [(f"ralbuild.{alias.name}", node.lineno) for alias in node.names]
            else:
                out.append((node.module, node.lineno))
    return out


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_point_left(path: Path) -> None:
    room = room_of(path)
    if room == "__init__":
        return
    wrong = []
    for name, line in imports(path):
        if not name.startswith("ralbuild."):
            continue
        target = name.split(".")[1]
        if target in (room, "__version__"):
            continue
        if room == "runtime":
            allowed = target == "contract"
        else:
            allowed = target != "runtime" and ORDER.index(target) < ORDER.index(room)
        if not allowed:
            wrong.append(f"{path.relative_to(ROOT)}:{line}: {room} imports {target}")
    assert not wrong


def test_each_package_has_one_door() -> None:
    wrong = []
    for path in modules():
        here = str(path.relative_to(PACKAGE))
        for name, line in imports(path):
            top = name.split(".")[0]
            if top in DOORS and here not in DOORS[top]:
                wrong.append(f"{here}:{line}: {top}")
            serving = top in RUNTIME_PACKAGES and room_of(path) != "runtime"
            if serving and here not in RUNTIME_GUESTS:
                wrong.append(f"{here}:{line}: {top}")
            if room_of(path) == "contract" and top != "ralbuild" and top not in sys.stdlib_module_names:
                wrong.append(f"{here}:{line}: contract is standard library only, found {top}")
    assert not wrong


def test_contract_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    for name in ("__init__.py", "contract"):
        (tmp_path / "ralbuild").mkdir(exist_ok=True)
        os.symlink(PACKAGE / name, tmp_path / "ralbuild" / name)
    names = [path.stem for path in (PACKAGE / "contract").glob("*.py") if path.stem != "__init__"]
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + "\n".join(
        f"import ralbuild.contract.{name}" for name in names
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from ralbuild.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'triton','torch','docker','jinja2','yaml','rich','pydantic','numpy','tokenizers','cryptography'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: ralbuild" in done.stdout


def test_declared_dependencies_are_the_ones_with_a_door() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    import re

    declared = {re.match(r"[A-Za-z0-9_-]+", item)[0] for item in project["dependencies"]}
    assert declared <= {
        "cryptography", "docker", "jinja2", "numpy", "nvidia-cuda-nvcc-cu12", "pydantic", "pyyaml", "rich", "tokenizers", "triton",
    }  # fmt: skip
