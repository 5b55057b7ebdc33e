"""Measurements: `python -m benchmarks`, and on a GPU `python -m benchmarks.gpu`."""
