"""Loss scaling for float16 with gradients on the host."""

from typing import Any

import torch

__all__ = ["GradScaler"]

_FUSED = "_step_supports_amp_scaling"


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for gradients that lie on the host, or in both places.

    Torch's own queues the copy of the scale to the host and reads it before it has
    arrived, so that gradients on the host may be divided by any number. This one waits
    for that copy, once a step. It always unscales before the step, also where a fused
    optimizer would do both in one.

    The arguments are those of `torch.amp.GradScaler`.

    Example:
        >>> scaler = stagehand.optim.GradScaler()
        >>> scaler.scale(loss).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
    """

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        # From pageable memory to the device, torch's copies are safe.
        return super()._unscale_grads_(
            optimizer, inv_scale.cpu(), found_inf.cpu(), allow_fp16
        )

    def step(
        self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> float | None:
        """See `torch.amp.GradScaler.step`.

        Raises:
            OptimizerError: If the optimizer has stepped parameters in backward already.
        """
        overlaps = getattr(optimizer, "overlaps", False)  # it raises if told of a scale
        if overlaps or not getattr(optimizer, _FUSED, False):
            return super().step(optimizer, *args, **kwargs)
        setattr(optimizer, _FUSED, False)
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            setattr(optimizer, _FUSED, True)
