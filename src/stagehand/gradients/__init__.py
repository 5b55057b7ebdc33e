"""Gradients of streamed weights, on their way to the host."""
