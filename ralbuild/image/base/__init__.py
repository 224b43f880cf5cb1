"""The embedded base: Debian's Python and locked wheels as an OCI layout. No docker, no root, no registry."""

from ralbuild.image.base.build import build_base, ensure_base
from ralbuild.image.base.dockerfile import write_base_context
from ralbuild.image.base.interpreter import interpreter_layer
from ralbuild.image.base.report import Report

__all__ = ["Report", "build_base", "ensure_base", "interpreter_layer", "write_base_context"]
