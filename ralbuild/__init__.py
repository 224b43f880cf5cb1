"""ralbuild: model weights, compiled rules and kernels into an immutable container image."""

__version__ = "0.1.0"
