"""Which settings go together with a strategy: every reason why not, in one line, from what it declares."""

from gpt2.errors import UserError
from strategies import CONTROL, STRATEGIES, Strategy, names

TRANSPORTS = ("host", "gpu-aware", "nccl")
DEVICE_TRANSPORTS = ("gpu-aware", "nccl")  # between arrays on GPUs


def worker_count(server: str, ranks: int) -> int:
    """How many of the ranks compute gradients."""
    return ranks - 1 if server == "dedicated" else ranks


def check_server(kind: type[Strategy], server: str, ranks: int, no_exchange: bool) -> None:
    """UserError if the strategy cannot run so, or if one that exchanges nothing was not asked for twice."""
    if server not in kind.servers:
        others = names(other for other in STRATEGIES.values() if server in other.servers)
        raise UserError(f"--server {server} with --strategy {kind.name}, which has no server: use --strategy {others}")
    if server == "dedicated" and ranks < 2:
        raise UserError(f"--server dedicated on {ranks} rank, expected at least 2: one serves, the others compute")
    if no_exchange == kind.exchanges:
        raise UserError(
            f"--strategy {CONTROL} exchanges nothing, so every rank trains a model of its own: a control for timings, "
            f"not a way to train; to run it say both, --strategy {CONTROL} --no-exchange"
        )


def check_exchange(kind: type[Strategy], wire: str, error_feedback: bool, overlap: bool, op: str | None = None) -> None:
    """UserError where a flag that shapes an exchange meets a strategy that it cannot shape. op: None if not given."""
    if wire not in kind.wires:
        others = names(other for other in STRATEGIES.values() if wire in other.wires)
        raise UserError(
            f"--wire {wire} with --strategy {kind.name}, which sends {' or '.join(kind.wires)}: use {others}"
        )
    if op is not None and op not in kind.operations:
        others = names(other for other in STRATEGIES.values() if op in other.operations)
        raise UserError(
            f"--op {op} with --strategy {kind.name}, which lets no collective of MPI's add: leave it out, or use "
            f"{others}"
        )
    if overlap and not kind.overlaps and not overlaps_over_nccl(kind):
        over_nccl = names(other for other in STRATEGIES.values() if overlaps_over_nccl(other))
        raise UserError(
            f"--overlap with --strategy {kind.name}, whose messages are MPI's: use {overlapping()}, or over NCCL "
            f"{over_nccl}"
        )
    check_wire(wire, error_feedback, op)
    if error_feedback and not kind.error_feedback:
        others = names(other for other in STRATEGIES.values() if other.error_feedback)
        raise UserError(
            f"--error-feedback with --strategy {kind.name}, where no rank holds what rounding loses: leave it out, or "
            f"use {others}"
        )


def check_wire(wire: str, error_feedback: bool, op: str | None = None) -> None:
    """UserError where there is nothing to feed back or nothing that adds, whatever the strategy."""
    if error_feedback and wire == "float32":
        raise UserError(f"--error-feedback with --wire {wire}, which loses nothing: add --wire bfloat16")
    if op == "mpi" and wire != "float32":
        raise UserError(f"--op mpi with --wire {wire}, which MPI cannot add: leave --op out")


def operation_of(wire: str, op: str | None) -> str:
    """What MPI's collectives add with: MPI's sum unless told, or unless it does not know the format."""
    return op or ("mpi" if wire == "float32" else "own")


def check_rounding(kind: type[Strategy] | None, name: str, wire: str) -> None:
    """UserError where parameters that are to be rounded at random come over the wire rounded to nearest already.

    kind: None of a strategy that is still to be chosen.
    """
    if wire != "float32" and (kind is None or not kind.shares_sums):
        raise UserError(
            f"--stochastic-rounding with --wire {wire} and --strategy {name}, which gathers parameters rounded to "
            "nearest: leave one of them out"
        )


def device_transports(kind: type[Strategy], wire: str, overlap: bool, op: str | None = None) -> tuple[str, ...]:
    """Those on which its exchange can stay on GPUs. Only NCCL's calls are queued, and go on while the GPU computes.
    The own operation adds in host memory."""
    if op == "own" or kind.on_gpus is None or ((overlap or wire != "float32") and wire not in kind.on_gpus.exchanges):
        return ()
    return ("nccl",) if overlap else DEVICE_TRANSPORTS


def check_transport(kind: type[Strategy], transport: str, wire: str, overlap: bool, op: str | None = None) -> None:
    """UserError where an exchange that starts in host memory is asked to stay on the GPUs, or the other way round."""
    if transport == "host" and overlap and overlaps_over_nccl(kind):
        raise no_overlap(kind, "with --transport host")
    if transport not in DEVICE_TRANSPORTS or transport in device_transports(kind, wire, overlap, op):
        return
    if op == "own":
        raise UserError(f"--transport {transport} with --op own, which adds in host memory: use --transport host")
    if kind.on_gpus is None:
        others = names(other for other in STRATEGIES.values() if other.on_gpus and other.exchanges)
        raise UserError(
            f"--transport {transport} with --strategy {kind.name}, which declares no `on_gpus`: use --transport host, "
            f"or one of {others}"
        )
    if wire != "float32" and wire not in kind.on_gpus.exchanges:
        others = names(other for other in STRATEGIES.values() if other.on_gpus and wire in other.on_gpus.exchanges)
        raise UserError(
            f"--transport {transport} with --wire {wire} and --strategy {kind.name}, which adds that in host memory: "
            f"use --transport host, or one of {others}"
        )
    raise UserError(f"--transport {transport} with --overlap, whose calls return when all is done: use nccl, or host")


def overlaps_over_nccl(kind: type[Strategy]) -> bool:
    """Whether it can exchange while the model computes over NCCL alone: in host memory its calls are MPI's."""
    return bool(kind.on_gpus and kind.on_gpus.exchanges) and not kind.overlaps


def no_overlap(kind: type[Strategy], why: str) -> UserError:
    """What there is to say where the calls of a strategy are MPI's, though they were to go on during backward."""
    return UserError(
        f"--overlap with --strategy {kind.name} {why}: its calls go on during backward over NCCL alone: use "
        f"--transport nccl, or one of {overlapping()}"
    )


def overlapping() -> str:
    return names(kind for kind in STRATEGIES.values() if kind.overlaps)
