"""What each instruction does: one row a form, each naming the section of the PTX ISA that it follows."""

from ralbuild.simulate.semantics import convert, floating, integer, memory, select, warp
from ralbuild.simulate.semantics.table import Row, find_row, rows

__all__ = ["Row", "convert", "find_row", "floating", "integer", "memory", "rows", "select", "warp"]
