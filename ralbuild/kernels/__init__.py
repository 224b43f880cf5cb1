"""Triton sources of the built-in kernels: text to the builder, imported only by the worker and by tests."""
