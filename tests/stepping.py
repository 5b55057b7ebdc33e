"""Parameters, gradients and comparisons for tests of optimizers."""

import torch

from stagehand.core.layout import same_bits

SHAPES = [(33, 7), (130,), (), (0, 3), (5, 1, 4)]


def parameters(dtype=torch.float32, shapes=SHAPES, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype).to(device))
        for shape in shapes
    ]


def give_gradients(params, step, scale=1.0):
    """Give each parameter a gradient that depends on the step and its place only."""
    for index, parameter in enumerate(params):
        generator = torch.Generator().manual_seed(1000 * step + index)
        gradient = torch.randn(parameter.shape, generator=generator) * scale
        parameter.grad = gradient.to(parameter.dtype).to(parameter.device)


def train(optimizer, params, steps):
    for step in steps:
        give_gradients(params, step)
        optimizer.step()
        optimizer.zero_grad()


def states_of(optimizer):
    states = optimizer.state_dict()["state"]  # in the order of their first steps
    return [
        {name: value.cpu() for name, value in states[number].items()}
        for number in sorted(states)
    ]


def assert_same(one, other):
    """Compare two pairs of parameters and optimizer, bit for bit."""
    for mine, theirs in zip(one[0], other[0], strict=True):
        assert mine.dtype == theirs.dtype
        assert same_bits(mine.cpu(), theirs.cpu())
    for mine, theirs in zip(states_of(one[1]), states_of(other[1]), strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert mine[name].dtype == theirs[name].dtype
            assert same_bits(mine[name], theirs[name]), name


def step_in_backward(make, groups):
    """Make an optimizer of each group, which steps in the hook of the last of its
    weights that train to get a gradient; return the hooks' handles."""
    handles = []
    for parameters in groups:
        group = [p for p in parameters if p.requires_grad]
        if not group:
            continue
        optimizer, left = make(group), set(group)

        def step(parameter, optimizer=optimizer, left=left, group=group):
            left.discard(parameter)
            if not left:
                optimizer.step()
                optimizer.zero_grad()
                left.update(group)

        handles += [p.register_post_accumulate_grad_hook(step) for p in group]
    return handles
