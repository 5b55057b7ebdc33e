"""Every part says what it is, whatever it is doing: who debugs prints all of them."""

import dataclasses
import gc

import stagehand
from scenario.small import LAYER_BYTES, batch, stack

SEEN_AT_LEAST = {
    *("Additions", "Budget", "LinkSlots", "Order", "Recorder", "Scheduler", "Seats"),
    *("SharedDevice", "SlabPool", "Steering", "Strays", "Tenancy"),
}


def parts() -> list[object]:
    """What is alive of the library's classes that have words of their own."""
    return [
        found
        for found in gc.get_objects()
        if str(type(found).__module__).startswith("stagehand.")
        and "__repr__" in vars(type(found))
        and not dataclasses.is_dataclass(found)
    ]


def test_every_part_of_a_training_run_says_what_it_is(sim):
    said: set[str] = set()

    def look(*_: object) -> None:
        for part in parts():
            assert repr(part), type(part)
            said.add(type(part).__name__)

    gc.collect()  # what other tests have left half made
    conductor = stagehand.ConductorRuntime()
    saved = stagehand.activations(budget=4096)
    models = [
        stagehand.layer(stack(), vram_budget=3 * LAYER_BYTES, trace=True)
        for _ in range(2)
    ]
    for model in models:
        conductor.attach(model)
        model[2].register_forward_hook(look)
        model[2].register_full_backward_hook(look)
        with saved:
            loss = model(batch()).square().mean()
        loss.backward()
        look()
    for model in models:
        model._stagehand_layer_runtime.shutdown()
    conductor.shutdown()
    look()
    assert said >= SEEN_AT_LEAST
