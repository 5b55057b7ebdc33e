"""What `DistributedDataParallel` would miss of a streamed model."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch.autograd.graph import get_gradient_edge

from stagehand.errors import ConfigError
from stagehand.names import listing
from stagehand.torch_private import running_data_parallel, tensor_use_count

if TYPE_CHECKING:
    from collections.abc import Collection, Container

    from torch import nn
    from torch.autograd.graph import Node
    from torch.nn.parallel import DistributedDataParallel

    _Look = tuple[tuple[int, int] | None, dict[str, Node | None]]
    """What a look depends on, and the nodes that it has found; None for lost ones."""

__all__ = ["Averaging"]


class Averaging:
    """Refuses passes after which a gradient would not be averaged over processes.

    `DistributedDataParallel` hooks the `AccumulateGrad` nodes that parameters have when
    it is made. A parameter that changes its device gets another one: its gradient would
    stay as each process has it, in silence, and the models would part.
    """

    def __init__(self) -> None:
        # Nodes keep their parameters: they are kept as long as their wrapper is.
        self._known: WeakKeyDictionary[DistributedDataParallel, _Look]
        self._known = WeakKeyDictionary()

    def check(self, streamed: Collection[int], leaves: int) -> None:
        """Look through what trains, where that may have changed since the last look.

        Args:
            streamed: Has the ids of parameters whose gradients go to the host.
            leaves: How often what stays on the device may have left it.

        Raises:
            ConfigError: If gradients of some would not be averaged.
        """
        wrapper = running_data_parallel()
        if wrapper is None or wrapper.process_group.size() == 1:
            return
        looked = len(streamed), leaves
        latest, known = self._known.get(wrapper, (None, {}))
        if looked == latest:
            return
        nodes: dict[str, Node | None] = {}
        for name, parameter in _averaged(wrapper, streamed).items():
            users = tensor_use_count(parameter)
            node = get_gradient_edge(parameter).node
            was_there = tensor_use_count(parameter) == users  # or nobody has hooked it
            is_same = was_there and known.get(name, node) is node
            nodes[name] = node if is_same else None
        lost = [name for name, node in nodes.items() if node is None]
        self._known[wrapper] = None if lost else looked, nodes
        if lost:
            raise ConfigError(
                f"{listing([*map(repr, lost)], 3)} left the device after"
                " DistributedDataParallel had wrapped the model, in layer(), park(),"
                " to() or for a copy or another model, or were frozen then: PyTorch has"
                " no hooks there by which it would average gradients; wrap the model"
                " again"
            )


def _averaged(
    wrapper: DistributedDataParallel, streamed: Container[int]
) -> dict[str, nn.Parameter]:
    """Return all that a wrapper averages, by name."""
    trained = {
        name: parameter
        for name, parameter in wrapper.module.named_parameters(remove_duplicate=False)
        if parameter.requires_grad and name not in wrapper.parameters_to_ignore
    }
    missed = [name for name, each in trained.items() if id(each) in streamed]
    if missed:
        raise ConfigError(
            "DistributedDataParallel does not average gradients of"
            f" {listing([*map(repr, missed)], 3)}, which stream and train on the host:"
            " give their names, too, to"
            " DistributedDataParallel._set_params_and_buffers_to_ignore_for_model()"
            " before it wraps the model, and average them after backward, as"
            " docs/training.md says under 'Several devices'; or give a budget of which"
            " adapters take less than a sixteenth, so that they stay on the device"
        )
    return trained
