"""Measurements on a real device: `python -m benchmarks.gpu`, rehearsed with `--dry`."""
