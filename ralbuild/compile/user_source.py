"""Reads the signature of a user's kernel from its text. The file is parsed, never imported here.

A parameter's type stands in its annotation (``x: "*i32"``, ``n: tl.int32``) or, as in the article, in
the comment at the end of its line (``output_ptr, # *int8, the output``). docs/kernels.md has the
tables of types, buffer names and constants.
"""

from __future__ import annotations

import ast
import difflib
import io
import re
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass

from ralbuild.compile.spec import ELEMENT_SIZES, SCALAR_SIZES, KernelSpec
from ralbuild.compile.user_data import Encode, NoValueError, UserData
from ralbuild.contract.buffers import BUFFERS
from ralbuild.errors import CompileError, Problem

MAX_SOURCE_BYTES = 1 << 20
MAX_BLOCK_SIZE = 256

_SPELLINGS = {
    "int": "i32", "float": "fp32", "bool": "i1", "half": "fp16", "double": "fp64",
    "int1": "i1", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64",
    "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64",
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64",
}  # fmt: skip
_ALIASES = {"term_list": "terms"}
_TYPE = re.compile(r"\s*(\*?)\s*(?:tl\.)?([A-Za-z_][A-Za-z0-9_]*)")


@dataclass(frozen=True, slots=True)
class _Parameter:
    name: str
    line: int
    annotation: ast.expr | None
    default: ast.expr | None
    comment: str


def user_spec(
    *,
    name: str,
    source: bytes,
    filename: str,
    settings: Mapping[str, object],
    max_seq_len: int,
    encode: Encode | None = None,
    place: str = "",
) -> KernelSpec:
    """Describe the kernel ``<name>_kernel`` of a user's file.

    Args:
        name: the transformer's name in the config.
        source: the file.
        filename: how messages name it.
        settings: the transformer's own ``config``: constants, and values that parameters are bound to.
        max_seq_len: positions per request; bounds BLOCK_SIZE.
        encode: text to token ids, for terms and lists of text.
        place: of the transformer in the config, for its keys.

    Raises:
        CompileError: every problem of the signature, each with file:line.
    """
    function, comments = _find(source, f"{name}_kernel", filename)
    data = UserData(settings, encode)
    return _Binder(filename, data, max_seq_len, place or filename).bind(name, source, function, comments)


def parse_source(source: bytes, filename: str) -> tuple[ast.Module, dict[int, str]]:
    """Return the syntax tree of a kernel file and the comment at the end of each line.

    Raises:
        CompileError: when it is no Python, with file:line:column.
    """
    if len(source) > MAX_SOURCE_BYTES:
        raise CompileError(f"needs at most {MAX_SOURCE_BYTES} bytes, found {len(source)}", place=filename)
    try:
        tree = ast.parse(source)
        comments = {
            token.start[0]: token.string.lstrip("#").strip()
            for token in tokenize.tokenize(io.BytesIO(source).readline)
            if token.type == tokenize.COMMENT
        }
    except SyntaxError as error:
        place = f"{filename}:{error.lineno}:{error.offset}" if error.lineno else filename
        raise CompileError(f"not valid Python: {error.msg}", place=place) from None
    except (ValueError, RecursionError, MemoryError, tokenize.TokenError) as error:
        raise CompileError(f"not valid Python: {error}", place=filename) from None
    return tree, comments


def _find(source: bytes, entry: str, filename: str) -> tuple[ast.FunctionDef, dict[int, str]]:
    """Return the kernel's definition and the comment at the end of each line."""
    tree, comments = parse_source(source, filename)
    functions = [item for item in tree.body if isinstance(item, ast.FunctionDef) and item.name == entry]
    if len(functions) != 1:
        found = "none" if not functions else f"{len(functions)}"
        raise CompileError(f"needs one top-level function {entry!r}, found {found}", place=filename)
    function = functions[0]
    if not any(is_jit(decorator) for decorator in function.decorator_list):
        raise CompileError(
            f"{entry!r} lacks the decorator @triton.jit", place=f"{filename}:{function.lineno}"
        )
    return function, comments


def is_jit(decorator: ast.expr) -> bool:
    """Tell whether a decorator makes its function a kernel or a kernel's helper."""
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(target) in ("triton.jit", "jit")


def read_type(text: str) -> str | None:
    """Return Triton's spelling of the type at the start of ``text``, or None when there is none.

    ``*int8`` and ``* int8`` give ``*i8``; what follows the name (a comma, full-width or not) is ignored.
    """
    found = _TYPE.match(text)
    if not found:
        return None
    pointer, word = found.groups()
    element = _SPELLINGS.get(word.lower(), word.lower())
    known = ELEMENT_SIZES if pointer else SCALAR_SIZES
    return pointer + element if element in known else None


class _Binder:
    """Gives every parameter a type, and a buffer or a value; collects what it cannot."""

    def __init__(self, filename: str, data: UserData, max_seq_len: int, place: str) -> None:
        self.filename = filename
        self.data = data
        self.max_seq_len = max_seq_len
        self.place = place
        self.problems: list[Problem] = []

    def bind(
        self, name: str, source: bytes, function: ast.FunctionDef, comments: dict[int, str]
    ) -> KernelSpec:
        signature: dict[str, str] = {}
        constants: dict[str, int] = {}
        buffers: dict[str, str] = {}
        parameters = self._parameters(function, comments)
        for parameter in parameters:
            if _annotation_text(parameter) in ("tl.constexpr", "constexpr"):
                constants[parameter.name] = self._constant(parameter)
            else:
                signature[parameter.name] = self._type(parameter)
        self.data.note_text_types({_stem(name): kind for name, kind in signature.items()})
        for parameter in parameters:
            if parameter.name in signature:
                buffers[parameter.name] = self._buffer(parameter, signature[parameter.name])
        self._check_unused(function)
        if self.problems:
            raise CompileError.of(self.problems)
        return KernelSpec(
            name=name,
            source=source,
            filename=self.filename,
            entry=function.name,
            signature=signature,
            constants=constants,
            buffers=buffers,
            user=True,
            data=self.data.object(),
        )

    def _problem(self, line: int, message: str, hint: str = "") -> None:
        self.problems.append(Problem(message, f"{self.filename}:{line}", hint))

    def _parameters(self, function: ast.FunctionDef, comments: dict[int, str]) -> list[_Parameter]:
        """List the parameters; a comment counts only for a parameter that is alone on its line."""
        given = function.args
        for extra in (given.vararg, given.kwarg, *given.kwonlyargs):
            if extra is not None:
                self._problem(extra.lineno, f"parameter {extra.arg!r} must be an ordinary one")
        names = [*given.posonlyargs, *given.args]
        defaults = [None] * (len(names) - len(given.defaults)) + list(given.defaults)
        lines = [item.lineno for item in names]
        return [
            _Parameter(
                item.arg,
                item.lineno,
                item.annotation,
                default,
                comments.get(item.lineno, "") if lines.count(item.lineno) == 1 else "",
            )
            for item, default in zip(names, defaults, strict=True)
        ]

    def _type(self, parameter: _Parameter) -> str:
        text = _annotation_text(parameter) or parameter.comment
        found = read_type(text)
        if found is None:
            shown = f"found {text!r}" if text else "found none"
            self._problem(
                parameter.line,
                f"parameter {parameter.name!r} needs a type that a kernel can take, {shown}",
                f'annotate it, as in `{parameter.name}: "*i32"`, or end its own line with a comment such as '
                f"`# *int32`; types: {', '.join(sorted(_SPELLINGS))}",
            )
        return found or "i32"

    def _buffer(self, parameter: _Parameter, triton_type: str) -> str:
        stem = _stem(parameter.name)
        known = BUFFERS.get(stem)
        if known is not None and not _same_width(known.type, triton_type):
            self._problem(
                parameter.line,
                f"parameter {parameter.name!r} is declared {triton_type}, its buffer {stem!r} "
                f"holds {known.type}",
            )
        elif self.data.names(stem):
            try:
                return self.data.bind(stem, triton_type)
            except NoValueError as error:
                self._problem(parameter.line, f"parameter {parameter.name!r}: {error}")
        elif known is None:
            names = [*BUFFERS, *_ALIASES, *self.data.settings]
            near = difflib.get_close_matches(stem, names, n=1)
            guess = f" (did you mean {near[0]!r}?)" if near else ""
            keys = ", ".join(sorted(self.data.settings)) or "none"
            self._problem(
                parameter.line,
                f"no buffer is named {parameter.name!r}{guess}, and no key of the transformer's config",
                "a parameter is bound to the buffer or the config key of its name, with or without `_ptr`; "
                f"config keys: {keys}; buffers: {', '.join(sorted([*BUFFERS, *_ALIASES]))}",
            )
        return stem

    def _check_unused(self, function: ast.FunctionDef) -> None:
        taken = ", ".join(item.arg for item in function.args.args)
        keys = ", ".join(sorted(self.data.settings))
        for key in sorted(set(self.data.settings) - self.data.used):
            self.problems.append(
                Problem(
                    f"config key {key!r} is taken by no parameter of {function.name!r}",
                    self.place,
                    f"parameters: {taken or 'none'}; config keys: {keys}",
                )
            )

    def _constant(self, parameter: _Parameter) -> int:
        """Take the value from the transformer's settings, else derive it, else its default."""
        for key in (parameter.name, parameter.name.lower()):
            value = self.data.settings.get(key)
            if isinstance(value, int):
                self.data.used.add(key)
                return int(value)
        if parameter.name == "BLOCK_SIZE":
            return 1 << (min(MAX_BLOCK_SIZE, self.max_seq_len).bit_length() - 1)
        if parameter.name == "MAX_SEQ_LEN":
            return self.max_seq_len
        if isinstance(parameter.default, ast.Constant) and isinstance(parameter.default.value, int):
            return int(parameter.default.value)
        self._problem(
            parameter.line,
            f"constant {parameter.name!r} has no value",
            f"set `{parameter.name.lower()}` in the transformer's config, or give the parameter a default; "
            "BLOCK_SIZE and MAX_SEQ_LEN are derived",
        )
        return 0


def _stem(name: str) -> str:
    stem = name.removesuffix("_ptr")
    return _ALIASES.get(stem, stem)


def _annotation_text(parameter: _Parameter) -> str:
    node = parameter.annotation
    if node is None:
        return ""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("pointer_type") and node.args:
        return "*" + ast.unparse(node.args[0])
    return ast.unparse(node)


def _same_width(buffer: str, declared: str) -> bool:
    """Tell whether two types are alike but for the sign: a byte buffer may be read as int8."""
    if buffer.startswith("*") != declared.startswith("*"):
        return False
    first, second = buffer.removeprefix("*"), declared.removeprefix("*")
    whole = first[0] in "iu" and second[0] in "iu"
    return first == second or (whole and ELEMENT_SIZES[first] == ELEMENT_SIZES[second])
