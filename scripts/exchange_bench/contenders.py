"""Contenders of bench_exchange.py: all strategies, and bare MPI collectives, on vectors with known sums.

A strategy runs its real `update` with an optimizer that only copies the summed gradients, D bytes, to the parameters.
If only the sums are sent, as with MPI_Allreduce, the copy is not part of the exchange and is made untimed afterwards.
"""

from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from dist.buffers import OwnBuffers
from dist.mpi import MPI
from dist.world import World
from gpt2.errors import UserError
from gpt2.optimizer import Clipping
from scripts.exchange_bench.values import fill, is_filled, rank_values, rounding_of, summed_values
from strategies import OWN_FILE, STRATEGIES, Job, Strategy, find
from strategies.compatibility import check_server, operation_of
from traces import Tracer

ROOT = 0
JUNK = -1.0  # no sum has this value


class Contender:
    """An exchange to measure. Every rank calls prepare, exchange (timed), finish and is_correct; at the end close.

    own_buffers: two vectors of this rank, (size,) each, which all contenders use in turn. family: "own" (strategies
    that send messages themselves), "strategy" (strategies that call MPI's collectives) or "mpi". wire: the dtype of the
    messages. whole: False for half of an exchange, such as MPI_Reduce alone.
    """

    family = "mpi"
    wire = "float32"
    whole = True

    def __init__(self, world: World, own_buffers: OwnBuffers):
        self.world = world
        self.buffers = own_buffers
        self.set_contributors([True] * world.size)

    def set_contributors(self, contributors: list[bool]) -> None:
        """Compute this rank's values, and the sums over the ranks that contribute."""
        self.values = rank_values(self.world.rank, self.world.size)
        self.sums = summed_values(contributors)

    def prepare(self) -> None:
        """Write this rank's values into the gradients, and JUNK where the sums will be."""
        fill(self.buffers.gradients, self.values)
        if self.buffers.fills_parameters:
            self.buffers.parameters.fill(JUNK)

    def exchange(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Copy the sums to the parameters if the exchange has not done so. Untimed."""

    def is_correct(self) -> bool:
        return is_filled(self.buffers.parameters, self.sums, rounding_of(self.wire, self.world.size))

    def close(self) -> None:
        """Free the contender's resources. Collective."""


class CopyingOptimizer:
    """Copies the sums to the parameters instead of updating them: in `finish`, or at once in `update` if at_once.

    Strategies that send the updated parameters need the copy at once.
    """

    def __init__(self, at_once: bool):
        self._copies = []
        self._at_once = at_once

    def update(self, parameters, gradients, lr, gradient_scale) -> None:
        self._copies.append((parameters, gradients))
        if self._at_once:
            self.finish()

    def finish(self) -> None:
        for parameters, gradients in self._copies:
            parameters[:] = gradients
        self._copies.clear()


def copying_job(buffers, size: int, new_optimizer, **options) -> Job:
    """Return a job without a model: only the strategy's exchange and the optimizer's copies remain."""
    return Job(
        buffers=buffers, new_optimizer=new_optimizer, sum_of_squares=lambda flat: 0.0,
        clipping=Clipping(0.0), tracer=Tracer(), final_ranges=((0, size),), **options,
    )  # fmt: skip


class StrategyContender(Contender):
    """A strategy's real update. wire, op: override wire_format. server: as in Job."""

    def __init__(self, world, own_buffers, wire_format, kind: type[Strategy], wire=None, op=None, server="colocated"):
        super().__init__(world, own_buffers)
        wire = wire or wire_format.wire
        feeds = wire == "int8"  # as in training, by default
        wire_format = replace(wire_format, wire=wire, error_feedback=feeds, operation=operation_of(wire, op))
        self.wire = wire
        self.family = "strategy" if kind.traits.operations or not kind.traits.overlaps else "own"
        self.size = len(own_buffers.gradients)
        self.optimizers = []
        self.shares_memory = kind.traits.buffers is not OwnBuffers
        if self.shares_memory:  # allocate new ones: shared buffers may count the exchanges so far
            self.buffers = kind.traits.buffers(world, self.size)
        self.at_once = not kind.traits.shares_sums
        self.operation = kind.traits.new_operation(wire_format)
        transport = kind.traits.in_host_memory(world, wire_format, self.operation.op)
        job = copying_job(self.buffers, self.size, self._add_optimizer, server=server, **transport)
        self.strategy = kind(job)
        self.set_contributors(world.comm.allgather(self.strategy.worker is not None))

    def _add_optimizer(self, start, stop):
        self.optimizers.append(CopyingOptimizer(self.at_once))
        return self.optimizers[-1]

    def exchange(self):
        self.strategy.gradients_final(0, self.size)
        self.strategy.update(1.0)

    def finish(self):
        for optimizer in self.optimizers:
            optimizer.finish()

    def close(self):
        self.strategy = None
        self.operation.close()
        if self.shares_memory:
            self.buffers.close()


class DeviceContender(Contender):
    """A strategy between GPUs. own_buffers: on this rank's GPU. form: the strategy's GPU class. comm: a DeviceComm.
    new_exchange: as in Job."""

    def __init__(self, world: World, own_buffers: OwnBuffers, form: type[Strategy], comm, new_exchange):
        super().__init__(world, own_buffers)
        self.device = comm.device
        self.on_host = np.empty(len(own_buffers.gradients), np.float32)
        device_world = replace(world, comm=comm)
        options = {"world": device_world, "new_exchange": new_exchange}
        self.strategy = form(copying_job(own_buffers, len(self.on_host), lambda *_: CopyingOptimizer(True), **options))

    def prepare(self):
        fill(self.on_host, self.values)
        self.buffers.gradients.set(self.on_host)
        self.buffers.parameters.fill(JUNK)
        self.device.synchronize()

    def exchange(self):
        size = len(self.on_host)
        self.strategy.gradients_final(0, size)
        self.strategy.update(1.0)
        self.strategy.before_use(0, size)
        self.device.synchronize()

    def is_correct(self):
        return is_filled(self.device.download(self.buffers.parameters), self.sums)


def reduce(comm, buffers) -> None:
    comm.Reduce(buffers.gradients, buffers.parameters if comm.rank == ROOT else None, root=ROOT)


def bcast(comm, buffers) -> None:
    comm.Bcast(buffers.parameters, root=ROOT)


def allreduce(comm, buffers) -> None:
    comm.Allreduce(buffers.gradients, buffers.parameters)


def reduce_scatter(comm, buffers) -> None:
    comm.Reduce_scatter_block(buffers.gradients, np.split(buffers.parameters, comm.size)[comm.rank])


def allgather(comm, buffers) -> None:
    comm.Allgather(MPI.IN_PLACE, buffers.parameters)


COLLECTIVES = {
    "MPI_Reduce": (reduce,),
    "MPI_Bcast": (bcast,),
    "MPI_Reduce+Bcast": (reduce, bcast),
    "MPI_Reduce_scatter_block+Allgather": (reduce_scatter, allgather),
    "MPI_Allreduce": (allreduce,),
}


class CollectiveContender(Contender):
    """Calls of MPI's collectives, which sum the gradients of all ranks into the parameters."""

    def __init__(self, world, own_buffers, wire_format=None, calls=(allreduce,)):
        super().__init__(world, own_buffers)
        self.calls = calls
        self.whole = calls not in ((reduce,), (bcast,))
        self.is_root = world.rank == ROOT

    def prepare(self):
        super().prepare()
        if self.calls == (bcast,) and self.is_root:
            fill(self.buffers.parameters, self.sums)

    def exchange(self):
        for call in self.calls:
            call(self.world.comm, self.buffers)

    def is_correct(self):
        return super().is_correct() or (self.calls == (reduce,) and not self.is_root)


def strategy_makers(kind: type[Strategy]) -> dict:
    """Return {name: function of (world, own_buffers, wire_format) that makes the contender}.

    The names are the strategy's name, alone and with /dedicated, /own, /bfloat16 or /int8. The dict is empty for a
    strategy that exchanges nothing, that exchanges layer by layer because no rank holds the whole vector, or that does
    not send the sums of these vectors.
    """
    traits = kind.traits
    if not (traits.exchanges and traits.keeps_gradients and traits.same_weights):
        return {}
    make = partial(StrategyContender, kind=kind)
    servers = {f"{kind.name}/{server}": partial(make, server=server) for server in kind.traits.servers[1:]}
    operations = {f"{kind.name}/{op}": partial(make, op=op) for op in kind.traits.operations[1:]}
    wires = {f"{kind.name}/{wire}": partial(make, wire=wire) for wire in kind.traits.wires[1:]}
    return {kind.name: make} | servers | operations | wires


def makers() -> dict:
    """Return every contender's maker by name, the strategies first, in the order of the registry."""
    result = {}
    for kind in STRATEGIES.values():
        result |= strategy_makers(kind)
    return result | {name: partial(CollectiveContender, calls=calls) for name, calls in COLLECTIVES.items()}


def chosen_makers(text: str, ranks: int) -> dict:
    """Return the makers named by --strategies, or for "all" every maker that can run on `ranks` ranks.

    A name may be the file of a user's own strategy. Raise UserError for an unknown name.
    """
    known = makers()
    found = {}
    if text == "all":
        for name, make in known.items():
            with suppress(UserError):
                _check_server(make, ranks)
                found[name] = make
        return found
    for name in text.split(","):
        own = strategy_makers(find(name)) if name.endswith(OWN_FILE) else {name: known.get(name)}
        if None in own.values():
            raise UserError(f"--strategies: no contender {name!r}, expected all, or some of {', '.join(known)}")
        for make in own.values():
            _check_server(make, ranks)
        found |= own
    return found


def _check_server(make, ranks: int) -> None:
    """Raise UserError if there are too few ranks for a strategy's server."""
    if "kind" in make.keywords:
        check_server(make.keywords["kind"], make.keywords.get("server", "colocated"), ranks, no_exchange=False)
