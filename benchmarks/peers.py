"""What a block costs the host under other libraries that keep weights elsewhere.

Each gets the same stack of tiny blocks, with the CPU as the place to compute, so that
nobody copies a byte and what is left is each library's own work. A library that is not
installed, or that wants a GPU, is left out and named. Few train weights that are
elsewhere: most of them only run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.depths import by_parts
from benchmarks.models import (
    LOOKAHEAD,
    Stack,
    make_runtime,
    make_stack,
    streamed_blocks,
)
from benchmarks.results import Result
from benchmarks.timing import Times, in_turns
from benchmarks.training import make_training_runtime, step_of

if TYPE_CHECKING:
    from stagehand.runtime import Runtime

__all__ = ["PEERS", "TRAINERS", "measure"]

_CPU = torch.device("cpu")
_LAYERS = 2  # of each block
_PART = 1_000  # blocks that are timed as one, of deeper models
_OURS = "stagehand"
_HOOKS = "hooks that do nothing"
_SETTLING = {_OURS: 6}  # passes until a plan is made for good; others make none

Prepare = Callable[[Stack], Callable[[], object]]
"""Lets a stack's weights be elsewhere; returns what ends that."""

Step = Callable[[], object]
Make = Callable[[Stack], tuple[Step, Step]]
"""Makes a step of a stack, and what ends it all."""


def _stagehand(
    model: Stack, make: Callable[[Stack], Runtime] = make_runtime
) -> Callable[[], object]:
    """A third of the blocks stays, the rest is streamed."""
    runtime = make(model)
    sizes = [block.nbytes for block in streamed_blocks(runtime)]
    runtime.set_budget(max((LOOKAHEAD + 1) * max(sizes), sum(sizes) // 3))
    return runtime.shutdown


def _accelerate(model: Stack) -> Callable[[], object]:
    from accelerate import cpu_offload

    cpu_offload(model, execution_device=_CPU)
    return _nothing


def _diffusers(model: Stack) -> Callable[[], object]:
    from diffusers.hooks import apply_group_offloading

    apply_group_offloading(
        model,
        onload_device=_CPU,
        offload_device=_CPU,
        offload_type="block_level",
        num_blocks_per_group=1,
    )
    return _nothing


def _ramtorch(model: Stack) -> Callable[[], object]:
    """What it does in a thread of its own does not count."""
    from ramtorch import OffloadModel

    streamed = OffloadModel(list(model.blocks), device="cpu", window=2)
    model.forward = streamed.forward  # type: ignore[method-assign]
    end: Callable[[], object] = streamed.close
    return end


def _mmgp(_: Stack) -> Callable[[], object]:
    """Not even imported: it changes what others in this process use."""
    raise RuntimeError("it computes nowhere else")


def _fsdp(model: Stack) -> Callable[[], object]:
    """Each block a group of its own, in a process group of one."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh, policy = init_device_mesh("cpu", (1,)), CPUOffloadPolicy(pin_memory=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return distributed.destroy_process_group


def _naive(model: Stack) -> Callable[[], object]:
    """Each block to where it computes and back, pageable, as one does by hand.

    Both are the CPU, so a move walks the block's parameters and finds nothing to copy:
    what it allocates, copies and waits for on a device comes on top.
    """
    for block in model.blocks:
        block.register_forward_pre_hook(_move)
        block.register_forward_hook(_move)
    return _nothing


def _move(block: nn.Module, *_: Any) -> None:
    block.to(_CPU)


def _hooks_alone(model: Stack) -> Callable[[], object]:
    """Hooks on every block that do nothing: what PyTorch itself takes for them."""
    for block in model.blocks:
        block.register_forward_pre_hook(_nothing, with_kwargs=True)
        block.register_forward_hook(_nothing, always_call=True)
    return _nothing


def _nothing(*_: Any) -> None:
    """Stand for a hook, or for an end that needs nothing."""


PEERS: dict[str, tuple[str, Prepare]] = {
    _HOOKS: ("torch", _hooks_alone),
    _OURS: ("stagehand", _stagehand),
    "diffusers group offloading": ("diffusers", _diffusers),
    "accelerate cpu_offload": ("accelerate", _accelerate),
    "FSDP2 CPU offload": ("torch", _fsdp),
    "naive moves": ("torch", _naive),
    "RamTorch": ("ramtorch", _ramtorch),
    "mmgp": ("mmgp", _mmgp),
}
"""How each is prepared, and the package that it needs, by the name it is printed as."""


def _prepared(prepare: Prepare, run_of: Callable[[Stack], Step]) -> Make:
    """Return what makes the same step as the bare model's."""

    def make(model: Stack) -> tuple[Step, Step]:
        end = prepare(model)
        return run_of(model), end

    return make


def _ramtorch_trains(model: Stack) -> tuple[Step, Step]:
    """In a step of its own; it keeps activations, which is faster than recomputing."""
    from ramtorch import OffloadModel

    streamed = OffloadModel(
        list(model.blocks), device="cpu", window=2, keep_activations=True
    )
    x, ones = torch.zeros(1, 16), torch.ones(1, 16)
    parameters = list(model.parameters())

    def step() -> None:
        streamed.step(x, grad_outputs=ones)
        streamed.flush_grads()
        for parameter in parameters:
            parameter.grad = None

    return step, streamed.close


TRAINERS: dict[str, tuple[str, Make]] = {
    _OURS: (
        "stagehand",
        _prepared(partial(_stagehand, make=make_training_runtime), step_of),
    ),
    "FSDP2 CPU offload": ("torch", _prepared(_fsdp, step_of)),
    "RamTorch": ("ramtorch", _ramtorch_trains),
}
"""Those that train weights, all of them: the package, and what makes a step."""


def measure(
    depths: tuple[int, ...] = (10, 100, 1_000, 10_000),
    *,
    trained: tuple[int, ...] = (100, 1_000),
    blocks_timed: int = 5_000,
) -> Iterator[Result]:
    """Yield each library's overhead over the bare modules, and ours over the best.

    Args:
        depths: Blocks of each model that runs.
        trained: Blocks of each model whose weights are all trained.
        blocks_timed: How many uses of blocks to time for each figure.
    """
    runners = {
        name: (package, _prepared(prepare, _pass))
        for name, (package, prepare) in PEERS.items()
    }
    for depth in depths:
        bare = make_stack(depth, _LAYERS)
        yield from _compared("overhead", runners, bare, _pass(bare), blocks_timed)
    for depth in trained:
        bare, what = make_stack(depth, _LAYERS), "training overhead"
        yield from _compared(what, TRAINERS, bare, step_of(bare), blocks_timed)


def _compared(
    what: str,
    ways: Mapping[str, tuple[str, Make]],
    bare: Stack,
    bare_step: Step,
    blocks_timed: int,
) -> Iterator[Result]:
    """Yield what each way takes over the bare step, and ours over the best other's."""
    found: dict[str, Times] = {}
    blocks = f"{len(bare.blocks):,} blocks"
    for name, (package, make) in ways.items():
        times = _overhead(name, package, make, bare, bare_step, blocks_timed)
        if isinstance(times, str):
            yield _left_out(f"{what}, {name}, {blocks}: left out, {times}")
            continue
        found[name] = times
        yield Result.of(f"{what} a block, {name}, {blocks}", times, "us", scale=1e6)
    best = min(
        (times for name, times in found.items() if name not in (_OURS, _HOOKS)),
        key=lambda times: times.smallest,
        default=None,
    )
    if best is not None:
        ratio = found[_OURS].part_of(best)
        name = f"{what} over the best other library's, {blocks}"
        yield Result.of(name, ratio, "x", target=1.0)


def _overhead(
    name: str,
    package: str,
    make: Make,
    bare: Stack,
    bare_step: Step,
    blocks_timed: int,
) -> Times | str:
    if importlib.util.find_spec(package) is None:
        return "it is not installed"
    depth = len(bare.blocks)
    model, end = make_stack(depth, _LAYERS), _nothing
    try:
        step, end = make(model)
        timed = {
            which: partial(by_parts, stack, run, _PART)
            for which, stack, run in (
                ("bare", bare, bare_step),
                ("other", model, step),
            )
        }
        for _ in range(_SETTLING.get(name, 0)):
            timed["other"]()
        times = in_turns(timed, rounds=max(2, blocks_timed // depth))
    except (RuntimeError, AssertionError, ValueError, OSError) as error:
        return f"it fails without a GPU ({str(error).splitlines()[0]})"
    finally:
        end()
    return times["other"].over(times["bare"], depth)


def _pass(model: nn.Module) -> Callable[[], object]:
    x = torch.zeros(1, 16)

    @torch.no_grad()  # FSDP2 cannot run in inference mode
    def run() -> object:
        return model(x)

    return run


def _left_out(name: str) -> Result:
    return Result(name=name, value=0.0, median=0.0, unit="")
