"""The one attribute that a streamed model gets: its runtime, under a known name."""

__all__ = ["HANDLE"]

HANDLE = "_stagehand_layer_runtime"
"""The attribute's name, which users know."""
