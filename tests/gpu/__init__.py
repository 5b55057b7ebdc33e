"""Promises on a real device, each rehearsed on the simulated one.

`make test-gpu` runs them on a CUDA device. With `TORCH_CUDA_SANITIZER=1` torch looks
for missing waits between streams, slowly. The rehearsals are part of `make test`.
"""
