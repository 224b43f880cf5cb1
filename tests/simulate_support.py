"""What the simulator's tests share: PTX of the kernels that ship, and one-instruction kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from threading import Event

import numpy as np
from compile_support import PINS, compiled, specs, toolchain

from ralbuild.compile.launch import run_worker
from ralbuild.compile.spec import KernelSpec
from ralbuild.contract.bundle import Kernel, Param
from ralbuild.simulate.ptx.model import Module
from ralbuild.simulate.ptx.parser import parse_module
from ralbuild.simulate.session import Options, Session

ARCHS = PINS.archs
HEAD = ".version 8.2\n.target sm_90a\n.address_size 64\n"


@functools.cache
def ptx(name: str, arch: str = "sm_80") -> str:
    return compiled(name, arch).ptx.decode()


@functools.cache
def module(name: str, arch: str = "sm_80") -> Module:
    return parse_module(ptx(name, arch))


@functools.cache
def shared_bytes(name: str, arch: str = "sm_80") -> int:
    return compiled(name, arch).launch["shared"]


def kernel(name: str) -> Kernel:
    """The bundle's record, as far as the simulator reads it."""
    spec = specs()[name]
    params = tuple(
        Param(param, kind, spec.buffers[param], 0, 8 if kind[0] == "*" else 4, 1, hidden=False)
        for param, kind in spec.signature.items()
    )
    constants = dict(spec.constants)
    return Kernel(name, spec.entry, "", spec.user, spec.num_warps, constants, params, ())


def program(body: str, parameters: int = 1, threads: int = 32, registers: str = "") -> str:
    """A kernel ``t`` with pointer parameters p0..., and %i holding the thread's number in the grid."""
    params = ", ".join(f".param .u64 p{n}" for n in range(parameters))
    loads = "\n".join(f"ld.param.u64 %rd{n}, [p{n}];" for n in range(parameters))
    return (
        f"{HEAD}.visible .entry t({params})\n.reqntid {threads}\n{{\n"
        f".reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<40>, %i, %t, %c; .reg .b64 %rd<30>;\n{registers}\n"
        f"mov.u32 %t, %tid.x;\nmov.u32 %c, %ctaid.x;\nmad.lo.s32 %i, %c, {threads}, %t;\n{loads}\n{body}\n}}\n"
    )


def run(text: str, *arrays: np.ndarray, blocks: int = 1, **options: object) -> Session:
    """Launch ``t`` over arrays in place and return the session."""
    arguments = {f"p{n}": array for n, array in enumerate(arrays)}
    session = Session(parse_module(text), "t", (blocks, 1, 1), arguments, Options(**options))
    session.launch()
    return session


def one_instruction(instruction: str, sizes: Sequence[int], out: np.dtype) -> str:
    """A kernel that runs ``d`` from ``a``, ``b``, ``c``, ``e`` over rows of operands; one thread a row."""
    names = "abce"
    lines = [f"mul.wide.u32 %rd20, %i, {size}; add.u64 %rd20, %rd20, %rd{n};\n"
             f"ld.global.b{8 * size} %v{n}, [%rd20];" for n, size in enumerate(sizes)]  # fmt: skip
    opcode, operands = instruction.split(" ", 1)
    written = [item.strip() for item in operands.split(",")]
    renamed = ["%d" if x == "d" else f"%v{names.index(x)}" if x in names else x for x in written]
    lines.append(f"{opcode} {', '.join(renamed)};")
    store = f"st.global.b{8 * out.itemsize} [%rd20], {'%h0' if out == np.bool_ else '%d'};"
    if out == np.bool_:
        lines.append("selp.u16 %h0, 1, 0, %d;")
    last = len(sizes)
    lines.append(f"mul.wide.u32 %rd20, %i, {out.itemsize}; add.u64 %rd20, %rd20, %rd{last};\n{store}\nret;")
    declared = " ".join(f".reg .b{8 * max(2, size)} %v{n};" for n, size in enumerate(sizes))
    kind = "pred" if out == np.bool_ else f"b{8 * max(2, out.itemsize)}"
    return program("\n".join(lines), last + 1, 128, f"{declared} .reg .{kind} %d;")


def apply(instruction: str, columns: Sequence[np.ndarray], out: np.dtype) -> np.ndarray:
    """Run one instruction over columns of operands."""
    text = one_instruction(instruction, [column.itemsize for column in columns], out)
    count = len(columns[0])
    padded = -(-count // 128) * 128
    given = [np.resize(column, padded).copy() for column in columns]
    result = np.zeros(padded, out)
    run(text, *given, result, blocks=padded // 128)
    return result[:count]


HEADER = "import triton\nimport triton.language as tl\n\n"


@functools.cache
def triton_ptx(
    body: str, signature: tuple[tuple[str, str], ...], arch: str = "sm_80", warps: int = 4, align: int = 1
) -> tuple[str, int]:
    """Compile a Triton source with a kernel ``k`` as builds do; return its PTX and its shared bytes."""
    names = [name for name, _ in signature]
    spec = KernelSpec(
        "k", (HEADER + body).encode(), "k.py", "k", dict(signature), {}, {name: name for name in names},
        dict.fromkeys(names, align) if align > 1 else {}, warps, True,
    )  # fmt: skip
    done = run_worker(spec, arch, toolchain(), stop=Event())
    return done.ptx.decode(), done.launch["shared"]


def run_triton(compiled_kernel: tuple[str, int], arguments: dict[str, object], blocks: int = 1) -> Session:
    """Launch ``k`` with races watched for, and return the session."""
    text, shared = compiled_kernel
    options = Options(shared=shared, races=True)
    session = Session(parse_module(text), "k", (blocks, 1, 1), arguments, options)
    session.launch()
    return session
