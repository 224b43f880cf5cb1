"""The embedded base: Debian's Python and locked wheels as an OCI layout. No docker, no root, no registry."""

from ralbuild.image.base.build import TARGETS, build_base, ensure_base
from ralbuild.image.base.report import Report

__all__ = ["TARGETS", "Report", "build_base", "ensure_base"]
