"""Kernels compiled ahead of time: pinned toolchain, sandboxed worker, cubin reader, gate."""
