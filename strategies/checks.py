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


def check_exchange(kind: type[Strategy], wire: str, error_feedback: bool, overlap: bool) -> None:
    """UserError where a flag that shapes an exchange meets a strategy that cannot be shaped so."""
    if wire not in kind.wires:
        others = names(other for other in STRATEGIES.values() if wire in other.wires)
        raise UserError(f"--wire {wire} with --strategy {kind.name}, whose messages are MPI's: use {others}")
    if overlap and not kind.overlaps and not overlaps_over_nccl(kind):
        over_nccl = names(other for other in STRATEGIES.values() if overlaps_over_nccl(other))
        raise UserError(
            f"--overlap with --strategy {kind.name}, whose messages are MPI's: use {overlapping()}, or over NCCL "
            f"{over_nccl}"
        )
    check_wire(wire, error_feedback)
    if error_feedback and not kind.error_feedback:
        raise UserError(
            f"--error-feedback with --strategy {kind.name}: what rounding loses is as large as the gradients, which no "
            "rank is to hold: leave it out, or use hierarchical-sharded"
        )


def check_wire(wire: str, error_feedback: bool) -> None:
    """UserError where there is nothing to feed back, whatever the strategy."""
    if error_feedback and wire == "float32":
        raise UserError(f"--error-feedback with --wire {wire}, which loses nothing: add --wire bfloat16")


def check_rounding(kind: type[Strategy] | None, name: str, wire: str) -> None:
    """UserError where parameters that are to be rounded at random come over the wire rounded to nearest already.

    kind: None of a strategy that is still to be chosen.
    """
    if wire != "float32" and (kind is None or not kind.shares_sums):
        raise UserError(
            f"--stochastic-rounding with --wire {wire} and --strategy {name}, which gathers parameters rounded to "
            "nearest: leave one of them out"
        )


def device_transports(kind: type[Strategy], wire: str, overlap: bool) -> tuple[str, ...]:
    """Those on which its exchange can stay on GPUs. Only NCCL's calls are queued, and go on while the GPU computes."""
    if kind.on_gpus is None or ((overlap or wire != "float32") and wire not in kind.on_gpus.exchanges):
        return ()
    return ("nccl",) if overlap else DEVICE_TRANSPORTS


def check_transport(kind: type[Strategy], transport: str, wire: str, overlap: bool) -> None:
    """UserError where an exchange that starts in host memory is asked to stay on the GPUs, or the other way round."""
    if transport == "host" and overlap and overlaps_over_nccl(kind):
        raise no_overlap(kind, "with --transport host")
    if transport not in DEVICE_TRANSPORTS or transport in device_transports(kind, wire, overlap):
        return
    if kind.on_gpus is None:
        others = names(other for other in STRATEGIES.values() if other.on_gpus and other.exchanges)
        raise UserError(
            f"--transport {transport} with --strategy {kind.name}, which declares no `on_gpus`: use --transport host, "
            f"or one of {others}"
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
