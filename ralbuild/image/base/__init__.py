"""The embedded base: Debian's Python and locked wheels as an OCI layout. No docker, no root, no registry."""

from ralbuild.image.base.build import base_work, build_base, ensure_base, find_base
from ralbuild.image.base.dockerfile import write_base_context
from ralbuild.image.base.interpreter import find_interpreter, interpreter_layer, interpreter_work
from ralbuild.image.base.lockfile import Work
from ralbuild.image.base.report import Report

__all__ = [
    "Report",
    "Work",
    "base_work",
    "build_base",
    "ensure_base",
    "find_base",
    "find_interpreter",
    "interpreter_layer",
    "interpreter_work",
    "write_base_context",
]
