"""Sets limits on this process, then runs the program that is named: `ralbuild.weights.child` starts it.

The limits are those of the kernel, since nothing in the process could be trusted to keep its own.
"""

from __future__ import annotations

import resource
import runpy
import sys


def main() -> None:
    """Take CPU seconds, bytes of memory and the program from the command line."""
    cpu_seconds, memory_bytes, program = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    for what, most in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 1 << 24),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
