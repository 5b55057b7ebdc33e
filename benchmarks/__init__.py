"""Measurements of the library: `python -m benchmarks`, and on a GPU `benchmarks.gpu`."""
