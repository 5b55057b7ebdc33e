"""Everything asked of the ears for optimizers' steps."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stagehand.core.steps import Steps, _heard, hear_steps


def step():
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight], lr=0.1).step()


class Listener:
    def __init__(self):
        self.told = 0

    def tell(self, _):
        self.told += 1


def test_who_has_ended_is_not_told():
    listener, stays = Listener(), Listener()
    end, end_other = hear_steps(listener.tell), hear_steps(stays.tell)
    step()
    end()
    end()
    step()
    end_other()
    step()
    assert (listener.told, stays.told) == (1, 2)


def test_who_is_dropped_is_not_kept():
    gc.collect()  # what other tests have dropped
    before, listener = len(_heard), Listener()
    hear_steps(listener.tell)
    assert len(_heard) == before + 1
    gone = weakref.ref(listener)
    del listener
    gc.collect()
    assert gone() is None
    assert len(_heard) == before


class Traced(torch.optim.Optimizer):
    """The compiler takes its steps as one graph, hooks included. Those of torch's own
    break their graph, and around that torch 2.15 calls the hooks outside of any."""

    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data.sub_(weight.grad)


@pytest.mark.parametrize("compiled", [True, False])
def test_compiled_steps_are_told_to_who_asks_for_them(compiled):
    listener = Listener()
    end = hear_steps(listener.tell, compiled=compiled)
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = Traced([weight], {})
    torch.compiler.reset()
    step = torch.compile(optimizer.step, backend="eager", fullgraph=not compiled)
    step()
    step()
    end()
    assert listener.told == (2 if compiled else 0)


def in_a_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(timeout=120)


@pytest.mark.parametrize("who", ["an own hook", "a listener"])
def test_others_come_and_go_in_the_middle_of_a_step(who):
    """Where each had a hook of torch's, that raised in the thread that steps."""
    kept = []

    def come_and_go(*_):
        hear_steps(Listener().tell)
        kept.append(Steps(lambda: None))

    class Busy(Listener):
        def tell(self, _):
            in_a_thread(come_and_go)

    first, busy = Steps(lambda: None), Busy()
    if who == "a listener":
        end = hear_steps(busy.tell)
    else:
        end = register_optimizer_step_pre_hook(lambda *_: busy.tell(None)).remove
    try:
        step()
        step()
    finally:
        end()
    assert first.came()
    assert kept[0].came()
    assert len(kept) == 2
