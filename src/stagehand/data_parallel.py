"""What `DistributedDataParallel` would miss of a streamed model."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

from torch.autograd.graph import get_gradient_edge

from stagehand.errors import ConfigError
from stagehand.torch_private import running_data_parallel

if TYPE_CHECKING:
    from collections.abc import Collection, Container

    from torch.autograd.graph import Node
    from torch.nn.parallel import DistributedDataParallel

__all__ = ["Averaging"]


class Averaging:
    """Refuses passes after which a gradient would not be averaged over processes.

    `DistributedDataParallel` hooks the `AccumulateGrad` nodes that parameters have when
    it is made. A parameter that changes its device gets another one: its gradient would
    stay as each process has it, in silence, and the models would part.
    """

    def __init__(self) -> None:
        self._wrapper: ref[DistributedDataParallel] | None = None
        self._looked = (0, 0)
        self._nodes: dict[str, Node] = {}

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
        if self._wrapper is None or self._wrapper() is not wrapper:
            self._nodes = {}
        elif looked == self._looked:
            return
        nodes = _averaged(wrapper, streamed)
        lost = [n for n, node in nodes.items() if self._nodes.get(n, node) is not node]
        if lost:
            raise ConfigError(
                f"{_some(lost)} left the device after DistributedDataParallel had"
                " wrapped the model, in park() or to(), or for another model: PyTorch"
                " has dropped the hooks by which it averages gradients; wrap the model"
                " again"
            )
        self._wrapper, self._looked, self._nodes = ref(wrapper), looked, nodes


def _averaged(
    wrapper: DistributedDataParallel, streamed: Container[int]
) -> dict[str, Node]:
    """Return the nodes of all that a wrapper averages, by name."""
    trained = {
        name: parameter
        for name, parameter in wrapper.module.named_parameters(remove_duplicate=False)
        if parameter.requires_grad and name not in wrapper.parameters_to_ignore
    }
    missed = [name for name, each in trained.items() if id(each) in streamed]
    if missed:
        raise ConfigError(
            f"DistributedDataParallel does not average gradients of {_some(missed)},"
            " which stream and train on the host: give their names, too, to"
            " DistributedDataParallel._set_params_and_buffers_to_ignore_for_model()"
            " before it wraps the model, and average them after backward, as"
            " docs/training.md says under 'Several devices'; or give a budget of which"
            " adapters take less than a sixteenth, so that they stay on the device"
        )
    return {name: get_gradient_edge(each).node for name, each in trained.items()}


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more
