"""Triton sources of the built-in kernels: text to the builder, imported only by the compile worker and by tests."""
