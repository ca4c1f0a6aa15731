"""What bench_exchange.py measures: every strategy, and MPI's own collectives, on vectors with known sums.

A strategy does its real `update`, with an optimizer that only copies: D bytes of gradients become parameters. Where the
sums alone travel, as with MPI_Allreduce, the copy is no part of the exchange, and is made after the clock has stopped.
"""

from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from dist.buffers import OwnBuffers
from dist.host.exchange import FLOAT32
from dist.mpi import MPI
from dist.wire import WireFormat
from dist.world import World
from gpt2.errors import UserError
from scripts.exchange_bench.values import fill, is_filled, rank_values, summed_values
from strategies import OWN_FILE, STRATEGIES, Job, Strategy, find
from strategies.checks import check_server, operation_of
from traces import Tracer

ROOT = 0
JUNK = -1.0  # no sum has it


class Contender:
    """One way to exchange. On every rank, in turn: prepare, exchange (which is timed), settle, is_correct; at the end
    close.

    own_buffers: two vectors of this rank, (size,) each, that all contenders may use, one at a time. whole: it leaves
    the sums on all ranks; if not, it is half of an exchange. family: "own" (strategies with messages of their own),
    "strategy" (those that call MPI's collectives), "mpi" or "torch". wire: the dtype that travels.
    """

    family, wire, whole = "mpi", "float32", True

    def __init__(self, world: World, own_buffers: OwnBuffers, wire_format: WireFormat = FLOAT32):
        """wire_format: how vectors travel, where that is up to the contender."""
        self.world, self.buffers = world, own_buffers
        self.know_sums([True] * world.size)

    def know_sums(self, contributors: list[bool]) -> None:
        self.values = rank_values(self.world.rank, self.world.size)
        self.sums = summed_values(contributors)

    def prepare(self) -> None:
        """Put this rank's values in, and junk where the sums shall come."""
        fill(self.buffers.gradients, self.values)
        if self.buffers.fills_parameters:
            self.buffers.parameters.fill(JUNK)

    def exchange(self) -> None:
        raise NotImplementedError

    def settle(self) -> None:
        """What is left to do for the parameters to be the sums."""

    def is_correct(self) -> bool:
        return is_filled(self.buffers.parameters, self.sums)

    def close(self) -> None:
        """Collective."""


class CopyingOptimizer:
    """Parameters become the sums, in `settle`: the cheapest update that shows them. No state."""

    def __init__(self):
        self._copies = []

    def update(self, parameters, gradients, lr, gradient_scale) -> None:
        self._copies.append((parameters, gradients))

    def settle(self) -> None:
        for parameters, gradients in self._copies:
            parameters[:] = gradients
        self._copies.clear()


class CopyingAtOnce(CopyingOptimizer):
    """For strategies that send on what their update has made."""

    def update(self, *arguments) -> None:
        super().update(*arguments)
        self.settle()


def copying_job(world: World, buffers, size: int, new_optimizer, **options) -> Job:
    """A job without a model: what its strategy does is its exchange, and what the optimizer copies."""
    return Job(
        world=world, buffers=buffers, new_optimizer=new_optimizer,
        sum_of_squares=lambda flat: 0.0, max_norm=0.0, tracer=Tracer(), final_ranges=((0, size),), **options,
    )  # fmt: skip


class StrategyContender(Contender):
    """A strategy's real update. wire, op: instead of wire_format's. server: as Job's."""

    def __init__(self, world, own_buffers, wire_format, kind: type[Strategy], wire=None, op=None, server="colocated"):
        super().__init__(world, own_buffers)
        wire = wire or wire_format.wire
        wire_format = replace(wire_format, wire=wire, error_feedback=False, operation=operation_of(wire, op))
        calls_mpi = kind.operations or not kind.overlaps
        self.wire, self.family = wire, "strategy" if calls_mpi else "own"
        self.size, self.optimizers = len(own_buffers.gradients), []
        self.shares_memory = kind.buffers is not OwnBuffers
        if self.shares_memory:  # it may count in there what happened before
            self.buffers = kind.buffers(world, self.size)
        self.new_optimizer = CopyingOptimizer if kind.shares_sums else CopyingAtOnce
        self.operation = kind.new_operation(wire_format)
        job = copying_job(
            world, self.buffers, self.size, self._remember_optimizer,
            new_exchange=partial(kind.host_exchange, wire_format=wire_format),
            operation=self.operation.op, new_wire=wire_format.new, server=server,
        )  # fmt: skip
        self.strategy = kind(job)
        self.know_sums(world.comm.allgather(self.strategy.worker is not None))

    def _remember_optimizer(self, start, stop):
        self.optimizers.append(self.new_optimizer())
        return self.optimizers[-1]

    def exchange(self):
        self.strategy.gradients_final(0, self.size)
        self.strategy.update(1.0)

    def settle(self):
        for optimizer in self.optimizers:
            optimizer.settle()

    def close(self):
        self.strategy = None
        self.operation.close()
        if self.shares_memory:
            self.buffers.close()


class DeviceContender(Contender):
    """A strategy between GPUs. own_buffers: on this rank's GPU. form: the class that runs there; comm: a DeviceComm;
    new_exchange: as Job's."""

    def __init__(self, world: World, own_buffers: OwnBuffers, form: type[Strategy], comm, new_exchange):
        super().__init__(world, own_buffers)
        self.device, self.on_host = comm.device, np.empty(len(own_buffers.gradients), np.float32)
        places = replace(world, comm=comm)
        job = copying_job(
            places, own_buffers, len(self.on_host), lambda start, stop: CopyingAtOnce(), new_exchange=new_exchange
        )
        self.strategy = form(job)

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


class Collective(Contender):
    """MPI's own: gradients of all ranks, parameters the sums."""

    def __init__(self, world, own_buffers, wire_format=FLOAT32):
        super().__init__(world, own_buffers)
        self.comm, self.is_root = world.comm, world.rank == ROOT
        self.gradients, self.parameters = own_buffers.gradients, own_buffers.parameters

    def reduce(self):
        self.comm.Reduce(self.gradients, self.parameters if self.is_root else None, root=ROOT)

    def bcast(self):
        self.comm.Bcast(self.parameters, root=ROOT)


class Reduce(Collective):
    whole, exchange = False, Collective.reduce

    def is_correct(self):
        return super().is_correct() or not self.is_root


class Bcast(Collective):
    whole, exchange = False, Collective.bcast

    def prepare(self):
        super().prepare()
        if self.is_root:
            fill(self.parameters, self.sums)


class ReduceAndBcast(Collective):
    def exchange(self):
        self.reduce()
        self.bcast()


class ReduceScatterAndAllgather(Collective):
    def exchange(self):
        block = len(self.parameters) // self.comm.size
        own = self.parameters[self.comm.rank * block : (self.comm.rank + 1) * block]
        self.comm.Reduce_scatter_block(self.gradients, own)
        self.comm.Allgather(MPI.IN_PLACE, self.parameters)


class Allreduce(Collective):
    def exchange(self):
        self.comm.Allreduce(self.gradients, self.parameters)


COLLECTIVES = {
    "MPI_Reduce": Reduce,
    "MPI_Bcast": Bcast,
    "MPI_Reduce+Bcast": ReduceAndBcast,
    "MPI_Reduce_scatter_block+Allgather": ReduceScatterAndAllgather,
    "MPI_Allreduce": Allreduce,
}


def strategy_makers(kind: type[Strategy]) -> dict:
    """{name, name/dedicated, /own, /bfloat16: what makes the contender of (world, own_buffers, wire_format)}.

    Nothing for a control, nor for a strategy that exchanges a layer at a time because no rank holds the whole vector.
    """
    if not kind.exchanges or not kind.keeps_gradients:
        return {}
    make = partial(StrategyContender, kind=kind)
    servers = {f"{kind.name}/{server}": partial(make, server=server) for server in kind.servers[1:]}
    operations = {f"{kind.name}/{op}": partial(make, op=op) for op in kind.operations[1:]}
    wires = {f"{kind.name}/{wire}": partial(make, wire=wire) for wire in kind.wires[1:]}
    return {kind.name: make} | servers | operations | wires


def makers() -> dict:
    """Every contender's maker by name, the strategies in their order first."""
    result = {}
    for kind in STRATEGIES.values():
        result |= strategy_makers(kind)
    return result | COLLECTIVES


def chosen(text: str, ranks: int) -> dict:
    """The makers named in --strategies, by name; "all" are those that so many ranks can run.

    A name may be the file of a strategy of one's own. UserError for a name that is none.
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
    """UserError where too few ranks are there for a strategy's server."""
    if isinstance(make, partial):
        check_server(make.keywords["kind"], make.keywords.get("server", "colocated"), ranks, no_exchange=False)
