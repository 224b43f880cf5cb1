"""Measurements that print ratios to something that a reader can run too. `python -m benchmarks.<name>`."""
