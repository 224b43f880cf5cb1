"""Binds this process to the one that started it, then runs the program that is named.

`ralbuild.weights.child` starts every worker through it: a builder that is killed leaves no worker
behind, which would go on computing and writing for nobody.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Take the parent's process id, the program and its arguments from the command line."""
    parent, program = int(sys.argv[1]), sys.argv[2]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:  # it died before this process was bound to it
        sys.exit(1)
    sys.argv = sys.argv[2:]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
