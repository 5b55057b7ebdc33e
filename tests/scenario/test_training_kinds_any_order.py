"""Whatever a script of training does with models of odd parts is done streamed."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from test_training_any_order import AnyOrder, Turning
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from exploring import running
from training import WIDTH, Net, Residual, built

# Where a module that reads weights of others has no room for all of them.
pytestmark = pytest.mark.filterwarnings("ignore:.* are read by modules that do not")


@dataclass
class Told:
    """What a block returns, and what it tells of it."""

    tensors: list[torch.Tensor]


class Dicts(Residual):
    """Returns a dict."""

    def forward(self, x):
        hidden = super().forward(x)
        return {"told": [hidden, hidden.square().mean()]}


class Objects(Residual):
    """Returns an object, of whose tensors one is not made here."""

    def forward(self, x):
        return Told([super().forward(x), x])


class Telling(Turning):
    """Reads what its blocks return, in turns a dict and an object."""

    def __init__(self):
        super().__init__()
        made = (Objects() if each % 2 else Dicts() for each in range(5))
        self.blocks = nn.ModuleList(made)

    def around(self, block, x):
        told = block(x)
        hidden, size = told["told"] if isinstance(told, dict) else told.tensors
        return hidden * (1 + size)


class Sliced(Residual):
    """Reads its weights in slices, and as views of views."""

    def __init__(self):
        super().__init__()
        self.all = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 4)
        self.scales = nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x):
        first, second, third = self.all
        hidden = torch.tanh(x @ first + self.norm(x) @ second.t()) @ third[:, ::2]
        scale, shift = self.scales.unbind()
        return super().forward(x) * scale + hidden.repeat(1, 2) * shift


class Table(nn.Module):
    """Looks rows of a table up by its input."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(96, WIDTH, padding_idx=3)

    def forward(self, x):
        rows = (x.detach() * 20).long() % 96
        return self.table(rows).mean(1) + x


class Folded(Residual):
    """Convolves."""

    def __init__(self):
        super().__init__()
        self.fold = nn.Conv1d(4, 12, 3, padding=1)
        self.scale = nn.GroupNorm(3, 12)

    def forward(self, x):
        folded = self.scale(self.fold(x.float().unflatten(-1, (4, -1))))
        return super().forward(x) + folded.unflatten(1, (3, 4)).mean(1).flatten(1)


class LowRank(nn.Module):
    """Adds a product of two small matrices to a weight."""

    def __init__(self, rows, columns):
        super().__init__()
        self.left = nn.Parameter(torch.randn(rows, 2) / 8)
        self.right = nn.Parameter(torch.randn(2, columns) / 8)

    def forward(self, weight):
        return weight + self.left @ self.right


class Routed(Residual):
    """Has experts, of which each input is given to one."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        chosen = (x.detach().abs().sum(1) * 3).long() % 4
        given = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = chosen == number
            found = self.experts[number](x[rows]).to(x.dtype)
            given = given.masked_scatter(rows[:, None], found)
        return super().forward(x) + given


class Typed(Residual):
    """Computes in another type."""

    def __init__(self, dtype):
        super().__init__()
        self.to(dtype)
        self.dtype = dtype

    def forward(self, x):
        return super().forward(x.to(self.dtype)).to(x.dtype)


class Complex(Residual):
    """Multiplies by complex numbers."""

    def __init__(self):
        super().__init__()
        turns = torch.randn(WIDTH // 2, WIDTH // 2, dtype=torch.complex64)
        self.turns = nn.Parameter(turns / 3)

    def forward(self, x):
        turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) @ self.turns
        return super().forward(x) + torch.view_as_real(turned).flatten(-2)


class Gated(Residual):
    """Reads weights of a part of it that it never calls."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        gate = nn.functional.linear(x, self.gate.weight, self.gate.bias)
        return super().forward(x) * gate.sigmoid()


def of(make):
    """A model of such blocks."""

    @built
    def build():
        model = Net()
        model.blocks = nn.ModuleList(make() for _ in range(5))
        return model

    return build


def parametrized(kind):
    """A model whose blocks make a weight of other tensors."""

    def make():
        block = Residual()
        kind(block.up)
        return block

    return of(make)


@built
def looking_up():
    model = Net()
    model.entry = Table()
    return model


@built
def sharing():
    """A block that comes twice, and one whose layer is another's, too."""
    model = Net()
    model.blocks[3] = model.blocks[0]
    model.blocks[4].up = model.blocks[1].up
    return model


@built
def mixing():
    """Two blocks are in other types."""
    model = Net()
    model.blocks[1] = Typed(torch.float64)
    model.blocks[2] = Typed(torch.bfloat16)
    return model


PARAMETRIZED = {
    "weight norm": parametrized(weight_norm),
    "spectral norm": parametrized(spectral_norm),
    "orthogonal": parametrized(orthogonal),
    "low rank": parametrized(
        lambda up: parametrize.register_parametrization(
            up, "weight", LowRank(*up.weight.shape)
        )
    ),
}
KINDS = {
    **PARAMETRIZED,
    "telling": built(Telling),
    "slicing": of(Sliced),
    "looking up": looking_up,
    "folding": of(Folded),
    "routing": of(Routed),
    "mixing": mixing,
    "complex": of(Complex),
    "gated": of(Gated),
    "sharing": sharing,
}


class AnyOrderKinds(AnyOrder):
    """The same script, with models that are no plain stacks."""

    makers: ClassVar = KINDS
    several = ("sharing", "telling")
    reading = ("gated",)

    def can_be_pickled(self):
        return self.kind not in PARAMETRIZED  # PyTorch refuses


AnyOrderKinds.TestCase.settings = running(9, 25)
TestAnyOrderKinds = AnyOrderKinds.TestCase
