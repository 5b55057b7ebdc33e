"""`LayerStreamer` and its tuner under the name of the package that had them first.

A script that was written for `layer_streamer` runs with another import:

    from stagehand.compat.layer_streamer import LayerStreamer, LayerStreamerTuner

Arguments, their order and what they mean are the same. What differs:

- `dtype` casts: where the files have another floating-point type, weights are cast on
  the device. Bytes are never taken for another type.
- A tensor that is missing, short or elsewhere than `tensor_info` says is an error.
- Batches that a stage has no memory for are refused at construction.
- Weights that `layer_fn` keeps stay what they are.
- The tuner stops a configuration when its mean cannot win any more, not at its first
  slow run.
"""

from stagehand.streamer.streamer import LayerStreamer
from stagehand.streamer.tuner import LayerStreamerTuner

__all__ = ["LayerStreamer", "LayerStreamerTuner"]
