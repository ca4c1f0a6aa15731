"""Check that settings agree with a strategy's traits. Each error says in one line why they do not."""

from collections.abc import Callable

from gpt2.errors import UserError
from strategies import AUTO, CONTROL, STRATEGIES, Strategy, names
from strategies.traits import Traits

TRANSPORTS = ("host", "gpu-aware", "nccl")
DEVICE_TRANSPORTS = ("gpu-aware", "nccl")  # these exchange arrays on GPUs directly


def worker_count(server: str, ranks: int) -> int:
    """Return how many of the ranks compute gradients."""
    return ranks - 1 if server == "dedicated" else ranks


def check_server(kind: type[Strategy], server: str, ranks: int, no_exchange: bool) -> None:
    """Raise UserError if the strategy cannot run with this server, or if --no-exchange contradicts it."""
    if server not in kind.traits.servers:
        others = names_where(lambda traits: server in traits.servers)
        raise UserError(f"--server {server} with --strategy {kind.name}, which has no server: use --strategy {others}")
    if server == "dedicated" and ranks < 2:
        raise UserError(f"--server dedicated on {ranks} rank, expected at least 2: one serves, the others compute")
    if no_exchange == kind.traits.exchanges:
        raise UserError(
            f"--strategy {CONTROL} exchanges nothing, so every rank trains a separate model: a control for timings, "
            f"not a way to train; to run it say both, --strategy {CONTROL} --no-exchange"
        )


def check_own_flags(kind: type[Strategy] | None, typed: frozenset[str]) -> None:
    """Raise UserError if a flag was typed that belongs to another strategy. kind: None with --strategy auto."""
    for other in STRATEGIES.values():
        for name in other.traits.flags:
            if name in typed and (kind is None or name not in kind.traits.flags):
                flag = name.replace("_", "-")
                found = AUTO if kind is None else kind.name
                raise UserError(f"--{flag} with --strategy {found}, which has no use for it: use {other.name}")


def check_exchange(kind: type[Strategy], wire: str, error_feedback: bool, overlap: bool, op: str | None = None) -> None:
    """Raise UserError if a flag asks for an exchange that the strategy does not support. op: None without --op."""
    traits = kind.traits
    if wire not in traits.wires:
        others = names_where(lambda traits: wire in traits.wires)
        raise UserError(
            f"--wire {wire} with --strategy {kind.name}, which sends {' or '.join(traits.wires)}: use {others}"
        )
    if op is not None and op not in traits.operations:
        others = names_where(lambda traits: op in traits.operations)
        raise UserError(
            f"--op {op} with --strategy {kind.name}, which lets no collective of MPI's add: leave it out, or use "
            f"{others}"
        )
    if overlap and not traits.overlaps and not overlaps_over_nccl(kind):
        over_nccl = names(filter(overlaps_over_nccl, STRATEGIES.values()))
        raise UserError(
            f"--overlap with --strategy {kind.name}, whose messages are MPI's: use {overlapping()}, or over NCCL "
            f"{over_nccl}"
        )
    check_wire(wire, error_feedback, op)
    if error_feedback and not traits.error_feedback:
        others = names_where(lambda traits: traits.error_feedback)
        raise UserError(
            f"--error-feedback with --strategy {kind.name}, where no rank holds what rounding loses: leave it out, or "
            f"use {others}"
        )


def check_wire(wire: str, error_feedback: bool, op: str | None = None) -> None:
    """Raise UserError if --error-feedback has no rounding errors to add, or if MPI cannot sum the wire's format."""
    if error_feedback and wire == "float32":
        raise UserError(f"--error-feedback with --wire {wire}, which loses nothing: add --wire bfloat16 or int8")
    if op == "mpi" and wire != "float32":
        raise UserError(f"--op mpi with --wire {wire}, which MPI cannot sum: leave --op out")


def operation_of(wire: str, op: str | None) -> str:
    """Return the operation of MPI's collectives: `op` if given, else "mpi" where MPI can sum the format, else "own"."""
    return op or ("mpi" if wire == "float32" else "own")


def check_rounding(kind: type[Strategy] | None, name: str, wire: str) -> None:
    """Raise UserError if stochastic rounding is asked for, but the strategy gathers parameters rounded to nearest.

    kind: None if the strategy has not been chosen yet.
    """
    if wire != "float32" and (kind is None or not kind.traits.shares_sums):
        raise UserError(
            f"--stochastic-rounding with --wire {wire} and --strategy {name}, which gathers parameters rounded to "
            "nearest: leave one of them out"
        )


def device_transports(kind: type[Strategy], wire: str, overlap: bool, op: str | None = None) -> tuple[str, ...]:
    """Return the transports on which the strategy's exchange can stay on GPUs.

    Only NCCL's calls are queued and continue while the GPU computes. With --op own, sums are made in host memory.
    """
    on_gpus = kind.traits.on_gpus
    if op == "own" or on_gpus is None or ((overlap or wire != "float32") and wire not in on_gpus.exchanges):
        return ()
    return ("nccl",) if overlap else DEVICE_TRANSPORTS


def check_transport(kind: type[Strategy], transport: str, wire: str, overlap: bool, op: str | None = None) -> None:
    """Raise UserError if an exchange cannot use this transport: between GPUs, or through host memory."""
    if transport == "host" and overlap and overlaps_over_nccl(kind):
        raise no_overlap(kind, "with --transport host")
    if transport not in DEVICE_TRANSPORTS or transport in device_transports(kind, wire, overlap, op):
        return
    if op == "own":
        raise UserError(f"--transport {transport} with --op own, which adds in host memory: use --transport host")
    if kind.traits.on_gpus is None:
        others = names_where(lambda traits: traits.on_gpus and traits.exchanges)
        raise UserError(
            f"--transport {transport} with --strategy {kind.name}, which declares no `on_gpus`: use --transport host, "
            f"or one of {others}"
        )
    if wire != "float32" and wire not in kind.traits.on_gpus.exchanges:
        others = names_where(lambda traits: traits.on_gpus and wire in traits.on_gpus.exchanges)
        raise UserError(
            f"--transport {transport} with --wire {wire} and --strategy {kind.name}, which adds that in host memory: "
            f"use --transport host{others and f', or one of {others}'}"
        )
    raise UserError(f"--transport {transport} with --overlap, whose calls return when all is done: use nccl, or host")


def overlaps_over_nccl(kind: type[Strategy]) -> bool:
    """Return whether the strategy overlaps over NCCL only, because it calls MPI's collectives in host memory."""
    return bool(kind.traits.on_gpus and kind.traits.on_gpus.exchanges) and not kind.traits.overlaps


def no_overlap(kind: type[Strategy], why: str) -> UserError:
    """Return the error for --overlap with a strategy that calls MPI's collectives, which block backward."""
    return UserError(
        f"--overlap with --strategy {kind.name} {why}: its calls overlap with backward only over NCCL: use "
        f"--transport nccl, or one of {overlapping()}"
    )


def overlapping() -> str:
    return names_where(lambda traits: traits.overlaps)


def names_where(has: Callable[[Traits], object]) -> str:
    """Return the names of the strategies whose traits have something, for a message."""
    return names(kind for kind in STRATEGIES.values() if has(kind.traits))
