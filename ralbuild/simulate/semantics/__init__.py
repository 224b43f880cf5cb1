"""What each instruction does: one row a form, each naming the section of the PTX ISA that it follows."""

from ralbuild.simulate.semantics import (
    calls,
    convert,
    copies,
    floating,
    integer,
    matrix,
    memory,
    select,
    warp,
)
from ralbuild.simulate.semantics.table import Row, find_row, rows

__all__ = [
    "Row", "calls", "convert", "copies", "find_row", "floating", "integer", "matrix", "memory", "rows",
    "select", "warp",
]  # fmt: skip
