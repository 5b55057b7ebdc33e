"""AdamW for parameters that lie on the host or the device, or move between them."""

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

from stagehand.core.device import find_device
from stagehand.errors import ConfigError, OptimizerError, StagehandWarning
from stagehand.optim.overlap import EarlySteps, GradientSource, find_source
from stagehand.optim.rounding import noise_seed
from stagehand.optim.states import MOMENTS, StateMemory, check_shapes
from stagehand.optim.update import ParameterStep, update
from stagehand.settings import check_value

__all__ = ["OffloadedAdamW"]

_STATE_DTYPES = (None, torch.float32, torch.bfloat16)
_NOT_OFFERED = ("foreach", "capturable", "differentiable")


class OffloadedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` that steps each parameter where it lies.

    The states lie beside their parameter and follow it: those of streamed weights are
    in host memory, those of what stays on the device are there. The arithmetic is
    torch's fused kernel, so parameters and states are those of
    `torch.optim.AdamW(fused=True)` bit for bit, and checkpoints of either load into the
    other. `foreach`, `capturable` and `differentiable` are not offered: host memory
    cannot be captured in a graph, and a fused step cannot be differentiated.

    Memory: two numbers of `state_dtype` for each number of the parameters, three with
    `amsgrad`.

    **Overlap.** With `overlap=model`, the streamed parameters are stepped while
    backward goes on, each block when its gradients have come home. `step()` then steps
    the rest, and must be called after every backward pass as always. The results are
    the same bits. A gradient must not change after backward, since the parameter has
    been stepped with it, nor may the parameter, nor the options of its group: `step()`
    raises where clipping, unscaling or another backward pass changed a gradient, where
    weights were edited and where a scheduler has set another `lr`; a second backward
    pass without a `step()` raises, and so do a `GradScaler` and a closure. Changes that
    move no version counter, through `.data`, are not seen; a forward between the two
    sees weights that were stepped. A weight that a graph uses twice, once without its
    gradient, may be stepped before that other use goes back, which then raises. If
    backward raises, the parameters that had been stepped keep that update: `step()`
    steps the others with what gradients they have, as plain AdamW would step all;
    `zero_grad()` gives the others up, and warns.

    Args:
        params: As in torch: parameters, named ones, or groups.
        lr: Learning rate; a number or a tensor of one element.
        betas: Decay of the averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay.
        amsgrad: Divide by the largest average of squares so far.
        maximize: Go up instead of down.
        state_dtype: Element type of the states. None takes each parameter's own, as
            torch does, which stalls for bfloat16 parameters in long runs: small changes
            of an average are rounded away. `torch.float32` keeps exact states for them.
            `torch.bfloat16` halves the states of float32 parameters and rounds
            stochastically, so that averages stay right on average; choose it when host
            memory is short. With either the arithmetic is float32, in pieces (see
            `stagehand.optim.update`), and parameters are rounded to nearest.
        pin_states: Page-lock the states that lie in host memory, each parameter's at
            their exact size, so that a device can copy them. The step itself gains
            nothing. Without an accelerator it is ordinary memory.
        seed: Seed of the stochastic rounding, which draws nothing from torch's
            generators. It is saved with the states.
        overlap: Step during backward: the model that `stagehand.layer()` returned, or
            another `GradientSource`. None steps in `step()` only.

    Raises:
        ConfigError: If `state_dtype` is another one, a parameter is not of a real
            floating-point type or is float64 while `state_dtype` is given, a group asks
            for what is not offered, or `overlap` is no streamed model.

    Example:
        >>> model = stagehand.layer(model, vram_budget="8GB", inference_mode=False)
        >>> optimizer = OffloadedAdamW(model.parameters(), lr=1e-5, overlap=model)
        >>> loss_of(model(batch)).backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
        pin_states: bool = False,
        seed: int = 0,
        overlap: GradientSource | nn.Module | None = None,
    ) -> None:
        if state_dtype not in _STATE_DTYPES:
            raise ConfigError(
                f"state_dtype is {state_dtype}, expected torch.float32, torch.bfloat16,"
                " or None for each parameter's own"
            )
        check_value("amsgrad", amsgrad, bool)
        check_value("maximize", maximize, bool)
        check_value("pin_states", pin_states, bool)
        check_value("seed", seed, int)
        check_value("eps", eps, float)
        check_value("weight_decay", weight_decay, float)
        if not isinstance(lr, torch.Tensor):
            check_value("lr", lr, float)
        source = None if overlap is None else find_source(overlap)
        self._settings = (state_dtype, pin_states, seed)
        self._prepare()
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            fused=True,
        )
        if source is not None:
            self._subscribe(source)

    def _prepare(self) -> None:
        state_dtype, pin_states, _ = self._settings
        device = find_device(None) if pin_states else None
        self._memory = StateMemory(state_dtype, device)
        self._rounds = state_dtype == torch.bfloat16
        # Held while parameters are stepped, in backward by another thread.
        self._lock = threading.Lock()
        self._early = EarlySteps()
        self._places: dict[torch.Tensor, tuple[int, int]] = {}
        self._subscription: weakref.finalize[[], Any] | None = None

    def _subscribe(self, source: GradientSource) -> None:
        unsubscribe = source.when_home(_weak_listener(self))
        self._subscription = weakref.finalize(self, unsubscribe)
        self._subscription.atexit = False

    def _number(self) -> None:
        """Note each parameter's group, and its place among all parameters."""
        numbered = [
            (index, parameter)
            for index, group in enumerate(self.param_groups)
            for parameter in group["params"]
        ]
        self._places = {
            parameter: (index, number)
            for number, (index, parameter) in enumerate(numbered)
        }

    def _name(self, parameter: torch.Tensor) -> str:
        index, number = self._places[parameter]
        names = self.param_groups[index].get("param_names")
        before = sum(len(group["params"]) for group in self.param_groups[:index])
        name = repr(names[number - before]) if names else str(number)
        return f"parameter {name} of shape {list(parameter.shape)}"

    @property
    def overlaps(self) -> bool:
        """Whether parameters are stepped during backward."""
        return self._subscription is not None and self._subscription.alive

    def close(self) -> None:
        """End the overlap: from now on `step()` steps all. Idempotent."""
        if self._subscription is not None:
            self._subscription()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch.

        Raises:
            ConfigError: If it asks for what is not offered, or a parameter has an
                element type that cannot be stepped.
        """
        for option in _NOT_OFFERED:
            if param_group.get(option):
                raise ConfigError(
                    f"a parameter group has {option}={param_group[option]!r}, which"
                    " OffloadedAdamW does not offer; leave it out"
                )
        if self._rounds:
            param_group.setdefault("rounding_seed", self._settings[2])
        super().add_param_group(param_group)
        self._number()
        try:
            for parameter in self.param_groups[-1]["params"]:
                self._check_dtype(parameter)
        except ConfigError:
            self.param_groups.pop()
            self._number()
            raise

    def _check_dtype(self, parameter: torch.Tensor) -> None:
        wanted = self._settings[0]
        if not parameter.is_floating_point():
            problem = "AdamW's fused kernel steps real floating-point numbers only"
        elif wanted is not None and parameter.dtype == torch.float64:
            problem = f"with state_dtype={wanted} the arithmetic is float32; pass None"
        else:
            return
        raise ConfigError(f"{self._name(parameter)} is {parameter.dtype}: {problem}")

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Step every parameter that has a gradient and was not stepped in backward.

        Args:
            closure: Evaluates the model again and returns the loss, which is returned.

        Raises:
            OptimizerError: If a gradient is sparse, or with overlap: for a closure or a
                `GradScaler`, or if a gradient is not the one that its parameter was
                stepped with. No parameter is stepped then.
        """
        if self.overlaps:
            self._check_plain(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._lock:
            self._number()  # groups can be edited
            self._early.check(self._name, self._current_options())
            self._update(
                parameter
                for parameter in self._places
                if parameter.grad is not None and parameter not in self._early
            )
            self._early.clear()
        return loss

    def _check_plain(self, closure: Callable[[], float] | None) -> None:
        if closure is not None:
            problem = "step() got a closure, which may run backward more than once"
        elif getattr(self, "found_inf", None) is not None:
            problem = "a GradScaler steps this optimizer, but gradients are scaled then"
        else:
            return
        raise OptimizerError(
            f"{problem}, and parameters were stepped with them in backward (overlap);"
            " make the optimizer with overlap=None"
        )

    @torch.no_grad()
    def _step_early(self, parameters: Sequence[nn.Parameter]) -> None:
        """Step those of some parameters that are ours, in the middle of backward."""
        with self._lock:
            mine = [
                parameter
                for parameter in parameters
                if parameter in self._places
                and parameter.device.type == "cpu"
                and parameter.grad is not None
            ]
            self._early.check_new(mine, self._name)
            self._update(mine)
            self._early.note(mine, self._current_options())

    def _update(self, parameters: Iterable[torch.Tensor]) -> None:
        by_group: dict[int, list[ParameterStep]] = {}
        for parameter in parameters:
            index, number = self._places[parameter]
            step = self._step_of(parameter, self.param_groups[index], number)
            by_group.setdefault(index, []).append(step)
        for index, steps in by_group.items():
            update(steps, self._options(self.param_groups[index]))

    def _step_of(
        self, parameter: torch.Tensor, group: dict[str, Any], number: int
    ) -> ParameterStep:
        gradient = parameter.grad
        if gradient is None or gradient.layout != torch.strided:
            found = None if gradient is None else gradient.layout
            raise OptimizerError(
                f"the gradient of {self._name(parameter)} is {found}, expected"
                " torch.strided; use torch.optim.SparseAdam, or a module that makes"
                " dense gradients (nn.Embedding(sparse=False))"
            )
        state = self._state_of(parameter, amsgrad=group["amsgrad"])
        names = MOMENTS if group["amsgrad"] else MOMENTS[:2]
        seed = None
        if self._rounds:
            seed = noise_seed(group["rounding_seed"], number, int(state["step"]))
        return ParameterStep(
            parameter=parameter,
            gradient=gradient.to(parameter.device),
            moments=tuple(state[name] for name in names),
            count=state["step"],
            noise_seed=seed,
        )

    def _state_of(self, parameter: torch.Tensor, *, amsgrad: bool) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            names = MOMENTS if amsgrad else MOMENTS[:2]
            step = torch.zeros((), device=parameter.device)
            # All or nothing: there may be no memory for the moments.
            state.update(step=step, **self._memory.new(parameter, names))
        self._memory.follow(parameter, state)
        return state

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        names = ("lr", "eps", "weight_decay", "amsgrad", "maximize")
        return {
            **{name: group[name] for name in names},
            "beta1": beta1,
            "beta2": beta2,
            # A GradScaler leaves both here for the time of a step.
            "grad_scale": getattr(self, "grad_scale", None),
            "found_inf": getattr(self, "found_inf", None),
        }

    def _current_options(self) -> Callable[[torch.Tensor], Mapping[str, float]]:
        """Return a function that gives a parameter's options, in numbers, as of now."""
        groups = [
            {k: float(v) for k, v in self._options(group).items() if v is not None}
            for group in self.param_groups
        ]
        return lambda parameter: groups[self._places[parameter][0]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or set them to zero, as in torch.

        After a backward pass that raised, this is the way to go on. With overlap, what
        had been stepped until then stays so; that is warned of.
        """
        with self._lock:
            self._warn_unfinished("zero_grad() gives up the rest")
            self._early.clear()
        super().zero_grad(set_to_none)

    def _warn_unfinished(self, what: str) -> None:
        if self._early:
            warnings.warn(
                f"{len(self._early)} of {len(self._places)} parameters were stepped in"
                f" backward and keep that update, but step() was not called: {what}",
                StagehandWarning,
                stacklevel=3,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the states and groups as `torch.optim.AdamW` does.

        With `state_dtype=torch.bfloat16` each group has a `rounding_seed` more. Between
        a backward pass with overlap and its `step()`, some parameters are a step ahead
        of others; that is warned of.
        """
        self._warn_unfinished("their states are saved a step ahead of the others'")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` of this class or of `torch.optim.AdamW` returned.

        States go beside their parameters, in this optimizer's `state_dtype`. Tensors
        that need neither moving nor converting nor pinning are taken over, not copied,
        as in torch: do not load one dictionary into two optimizers.

        Raises:
            ValueError: If the groups are others.
            ConfigError: If a state has another shape than its parameter.
        """
        saved: dict[Any, Any] = {}
        numbers: list[Any] = []

        def take(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            saved.update(loaded["state"])
            numbers.extend(n for g in loaded["param_groups"] for n in g["params"])
            for parameter, number in zip(self._places, numbers, strict=False):
                check_shapes(parameter, saved.get(number, {}))
            return {**loaded, "state": {}}  # torch would cast it to the parameters'

        def place(_: torch.optim.Optimizer) -> None:
            self._memory.clear()
            for parameter, number in zip(self._places, numbers, strict=True):
                if number in saved:
                    state = saved.pop(number)
                    self.state[parameter] = self._memory.adopt(parameter, state)
            self.state.update(saved)  # what belongs to no parameter

        taking = self.register_load_state_dict_pre_hook(take)
        placing = self.register_load_state_dict_post_hook(place, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            taking.remove()
            placing.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_settings": self._settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Of a copy, which does not overlap, and of every load_state_dict().
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "_memory" not in self.__dict__:
            self._prepare()
        for group in self.param_groups:
            group.update(dict.fromkeys(_NOT_OFFERED, False), foreach=None, fused=True)
            if self._rounds:
                group.setdefault("rounding_seed", self._settings[2])
        self._early.clear()
        self._number()


def _weak_listener(
    optimizer: OffloadedAdamW,
) -> Callable[[Sequence[nn.Parameter]], None]:
    """Return a listener that does nothing once its optimizer is gone."""
    method = weakref.WeakMethod(optimizer._step_early)

    def listen(parameters: Sequence[nn.Parameter]) -> None:
        step = method()
        if step is not None:
            step(parameters)

    return listen
