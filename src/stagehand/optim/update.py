"""One step of AdamW over parameters, gradients and states, wherever they lie.

The arithmetic is torch's own fused kernel. It trusts its caller: all tensors of a
parameter must have one element type and one order of elements in memory, or it reads
the wrong ones, and it moves no version counter. Both are seen to here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw

from stagehand.optim.rounding import draw_noise, renew_noise, round_stochastically

__all__ = ["CHUNK_ELEMENTS", "ParameterStep", "update"]

CHUNK_ELEMENTS = 1 << 18
"""How much of a parameter is converted at once. A multiple of the kernel's vectors, so
that where chunks end changes no bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterStep:
    """What the step of one parameter reads and writes; all on its device."""

    parameter: torch.Tensor
    """Is changed in place."""
    gradient: torch.Tensor
    """Dense, of the parameter's shape."""
    moments: tuple[torch.Tensor, ...]
    """exp_avg, exp_avg_sq and, for amsgrad, max_exp_avg_sq: of one element type, dense,
    their elements in one order in memory."""
    count: torch.Tensor
    """Steps taken: float32, on the device of the rest."""
    noise_seed: int | None = None
    """Seeds the stochastic rounding of bfloat16 moments; None rounds to nearest."""

    @property
    def in_one_piece(self) -> bool:
        """Whether the kernel can work on the tensors as they are."""
        dtypes = {tensor.dtype for tensor in (self.gradient, *self.moments)}
        return self.noise_seed is None and dtypes == {self.parameter.dtype}


def update(steps: Sequence[ParameterStep], options: dict[str, Any]) -> None:
    """Step parameters in place.

    Memory: for parameters whose moments have another element type, or are rounded
    stochastically, at most eight pieces of `CHUNK_ELEMENTS` 4-byte numbers (8 MiB) on
    one device at a time. A tensor whose elements lie in another order than the moments'
    costs a copy.

    Args:
        steps: What to step; parameters may be on different devices.
        options: Those of `torch.optim.adamw.adamw`; tensors may be on any device.
    """
    by_device: dict[torch.device, list[ParameterStep]] = {}
    for step in steps:
        by_device.setdefault(step.parameter.device, []).append(step)
    for device, mine in by_device.items():
        local = {name: _at(device, name, value) for name, value in options.items()}
        _step_whole([step for step in mine if step.in_one_piece], local)
        _step_in_chunks([step for step in mine if not step.in_one_piece], local)
    increment_version([step.parameter for step in steps])


def _at(device: torch.device, name: str, value: Any) -> Any:
    """Return an option on a device, with its value there.

    Torch itself moves it without waiting: a kernel on the host may read it too early.
    Kernels of all devices take a learning rate from the host as a number.
    """
    stays = name == "lr" and isinstance(value, torch.Tensor) and value.is_cpu
    return value.to(device) if isinstance(value, torch.Tensor) and not stays else value


def _step_whole(steps: Sequence[ParameterStep], options: dict[str, Any]) -> None:
    if not steps:
        return
    parameters = [_in_order_of(s.moments[0], s.parameter) for s in steps]
    gradients = [_in_order_of(s.moments[0], s.gradient) for s in steps]
    moments = [s.moments for s in steps]
    _run(parameters, gradients, moments, [s.count for s in steps], options)
    for step, parameter in zip(steps, parameters, strict=True):
        if parameter is not step.parameter:
            step.parameter.copy_(parameter)


def _step_in_chunks(steps: Sequence[ParameterStep], options: dict[str, Any]) -> None:
    scratch = _Scratch()
    for step in steps:
        parameter = _in_order_of(step.moments[0], step.parameter)
        gradient = _in_order_of(step.moments[0], step.gradient)
        tensors = [_flat(t) for t in (parameter, gradient, *step.moments)]
        if step.noise_seed is not None:
            scratch.make_noise(tensors[0][:CHUNK_ELEMENTS], step.noise_seed)
        before = step.count.clone()
        for start in range(0, max(1, parameter.numel()), CHUNK_ELEMENTS):
            step.count.copy_(before)
            pieces = [t[start : start + CHUNK_ELEMENTS] for t in tensors]
            _step_chunk(pieces, step, scratch, options)
        if parameter is not step.parameter:
            step.parameter.copy_(parameter)


def _step_chunk(
    pieces: Sequence[torch.Tensor],
    step: ParameterStep,
    scratch: "_Scratch",
    options: dict[str, Any],
) -> None:
    parameter, gradient, *moments = [
        piece if piece.dtype == torch.float32 else scratch.floats(index, piece)
        for index, piece in enumerate(pieces)
    ]
    _run([parameter], [gradient], [moments], [step.count], options)
    if parameter is not pieces[0]:
        pieces[0].copy_(parameter)
    for index, (piece, moment) in enumerate(zip(pieces[2:], moments, strict=True)):
        if step.noise_seed is not None:
            # A maximum is rounded with the noise of what it is the maximum of.
            scratch.round(piece, moment, high=index > 0)
        elif moment is not piece:
            piece.copy_(moment)
    if step.noise_seed is not None:
        scratch.renew_noise()


class _Scratch:
    """Memory for the chunk that is being stepped, made once for all of them."""

    def __init__(self) -> None:
        self._made: dict[str, torch.Tensor] = {}
        self._noise = torch.empty(0, dtype=torch.int32, device="cpu")

    def floats(self, index: int, piece: torch.Tensor) -> torch.Tensor:
        """Return a piece of a parameter's tensor of this index as float32."""
        return self._take(f"float {index}", piece, torch.float32).copy_(piece)

    def make_noise(self, like: torch.Tensor, seed: int) -> None:
        """Draw 32 bits for each element: on the host, so that places do not matter."""
        drawn = draw_noise(like.numel(), torch.Generator().manual_seed(seed))
        self._noise = self._take("noise", like, torch.int32).copy_(drawn)

    def renew_noise(self) -> None:
        """Make other noise for the next chunk, which is as large or smaller."""
        renew_noise(self._noise, self._take("spare", self._noise, torch.int32))

    def round(self, target: torch.Tensor, value: torch.Tensor, *, high: bool) -> None:
        """Round a chunk of moments with the noise that there is."""
        spare = self._take("spare", value, torch.int32)
        noise = self._noise[: value.numel()]
        round_stochastically(target, value, noise, spare, high=high)

    def _take(self, name: str, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        size = like.numel()
        made = self._made.get(name)
        if made is None or made.numel() < size:
            made = self._made[name] = torch.empty(size, dtype=dtype, device=like.device)
        return made[:size]


def _run(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    moments: Sequence[Sequence[torch.Tensor]],
    counts: list[torch.Tensor],
    options: dict[str, Any],
) -> None:
    """Run torch's kernel, which groups the tensors by element type."""
    firsts, seconds, *rest = (list(column) for column in zip(*moments, strict=True))
    maxima = rest[0] if rest else []
    adamw(parameters, gradients, firsts, seconds, maxima, counts, fused=True, **options)


def _in_order_of(moment: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or its copy, whose elements lie in memory as the moment's do."""
    if tensor.stride() == moment.stride() or (
        tensor.is_contiguous() and moment.is_contiguous()
    ):
        return tensor
    return torch.empty_like(moment, dtype=tensor.dtype).copy_(tensor)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor without gaps in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
