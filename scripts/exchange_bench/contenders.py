"""What bench_exchange.py measures: every strategy, and MPI's own collectives, on vectors with known sums.

A strategy does its real `update`, with an optimizer that only copies: D bytes of gradients become parameters. Where the
sums alone travel, as with MPI_Allreduce, the copy is no part of the exchange, and is made after the clock has stopped.
"""

from functools import partial

from mpi4py import MPI

from dist.buffers import OwnBuffers
from dist.probe.links import MOST_SEGMENT_BYTES
from dist.world import World
from gpt2.errors import UserError
from scripts.exchange_bench.values import fill, is_filled, rank_values, summed_values
from strategies import STRATEGIES, Bucketed, Job, check_strategy
from traces import Tracer

ROOT = 0
JUNK = -1.0  # no sum has it
SUMS_ALONE = ("allreduce", "ring", "tree", "hierarchical")  # strategies that send no parameters


class Contender:
    """One way to exchange. On every rank, in turn: prepare, exchange (which is timed), settle, is_correct; at the end
    close.

    own_buffers: two vectors of this rank, (size,) each, that all contenders may use, one at a time. whole: it leaves
    the sums on all ranks; if not, it is half of an exchange. family: "own" (strategies with an exchange of their own),
    "strategy" (those that call MPI's), "mpi" or "torch". wire: the dtype that travels.
    """

    family, wire, whole = "mpi", "float32", True

    def __init__(self, world: World, own_buffers: OwnBuffers):
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
    def __init__(self, world, own_buffers, name: str, **options):
        super().__init__(world, own_buffers)
        self.wire = options.get("wire", "float32")
        self.name, kind = name, STRATEGIES[name]
        size = len(own_buffers.gradients)
        self.family = "own" if issubclass(kind, Bucketed) else "strategy"
        self.shares_memory = kind.buffers is not OwnBuffers
        if self.shares_memory:  # it may count in there what happened before
            self.buffers = kind.buffers(world, size)
        self.size, self.optimizers = size, []
        self.strategy = kind(copying_job(world, self.buffers, size, self._new_optimizer, **options))
        self.know_sums(world.comm.allgather(self.strategy.worker is not None))

    def _new_optimizer(self, start, stop):
        self.optimizers.append(CopyingOptimizer() if self.name in SUMS_ALONE else CopyingAtOnce())
        return self.optimizers[-1]

    def exchange(self):
        self.strategy.gradients_final(0, self.size)
        self.strategy.update(1.0)

    def settle(self):
        for optimizer in self.optimizers:
            optimizer.settle()

    def close(self):
        self.strategy = None
        if self.shares_memory:
            self.buffers.close()


class Collective(Contender):
    """MPI's own: gradients of all ranks, parameters the sums."""

    def __init__(self, world, own_buffers):
        super().__init__(world, own_buffers)
        self.comm, self.is_root = world.comm, world.rank == ROOT
        self.gradients, self.parameters = own_buffers.gradients, own_buffers.parameters

    def reduce(self):
        self.comm.Reduce(self.gradients, self.parameters if self.is_root else None, root=ROOT)

    def bcast(self):
        self.comm.Bcast(self.parameters, root=ROOT)


class Reduce(Collective):
    whole = False

    def exchange(self):
        self.reduce()

    def is_correct(self):
        return super().is_correct() or not self.is_root


class Bcast(Collective):
    whole = False

    def prepare(self):
        super().prepare()
        if self.is_root:
            fill(self.parameters, self.sums)

    def exchange(self):
        self.bcast()


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


def makers(segment_bytes: int = MOST_SEGMENT_BYTES) -> dict:
    """{name: what makes the contender of (world, own_buffers)}, the strategies in their order first.

    segment_bytes: as Job's. Not none, nor those that exchange a layer at a time because no rank holds the whole vector.
    """
    result = {}
    for name, kind in STRATEGIES.items():
        if name == "none" or not kind.keeps_gradients:
            continue
        make = partial(StrategyContender, name=name, segment_bytes=segment_bytes)
        result[name] = make
        if name == "reduce-bcast":
            result[f"{name}/dedicated"] = partial(make, server="dedicated")
        if issubclass(kind, Bucketed):
            result[f"{name}/bfloat16"] = partial(make, wire="bfloat16")
    return result | COLLECTIVES


def chosen(text: str, ranks: int) -> list[str]:
    """The names in --strategies; "all" are those that so many ranks can run. UserError for a name that is none."""
    known = list(makers())
    if text == "all":
        return [name for name in known if _refusal(name, ranks) is None]
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise UserError(f"--strategies: no contender {name!r}, expected all, or some of {', '.join(known)}")
        if refusal := _refusal(name, ranks):
            raise refusal
    return names


def _refusal(name: str, ranks: int) -> UserError | None:
    strategy, _, option = name.partition("/")
    try:
        if strategy in STRATEGIES:
            check_strategy(strategy, option if option == "dedicated" else "colocated", ranks, no_exchange=False)
    except UserError as error:
        return error
    return None
