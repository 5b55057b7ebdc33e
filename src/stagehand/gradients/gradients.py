"""Gradients of streamed weights come home while backward goes on.

Between passes a streamed parameter is on the host, and so is its gradient. In backward
it is on the device, where autograd makes the gradient and would add it to what
`param.grad` holds. So two hooks on each trained parameter stand around that addition:
the one before takes an earlier gradient out of its way, the one after queues the new
one's copy to pinned memory and takes it off the device. What came before is added on
the host, by a worker thread, behind the copy. When backward is over, `param.grad` is
the sum, beside the parameter.

The same additions in the same order give the same bits on host and device: one addition
of two values of one element type is rounded alike everywhere.

Note [One by one]: the order of additions counts. If one graph uses a weight several
times, autograd adds up the uses' gradients, its *terms*, one by one as it reaches them;
then it adds the sum to `param.grad`. Streaming cuts this sum into *parts*: whenever the
weight's block comes to the device anew (`Block.bindings`), autograd makes a new
`AccumulateGrad` node for the weight, and each node sums only its own uses' terms. So:

- A part of a single term is added to the sum so far at home, on the host.
- Of a part of several terms, the first is given the sum so far (`_fed`), and autograd
  adds the others to that, one by one.
- What `param.grad` held before backward has to be added last. It is kept apart
  (`Home.earlier`) as long as more parts may come: as long as there are nodes of the
  weight that have not run, or may run again.
- A term may come when the block has left. If it does not lie as its weight does,
  autograd would put a copy of it beside the weight, on the host, so it is laid out
  before (`Home.laid_out`).
- What always stays on the device has no home: if it leaves between two forwards to one
  backward, as in `park()`, each of its nodes adds its sum to what is there.
- Users' hooks behind the addition are called once for a sum. Of a part that is not the
  last one of its call of autograd they are hidden; at the last, the sum so far is on
  the device again (`_reunite`). Which part is the last is known by the graphs' nodes
  (`Uses`), which are looked for where a weight has such hooks as a forward begins.

Memory: as many bytes of pinned memory as the trained streamed parameters have, for
their gradients; while they accumulate, those of two blocks more. Where copies home
yield to loads, those of all that is put aside, but no more than stays free beside them.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import is_autocast_enabled, is_grad_enabled

from stagehand.core.casts import is_cast
from stagehand.core.hidden_gradients import (
    HiddenGradients,
    assign_gradient,
    take_along,
)
from stagehand.core.layout import placed_like
from stagehand.core.machine import processors
from stagehand.core.terms import terms_of
from stagehand.core.turn import HERE
from stagehand.core.workers import failure_of, raise_kept
from stagehand.errors import ConfigError, StagehandWarning
from stagehand.gradients.arrivals import Arrival, combine, take_in
from stagehand.gradients.home import HOMES, Home
from stagehand.gradients.uses import Use
from stagehand.torch_private import (
    graph_task,
    has_more_hooks,
    is_autograds,
    keeps_graph,
    renew_hooks,
    sequence_number,
    storage_use_count,
    tensor_key,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from concurrent.futures import Future

    from torch import nn
    from torch.autograd.graph import Node

    from stagehand.core.arena import Arena, Lease
    from stagehand.core.device import Device, Stream
    from stagehand.core.traffic import Parcel
    from stagehand.core.transfer import TransferEngine
    from stagehand.core.turn import Turn
    from stagehand.core.workers import WorkerGroup
    from stagehand.gradients.arrivals import Listener
    from stagehand.residency.blocks import Block, Reader

__all__ = ["Gradients"]

_JOBS_UNDER_WAY = 2  # blocks whose gradients wait to be added
_ALONE = 2  # a storage's use count when one tensor has it, and who asks


class Gradients:
    """Brings the gradients of one runtime's streamed parameters home.

    Not thread-safe: callers hold the runtime's lock.

    Args:
        device: Where gradients are made.
        engine: Whose D2H lane they take.
        arena: Pinned memory.
        workers: Threads that add; one, so that sums are made in order.
        turn: The runtime's lock.
        blocks: Tells which blocks come and go.
        enter: Called first in each hook: begins the backward pass, if it is not known.
        fetch: Brings a block to the device.
        begin: Called with each block of which gradients are taken from now on.
    """

    def __init__(
        self,
        device: Device,
        engine: TransferEngine,
        arena: Arena,
        workers: WorkerGroup,
        *,
        turn: Turn,
        blocks: Callable[[], Iterable[Block]],
        enter: Callable[[], None],
        fetch: Callable[[Block], None],
        begin: Callable[[Block], None],
    ) -> None:
        self._device, self._device_type = device, device.torch_device.type
        self._engine = engine
        self._arena = arena
        self._workers = workers
        self._hidden = HiddenGradients(
            turn, lambda: [t for b in blocks() if b.bound for t in b.tensors]
        )
        self._enter = enter
        self._fetch = fetch
        self._begin = begin
        self._homes: dict[int, Home] = {}  # by the parameter's id
        self._touched: list[Home] = []  # since this backward pass began
        self._astray: list[Home] = []  # see `_take_astray`
        self._graded: list[Block] = []  # for which gradients came
        self._late: dict[Home, Stream] = {}  # see `_after`
        self._sent = False  # a copy home, since the lane was last waited for
        self._arrivals: deque[Arrival] = deque()
        self._arriving_bytes = 0
        self._complete: dict[int, Home] = {}  # not yet told to listeners
        self._jobs: deque[Future[None]] = deque()
        self._stepping: set[Block] = set()  # what listeners were told of
        self._listeners: dict[object, Listener] = {}
        self._in_forward = False
        self._lost = 0  # gradients of earlier calls that a failed one took along
        self._warned = False

    def __repr__(self) -> str:
        return f"Gradients({len(self._homes)} parameters, {len(self._jobs)} jobs)"

    # Forward passes

    def begin_pass(self) -> None:
        """Begin a forward: listeners, which change weights, are not called in it."""
        self._in_forward = True
        self._hidden.begin()

    def end_pass(self) -> None:
        """A forward pass ends; see `settle`."""
        try:
            self.settle()
        finally:
            self._in_forward = False

    # Which parameters

    def note_steps(self) -> None:
        """Mark blocks as changed for which gradients came: they may have been stepped.

        torch's fused optimizers move no version counter, and may change so few elements
        that no sample shows it.
        """
        while self._graded:
            block = self._graded.pop()
            block.graded = False
            block.mark_changed()

    @property
    def missing_bytes(self) -> int:
        """Bytes of pinned memory that gradients still need.

        Those of watched parameters that have no place yet, and two of the largest once
        more: gradients that arrive while earlier ones are added.
        """
        sizes = {
            home: home.parameter.numel() * home.parameter.element_size()
            for home in self._homes.values()
        }
        missing = sum(size for home, size in sizes.items() if home.lease is None)
        return missing + 2 * max(sizes.values(), default=0)

    @property
    def expected(self) -> Collection[int]:
        """Ids of parameters whose gradients go to the host."""
        return self._homes.keys()

    @property
    def are_expected(self) -> bool:
        """Whether there are parameters that want some."""
        return any(home.parameter.requires_grad for home in self._homes.values())

    def are_left(self, blocks: Iterable[Block]) -> bool:
        """Whether weights have gradients already that nobody expects.

        They are to be watched before a pass without gradients, too: what trains is at
        home between passes, and what stays on the device takes its gradients along.
        """
        trained = [t for block in blocks for t in block.tensors if t.requires_grad]
        if all(t.grad is None for t in trained):
            return False
        others = (HOMES.get(id(t)) for t in trained)
        return all(home is None or id(home.parameter) in self._homes for home in others)

    def watch(self, blocks: Sequence[Block]) -> None:
        """Expect gradients of all parameters that now require one, and of no others.

        Those of what was frozen since stay beside it.

        Raises:
            ConfigError: If another runtime expects one of them.
        """
        self._take_astray()
        if self._lost:
            self._tell_lost()
        trained = [t for block in blocks for t in block.tensors if t.requires_grad]
        if not (trained or self._homes):
            return  # nothing trains, and nothing did before
        if not self._homes:
            _warn_of_few_threads()
        for block in blocks:
            trains = hooked = False
            for tensor in block.tensors:
                if tensor.requires_grad:
                    trains = True
                    home = self._homes.get(id(tensor))
                    if home is None or home.of != tensor_key(tensor):
                        self._homes[id(tensor)] = self._hook(tensor, block)
                    hooked = hooked or has_more_hooks(tensor)
                elif self._homes and id(tensor) in self._homes:
                    if tensor.grad is not None:
                        trains = True  # between passes it lies beside its gradient
                    else:
                        self._homes.pop(id(tensor)).dismiss()
            if trains and not block.trains:
                self._begin(block)
                for tensor in block.tensors:
                    take_along(tensor)
                flight = self._engine.flight
                flight.group_bytes = max(flight.group_bytes, block.nbytes)
            block.trains = trains
            block.hooked = hooked

    def _tell_lost(self) -> None:
        """Warn of lost gradients, unless `zero_grad()` has removed the others, too."""
        lost, self._lost = self._lost, 0
        if any(home.parameter.grad is not None for home in self._homes.values()):
            warnings.warn(
                f"the latest backward failed after it had come to {lost} parameters"
                " that had gradients of earlier calls, and these are lost while others"
                " are there: call zero_grad() and take all micro-batches again",
                StagehandWarning,
                stacklevel=2,
            )

    def _hook(self, tensor: torch.Tensor, block: Block) -> Home:
        mine = self._homes.get(id(tensor))
        if mine is not None:  # its hooks are called for another tensor
            mine.dismiss()
        other = HOMES.get(id(tensor))
        if other is not None and other.parameter is tensor:
            raise ConfigError(
                f"a weight of block {block.name!r} of shape {list(tensor.shape)} is in"
                f" block {other.block.name!r} of another streamed model, too, which"
                " expects its gradient: expected one; stream both models as one, such"
                " as an nn.ModuleList, or call this one under torch.no_grad()"
            )
        home = HOMES[id(tensor)] = Home(tensor, block)
        # Weak: Python cannot collect a tensor that its own hooks hold.
        me, known = weakref.ref(self), weakref.ref(home)
        renew_hooks(tensor, swapped=mine is not None)

        def before(grad: torch.Tensor) -> torch.Tensor | None:
            self, home = me(), known()
            if self is None or home is None:
                return None
            self._before(home, grad)
            return home.laid_out(grad)

        def after(parameter: torch.Tensor) -> None:
            self, home = me(), known()
            if self is not None and home is not None:
                self._after(home)

        home.handles = [
            tensor.register_hook(before),  # type: ignore[no-untyped-call]
            tensor.register_post_accumulate_grad_hook(after),  # type: ignore[no-untyped-call]
        ]
        return home

    def when_home(self, listener: Listener) -> Callable[[], None]:
        """Call `listener(parameters)` in backward, in a worker thread.

        With parameters that are on the host and whose gradients are complete beside
        them; it may change both. It hears of each parameter once a backward pass, and
        of none for which another part of the gradient may come.

        Returns:
            A function that ends the subscription.
        """
        key = object()
        self._listeners[key] = listener

        def unsubscribe() -> None:
            self._listeners.pop(key, None)

        return unsubscribe

    def end_use(self, reader: Reader, output: Any) -> None:
        """End a site's call; let terms of its weights be added in autograd's order.

        If a weight was read several times while its block was bound, the nodes that
        make the terms get hooks: see Note [One by one].
        """
        since, reader.since = reader.since or 0, None
        autocasts = is_autocast_enabled(self._device_type)
        nodes = sequence_number() - since, autocasts
        if nodes == reader.once and not reader.again:
            return  # mostly
        terms = terms_of(output, since)
        homes = {node: self._homes.get(id(node.variable)) for node in terms}  # type: ignore[attr-defined]
        # Of what is read elsewhere, this may be one of several readers in a binding.
        strays = any(home and home.block.read_elsewhere for home in homes.values())
        again = reader.again or strays
        if terms and not strays and all(len(makers) == 1 for makers in terms.values()):
            reader.once = nodes
        for node, makers in terms.items():
            home = homes[node]
            if home is None:
                continue
            home.cast = home.cast or any(is_cast(maker) for maker, _ in makers)
            if again or len(makers) > 1:
                for maker, number in makers:
                    self._note_use(home, node, maker, number)

    def follow(self, weight: torch.Tensor, node: Node) -> None:
        """Note that a weight was looked up, which sites may read as well.

        Args:
            weight: A parameter.
            node: Of the lookup: its only gradient is a term of the weight's.
        """
        home = self._homes.get(id(weight))
        sums = node.next_functions[0][0]
        if home is not None and sums is not None:
            self._note_use(home, sums, node, 0)

    def follow_cast(self, weight: torch.Tensor, node: Node, *, notes: bool) -> None:
        """Note that a graph uses a cast which was made for no graph.

        Args:
            weight: A parameter.
            node: Of the cast.
            notes: Whether the cast is to be followed, as a lookup is.
        """
        home = self._homes.get(id(weight))
        if home is not None:
            home.cast = True
            if notes:
                self.follow(weight, node)

    def _note_use(self, home: Home, sums: Node, maker: Node, number: int) -> None:
        """Let a node know that its `number`th gradient is a term of a home's."""
        use = Use(sums, self._feeding(home, number))
        maker.register_hook(use)
        home.add_use(use)

    def _feeding(self, home: Home, number: int) -> Callable[..., Any]:
        """Return what gives the sum so far to a node's `number`th gradient."""
        me, known = weakref.ref(self), weakref.ref(home)

        def feed(grads: tuple[Any, ...]) -> tuple[Any, ...] | None:
            self, home = me(), known()
            if self is None or home is None or grads[number] is None:
                return None
            if not home.came or home.whole or home.task != graph_task():
                return None
            fed = self._fed(home, grads[number])
            return None if fed is None else (*grads[:number], fed, *grads[number + 1 :])

        return feed

    def _fed(self, home: Home, term: torch.Tensor) -> torch.Tensor | None:
        """Return a term with the sum so far added to it, or None for the plain term.

        See Note [One by one]. It is plain where the weight has tensor hooks of users:
        these have seen the sum so far already, and would see it again.
        """
        if len(home.parameter._backward_hooks or ()) > 1:
            return None
        self._wait()
        if home.grad is None:
            return None
        home.whole = True
        return home.grad.to(term.device) + term

    # Hooks

    def _before(self, home: Home, grad: torch.Tensor | None) -> None:
        """Take an earlier gradient out of the way of a new one.

        `grad` is None, and autograd adds nothing, where a weight turns out to have no
        gradient: in a gradient of a gradient, say, that does not depend on its bias.
        What came before, as of a recompute, is not used up where `_after` finds none.
        """
        parameter = home.parameter
        hooked = has_more_hooks(parameter)
        home.idle = grad is None
        if home.idle and not hooked:
            return
        self._enter()
        if self._astray:
            self._take_astray()
        hides = hooked and home.uses is not None and home.uses.more_come()
        watched = hooked and not hides
        reunites = watched and home.has_unseen()
        home.idle = home.idle and not reunites
        if home.idle and not hides:
            return
        given = parameter.grad
        if watched:  # by an optimizer, say, that steps the weight in its hook
            self._fetch(home.block)
            if home.block.bound:  # fused ones, and `.data`, move no version counter
                home.block.mark_changed()
        if not home.touched:
            self._touch(home, given)
        if hides:
            home.hide_hooks()
        if reunites and given is None:
            self._reunite(home)
        if given is None or grad is None or given.device == grad.device:
            return
        if not (parameter.requires_grad or watched):
            return  # it was frozen after the forward: autograd adds nothing
        if home.grad is not None and not home.whole:
            self._wait()  # the host has made a part of the sum in between
            given = home.grad + given
        home.grad, home.whole = given, watched
        parameter.grad = given.to(grad.device) if watched else None

    def _reunite(self, home: Home) -> None:
        """Bring to the device what users' hooks shall see with the part that comes."""
        self._wait()
        given, earlier, home.earlier = home.grad, home.earlier, None
        if home.whole:  # the part has it already
            given = earlier
        elif given is not None and earlier is not None:
            given = earlier + given
        home.whole = True
        if given is not None:
            home.grad = given
            home.parameter.grad = given.to(self._device.torch_device)

    def _after(self, home: Home) -> None:
        """Send a new gradient home."""
        parameter = home.parameter
        grad = parameter.grad
        hidden = home.hidden is not None
        if hidden:
            home.show_hooks()
        if grad is None:
            if not home.idle:  # an optimizer has used it up
                home.grad, home.whole = None, False
        elif grad.device == self._device.torch_device:
            left = home.block.bindings - home.spent
            if left == 1 and not home.cast and not keeps_graph():
                home.spent += 1  # mostly; as `count` does
                home.more = False
            else:
                home.count()
            maker = self._device.current_stream()
            if hidden or not has_more_hooks(parameter):
                if self._late:
                    self._late.pop(home, None)
                self._send(home, grad, maker)
                return
            # Hooks of users shall see it, those on other weights of its block, too.
            if self._late and next(iter(self._late)).block is not home.block:
                self._send_late()
            self._late[home] = maker

    def check_step(self, stepped: Iterable[torch.Tensor]) -> None:
        """Refuse a step inside of a backward that would skip weights.

        Args:
            stepped: The parameters of the optimizer.

        Raises:
            ConfigError: If the gradient of one of them has left the device.
        """
        for parameter in stepped:
            home = self._homes.get(id(parameter))
            if home is None or not home.came or parameter.grad is not None:
                continue
            if home.grad is not None:
                raise ConfigError(
                    "an optimizer that steps in a gradient hook would skip a weight of"
                    f" block {home.block.name!r} of shape {list(parameter.shape)}:"
                    " its gradient is on its way to the host; expected weights of one"
                    " block, the one that backward is in, each with a hook of its own;"
                    " make an optimizer for each weight, or step after the backward"
                )

    def _touch(self, home: Home, earlier: torch.Tensor | None) -> None:
        """Note that this backward pass has come to a parameter.

        Args:
            home: The parameter's.
            earlier: Its gradient until now, if there was one.
        """
        home.touched = True
        home.had = earlier is not None and earlier.is_cpu
        self._touched.append(home)
        block = home.block
        if not block.graded:
            block.graded = True
            self._graded.append(block)

    def _send_late(self) -> None:
        """Send gradients home that hooks of users had to see first."""
        while self._late:
            home, maker = self._late.popitem()
            grad = home.parameter.grad
            if grad is None:
                home.grad, home.whole = None, False
            else:
                self._send(home, grad, maker)

    def _send(self, home: Home, grad: torch.Tensor, maker: Stream) -> None:
        home.parameter.grad = None
        if grad.is_conj() or grad.is_neg():
            # The host would turn the copy before it is there, on CUDA.
            with self._device.on(maker):
                grad = grad.resolve_conj().resolve_neg()
        if is_grad_enabled() or not home.fits(grad):
            self._send_whole(home, grad)
        elif home.grad is not None:
            if home.more and not (home.came or home.whole):
                home.earlier, home.grad = home.grad, torch.empty_like(home.grad)
                self._stage(home, grad, maker, adds=False)
            else:
                self._stage(home, grad, maker, adds=not home.whole)
        elif (place := home.own_place(self._arena)) is not None:
            home.grad = place
            self._carry(home, grad, place, maker)
        else:
            home.grad = torch.empty_like(grad, device="cpu")
            self._stage(home, grad, maker, adds=False)
        home.whole = False
        home.came = True
        if self._listeners:
            self._complete[id(home)] = home

    def _send_whole(self, home: Home, grad: torch.Tensor) -> None:
        """Copy a gradient that is differentiated itself, or unlike its parameter.

        The host waits: both are rare.
        """
        self._wait()
        there = grad.to("cpu")
        old = None if home.whole else home.grad
        home.grad = there if old is None else old + there

    def _carry(
        self, home: Home, grad: torch.Tensor, target: torch.Tensor, maker: Stream
    ) -> Parcel | None:
        # The gradient of a broadcast tensor can be a view of another one, to which
        # autograd adds in place once nobody else seems to hold the memory.
        shared = storage_use_count(grad.untyped_storage()) > _ALONE
        index = home.block.index
        self._sent = True
        return self._engine.carry_home(
            grad, target, block=index, maker=maker, shared=shared
        )

    # Memory

    def _stage(
        self, home: Home, grad: torch.Tensor, maker: Stream, *, adds: bool
    ) -> None:
        """Let a gradient cross to staging memory, and a thread take it from there."""
        target = home.grad
        if target is None:
            return
        lease = self._staging(grad.numel() * grad.element_size())
        if lease is None:
            self._warn(grad)
            self._wait()
            there = grad.to("cpu")
            combine(target, there, adds=adds)
            return
        staged = placed_like(grad, lease.buffer)
        parcel = self._carry(home, grad, staged, maker)
        self._arrivals.append(Arrival(parcel, lease, staged, target, adds))
        self._arriving_bytes += lease.nbytes

    def _staging(self, nbytes: int) -> Lease | None:
        if self._arriving_bytes > self._arena.account.free_bytes:
            self.pass_on(waits=False)  # leave some pinned memory to others
        lease = self._arena.acquire_nowait(nbytes, "an arriving gradient")
        while lease is None and (self._arrivals or self._jobs):
            self.pass_on(waits=False)
            self._await_job()
            lease = self._arena.acquire_nowait(nbytes, "an arriving gradient")
        return lease

    def _warn(self, grad: torch.Tensor) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"no page-locked memory is left for a gradient of {grad.dtype}"
                f" {list(grad.shape)}: the host waits for each that comes home; raise"
                " ram_budget (or pinned_pool_mb)",
                StagehandWarning,
                stacklevel=2,
            )

    # Passing on

    def pass_on(self, *, waits: bool = True) -> None:
        """Let a thread add what is under way, and listeners use what is complete.

        Called when backward comes to another block: what has arrived belongs to blocks
        that it has left.

        Args:
            waits: Whether gradients that were put aside, so that loads go first, may
                wait longer.
        """
        if waits and not (self._late or self._arrivals or self._listeners):
            return  # mostly
        self._send_late()
        while len(self._jobs) >= _JOBS_UNDER_WAY:
            self._await_job()
        told = self._told()
        if told or not waits:
            self._engine.flush_home()
        arrivals = self._sent_arrivals()
        if not arrivals and not told:
            return
        if any(block.slot is not None for block in self._stepping):
            self._engine.hold_home()  # behind a load that still reads the host tensors
        done = self._device.new_event()
        done.record(self._engine.d2h.stream)
        listeners = tuple(self._listeners.values())
        note = self._jobs.append
        self._workers.hand(note, take_in, done, arrivals, told, listeners)

    def _sent_arrivals(self) -> list[Arrival]:
        """Take those whose copies are queued; they are queued in this order."""
        sent = []
        while self._arrivals:
            parcel = self._arrivals[0].parcel
            if parcel is not None and not parcel.sent:
                break
            sent.append(self._arrivals.popleft())
            self._arriving_bytes -= sent[-1].lease.nbytes
        return sent

    def _told(self) -> list[nn.Parameter]:
        """Return the parameters of which listeners are told now.

        They are on the host, and have their whole gradients beside them.
        """
        if not self._listeners or self._in_forward:
            return []
        told = [
            home
            for home in self._complete.values()
            if not (home.block.bound or home.parts)
        ]
        for home in told:
            del self._complete[id(home)]
            home.parameter.grad, home.grad = home.grad, None
            home.block.stepping = True
            self._stepping.add(home.block)
        return [home.parameter for home in told]  # type: ignore[misc]

    @property
    def has_listeners(self) -> bool:
        """Whether somebody wants parameters on the host during backward."""
        return bool(self._listeners)

    # The end of a backward pass

    def settle(self) -> None:
        """Wait for all gradients and put them on the host, with their parameters.

        Where a forward goes on, these come there later.

        Raises:
            Exception: What a thread or a listener raised first; gradients are in place.
        """
        try:
            self.pass_on(waits=False)
            self._wait()
        finally:
            self._await_jobs()
            if self._arrivals:  # something was raised before they were passed on
                with suppress(Exception):
                    self._wait()
            self._put_back()

    def give_up(self) -> None:
        """End a backward that has failed: wait for what is under way, raise nothing.

        Of parameters that it came to, all gradients are lost, those of earlier calls,
        too. Autograd's thread may get here when its caller has already caught the
        exception and called `zero_grad()`: gradients that were put back now would be
        added to those of the next backward. Nor does that thread touch `.grad`, which
        is safe in one thread at a time: what is left there waits for its caller.
        """
        self._late.clear()
        self._await_jobs()
        while self._arrivals:
            self._arrivals.pop().lease.release()
        self._arriving_bytes = 0
        self._hidden.show()
        self._complete.clear()
        while self._touched:  # what an interrupt leaves is done by who ends this again
            home = self._touched[-1]
            home.end_backward()
            self._astray.append(home)
            self._lost += home.had
            self._touched.pop()
        if not is_autograds(HERE.thread):
            self._take_astray()

    def _wait(self) -> None:
        if self._arrivals:
            self.pass_on(waits=False)
        self.await_steps()

    def await_steps(self) -> None:
        """Wait until no listener changes weights on the host.

        Raises:
            Exception: What a thread or a listener raised first.
        """
        raise_kept(self._await_jobs())

    def _await_job(self) -> None:
        """Wait for the oldest job. An interrupt leaves it to be waited for again."""
        failure_of(self._jobs[0])
        raise_kept(failure_of(self._jobs.popleft()))

    def _await_jobs(self) -> BaseException | None:
        """Return the first failure when neither a thread nor the lane has work."""
        failed: BaseException | None = None
        while self._jobs:
            error = failure_of(self._jobs[0])
            self._jobs.popleft()
            failed = failed or error
        while self._stepping:
            self._stepping.pop().stepping = False
        if self._sent:
            self._engine.flush_home()
            self._engine.await_home()
            self._sent = False
        return failed

    def _put_back(self) -> None:
        """Give all parameters that backward came to their gradients, beside them."""
        # The compiler may not have told that it is done, if other threads compile, too.
        self._hidden.show()
        self._take_astray()
        self._late.clear()
        self._complete.clear()
        touched, self._touched = self._touched, []
        for home in touched:
            grad, earlier = home.end_backward()
            there = home.parameter.grad
            if there is not None and not there.is_cpu:  # backward failed before it left
                home.parameter.grad = there = None
            if grad is None:
                continue
            if there is not None:  # it was used on the host as well
                grad = grad + there
            if earlier is not None:
                combine(earlier, grad, adds=True)
                grad = earlier
            if home.parameter.device == grad.device:
                home.parameter.grad = grad
            else:  # in a forward pass that goes on
                assign_gradient(home.parameter, grad)

    def _take_astray(self) -> None:
        """Take gradients off that a failed backward has left on the device."""
        while self._astray:
            parameter = self._astray.pop().parameter
            if parameter.grad is not None and not parameter.grad.is_cpu:
                parameter.grad = None

    def close(self) -> None:
        """Take the hooks off and leave gradients to their parameters. Idempotent."""
        self._take_astray()
        for home in self._homes.values():
            home.block.trains = False
            home.dismiss()
        self._homes.clear()
        while self._graded:
            self._graded.pop().graded = False
        self._workers.close()


def _warn_of_few_threads() -> None:
    """Warn if PyTorch may use a fourth of the processors, or less: see `watch`."""
    threads, usable = torch.get_num_threads(), processors()
    if 4 * threads <= usable:
        warnings.warn(
            f"PyTorch uses {threads} of the {usable} processors of the host, where"
            " gradients of streamed weights are added up and optimizers step: both may"
            f" take {usable // threads} times as long as they need to; call"
            f" torch.set_num_threads({usable}), or give launchers that number, such as"
            " --num_cpu_threads_per_process of `accelerate launch`, which means 1 by"
            " default",
            StagehandWarning,
            stacklevel=2,
        )
