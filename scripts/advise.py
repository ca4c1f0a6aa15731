"""Predict the cost of every gradient exchange on a cluster that you describe.

    python scripts/advise.py --nodes 5 --ranks 9 --ranks-per-node 2 --link 400mbit --parameters 2M --compute-ms 100
    python scripts/advise.py --nodes 64 --ranks-per-node 8 --link 200gbit --latency 3us --transport rdma \\
        --model gpt2-1558M --compute-ms 400 --memory-rate 300 --wire bfloat16 --grad-accum 4
    python scripts/advise.py --from-run runs/sliced                       the run's own nodes, links and times
    python scripts/advise.py --from-run runs/sliced --nodes 16 --ranks 64 --link 25gbit --latency 20us
    python scripts/advise.py --nodes 4 --ranks-per-node 4 --link 25gbit --model gpt2-774M --compute-ms 20000 \\
        --global-batch 64 --batch-size 1 --memory 16GB
    python scripts/advise.py --from-run runs/sliced --global-batch 64     layouts of the run's model on its ranks

Nothing is run or measured. Bytes are counted from each strategy's messages; for strategies that call MPI's collectives,
from the algorithms that the library selects by default. Seconds come from the model in dist/cost/model.py. A step is
compute time plus exposed exchange, without the update. All rows have the same global batch; * marks approximate ones.
--from-run includes the run's update and scales exchanges by the run's measured exchange (docs/diagnosis.md).

With --global-batch the table compares layouts: each row has a number of data-parallel replicas, tensor-parallel shards
and pipeline stages, and the best strategy for them. --compute-ms is then the compute time of a step of that batch when
every rank has a replica; --from-run derives it from any run. docs/choosing-a-strategy.md explains the table.
"""

import sys
from pathlib import Path

import numpy as np

from dist.console import USER_MISTAKE, open_console
from dist.cost.model import Cluster
from dist.cost.mpi_choices import LIBRARIES
from dist.cost.overlap import Training
from dist.cost.sparse_rows import Rows
from dist.ranges import cut
from dist.wire import OPERATIONS, WIRE_BYTES
from gpt2.config import PRESETS, preset_name
from gpt2.files import as_json
from gpt2.parameters import Layout
from scripts.prediction.predictor import OTHER_WEIGHTS, advice_sentence, as_rows, predicted_steps, short_number
from scripts.prediction.replayed_run import advise_from_run
from scripts.prediction.shapes import advise_shapes, shapes_sentence, shapes_table
from scripts.prediction.workload import Workload, workload_of_run
from scripts.settings.command_line import Parser
from scripts.settings.split_embedding import rows_of_text
from scripts.settings.units import bytes_per_s, count_of, duration_s, size_in_bytes
from strategies import find
from traces.record.files import RunError

MOST_RANKS = 10**6
DEFAULT_LAYERS = 12
DEFAULT_LATENCY = "50us"
DEFAULT_BATCH = 4
DEFAULT_LOW_RANK = 4
DEFAULT_LOCAL_STEPS = 50
MOST_SEQUENCES = 2**20
KNOWN_FROM_RUN = ("parameters", "model", "layers", "compute_ms", "wire", "op", "seq_len", "low_rank", "local_steps")
OF_CUTS = ("batch_size", "seq_len", "memory")  # flags that need --global-batch


def main():
    arguments = parser().parse_args()
    try:
        check_given(arguments)
        report, text = strategies_report(arguments) if arguments.global_batch is None else shapes_report(arguments)
    except (ValueError, RunError) as error:
        print(f"advise.py: error: {error}", file=sys.stderr)
        raise SystemExit(USER_MISTAKE) from None
    if arguments.json:
        setting = {name: value for name, value in vars(arguments).items() if value is not None}
        print(as_json({"setting": setting, **report}, indent=1, default=str))
    else:
        print("\n".join([text, "", *report["notes"], report["advice"]]))


def strategies_report(arguments) -> tuple[dict, str]:
    """Return (the object, the table) of all strategies. Raise ValueError or RunError if they cannot be predicted."""
    if arguments.from_run:
        report = advise_from_run(arguments.from_run, *overrides(arguments))
    else:
        cluster = described_cluster(arguments)
        training = described_training(arguments)
        wire = arguments.wire or "float32"
        steps = predicted_steps(cluster, training, arguments.library or "mpich")
        steps = [step for step in steps if wire in find(step.name.partition("/")[0]).traits.wires]
        rows = as_rows(steps, cluster, training)
        report = {"strategies": rows, "notes": [], "advice": advice_sentence(rows)}
    return report, table(report["strategies"])


def shapes_report(arguments) -> tuple[dict, str]:
    """Return (the object, the table) of the layouts of a model on the ranks. Raise ValueError or RunError."""
    workload, cluster, library, notes = workload_of_flags(arguments)
    rows = advise_shapes(workload, cluster, library)
    return {"shapes": rows, "notes": notes, "advice": shapes_sentence(rows, workload.memory_bytes)}, shapes_table(rows)


def workload_of_flags(arguments) -> tuple[Workload, Cluster, str, list[str]]:
    """Return (workload, cluster, MPI library, notes) from the flags or the run. Raise ValueError for wrong flags."""
    batch = arguments.global_batch
    size = arguments.batch_size
    memory = size_in_bytes(arguments.memory) if arguments.memory else None
    check_number(arguments, "global_batch", MOST_SEQUENCES)
    check_number(arguments, "batch_size", MOST_SEQUENCES)
    if arguments.from_run:
        workload, *others = workload_of_run(arguments.from_run, batch, size, memory, *overrides(arguments))
    else:
        config = PRESETS[arguments.model]
        check_number(arguments, "seq_len", config.context)
        length = arguments.seq_len or config.context
        training = described_training(arguments)
        workload = Workload(config, batch, size or DEFAULT_BATCH, length, training, memory)
        others = described_cluster(arguments), arguments.library or "mpich", []
    if batch % workload.batch_size:
        raise ValueError(
            f"--global-batch {batch} with --batch-size {workload.batch_size}, expected a multiple of it: change one"
        )
    return workload, *others


def check_number(arguments, name: str, most: int) -> None:
    value = getattr(arguments, name)
    if value is not None and not 1 <= value <= most:
        raise ValueError(f"--{name.replace('_', '-')} {value}: expected a number from 1 to {most}")


def check_given(arguments) -> None:
    """Raise ValueError unless a cluster and a training are described, by flags or by a run."""
    cuts = arguments.global_batch is not None
    given = [name for name in OF_CUTS if getattr(arguments, name) is not None]
    if given and not cuts:
        raise ValueError(f"--{given[0].replace('_', '-')} without --global-batch: give both, or leave it out")
    if cuts and arguments.grad_accum != 1:
        raise ValueError("--grad-accum with --global-batch, which sets it for each number of replicas: leave it out")
    if cuts and arguments.wire == "int8":
        raise ValueError("--wire int8 with --global-batch, which compares layouts with the same weights: leave one out")
    if arguments.from_run:
        given = [name for name in KNOWN_FROM_RUN if getattr(arguments, name)]
        if given:
            raise ValueError(f"--from-run knows --{given[0].replace('_', '-')} from the run: leave it out")
        return
    if cuts and (arguments.parameters or arguments.layers):
        raise ValueError("--parameters or --layers with --global-batch, which splits a known model: use --model")
    missing = [name for name in ("nodes", "link", "compute_ms") if getattr(arguments, name) is None]
    if arguments.model is None and (cuts or arguments.parameters is None):
        missing.append("model" if cuts else "parameters")
    if missing:
        raise ValueError(f"--{missing[0].replace('_', '-')} is missing: give it, or --from-run RUN")


def overrides(arguments) -> tuple:
    """Return (placement, bytes/s, latency in s, library) from the flags; None: keep the run's value."""
    placement = None
    if arguments.nodes or arguments.ranks:
        if not arguments.nodes:
            raise ValueError("--ranks without --nodes: give the number of nodes as well")
        placement = place_ranks(arguments.nodes, arguments.ranks, arguments.ranks_per_node)
    rate = bytes_per_s(arguments.link) if arguments.link else None
    latency_s = duration_s(arguments.latency) if arguments.latency else None
    return placement, rate, latency_s, arguments.library


def described_training(arguments) -> Training:
    """Return the training that the flags describe. Raise ValueError for wrong flags."""
    compute_s = arguments.compute_ms / 1e3
    micro_steps = arguments.grad_accum
    if not 0 <= compute_s < float("inf"):
        raise ValueError(f"--compute-ms {arguments.compute_ms:g}: expected 0 or more")
    counts = (arguments.layers, arguments.low_rank, arguments.local_steps)
    if min(micro_steps, *(1 if one is None else one for one in counts)) < 1:
        raise ValueError("--grad-accum, --layers, --low-rank and --local-steps: expected 1 or more")
    if arguments.model:
        layout = Layout(PRESETS[arguments.model])
        parameters = layout.count
        ranges = tuple(stop - start for start, stop in layout.ranges)
        matrices = layout.matrices
        rows = described_rows(arguments)
    else:
        rows = None
        matrices = None
        parameters = count_of(arguments.parameters)
        layers = min(arguments.layers or DEFAULT_LAYERS, parameters)
        # The embeddings are unknown, and layers are assumed to have equal sizes.
        ranges = (0, *(stop - start for start, stop in cut(parameters, layers)), 0)
    if arguments.op == "mpi" and arguments.wire not in (None, "float32"):
        raise ValueError(f"--op mpi with --wire {arguments.wire}, which MPI cannot sum: leave --op out")
    item = WIRE_BYTES[arguments.wire or "float32"]
    own_operation = arguments.op == "own"
    return Training(
        parameters, compute_s, item, ranges, micro_steps, own_operation=own_operation, rows=rows, matrices=matrices,
        low_rank=arguments.low_rank or DEFAULT_LOW_RANK, local_steps=arguments.local_steps or DEFAULT_LOCAL_STEPS,
    )  # fmt: skip


def described_rows(arguments) -> Rows | None:
    """Estimate the size of the sparse embedding gradient, which train.py exchanges separately with --overlap."""
    config = PRESETS[arguments.model]
    placement = place_ranks(arguments.nodes, arguments.ranks, arguments.ranks_per_node)
    sequences = (arguments.batch_size or DEFAULT_BATCH) * arguments.grad_accum
    if arguments.global_batch:
        sequences = -(-arguments.global_batch // len(placement))
    return rows_of_text(sequences * (arguments.seq_len or config.context), config, placement)


def parser() -> Parser:
    result = Parser(__doc__)
    add = result.add_argument
    add("--from-run", type=Path, metavar="RUN", help="take the values of omitted flags from this run")
    add("--nodes", type=int, metavar="M", help="number of nodes")
    add("--ranks", type=int, metavar="N", help="number of ranks (M times P)")
    add("--ranks-per-node", type=int, metavar="P", help="ranks per node, which are filled in order (N/M, rounded up)")
    add("--link", metavar="RATE", help="rate of every node's port, per direction: 400mbit, 10gbit, 200gbit")
    add("--latency", metavar="TIME", help="latency of one message, software included: 20us, 1ms (50us)")
    add("--parameters", metavar="COUNT", help="size of the model: 124M, 1.5B or a number")
    add("--model", type=preset_name, choices=PRESETS, help="a known model, instead of --parameters")
    add("--layers", type=int, metavar="L", help=f"with --parameters: layers of the model ({DEFAULT_LAYERS})")
    add("--grad-accum", type=int, default=1, metavar="K", help="microbatches per step (1)")
    add("--local-steps", type=int, metavar="H", help=f"with diloco: steps between exchanges ({DEFAULT_LOCAL_STEPS})")
    add("--compute-ms", type=float, metavar="MS", help="time of forward and backward per step, all ranks in parallel")
    add(
        "--global-batch",
        "--global-batch-size",
        type=int,
        metavar="G",
        help="sequences per step; compares layouts of the model on the ranks",
    )
    add("--batch-size", type=int, metavar="B", help=f"with --global-batch: sequences per microbatch ({DEFAULT_BATCH})")
    add("--seq-len", type=int, metavar="T", help="with --global-batch: tokens per sequence (the model's context)")
    add("--memory", metavar="SIZE", help="with --global-batch: memory per rank, such as 16GB")
    add("--wire", choices=WIRE_BYTES, help="number format of messages (float32)")
    add("--op", choices=OPERATIONS, help="reduction operation of MPI's collectives (mpi; own with --wire bfloat16)")
    add("--low-rank", type=int, metavar="R", help=f"with powersgd: rank of a matrix's factors ({DEFAULT_LOW_RANK})")
    add("--library", choices=LIBRARIES, help="MPI library of strategies that call its collectives (mpich)")
    add("--transport", choices=("tcp", "rdma"), default="tcp", help="transport of the MPI library (tcp)")
    add("--memory-rate", type=float, default=5, metavar="GB/S", help="rate of adding and copying vectors (5, one core)")
    add("--json", action="store_true", help="print one object instead of a table")
    return result


def described_cluster(arguments) -> Cluster:
    """Return the cluster that the flags describe. Raise ValueError for wrong flags."""
    rate = bytes_per_s(arguments.link)
    if not 0 < arguments.memory_rate < float("inf"):
        raise ValueError(f"--memory-rate {arguments.memory_rate:g}: expected more than 0")
    memory = arguments.memory_rate * 1e9
    return Cluster(
        place_ranks(arguments.nodes, arguments.ranks, arguments.ranks_per_node), rate, rate,
        duration_s(arguments.latency or DEFAULT_LATENCY), tcp=arguments.transport == "tcp", local_rate=memory,
        local_reduce_rate=memory / 2, add_rate=memory,
    )  # fmt: skip


def place_ranks(nodes: int, ranks: int | None, per_node: int | None) -> np.ndarray:
    """Return the node of each rank, (ranks,). Raise ValueError if a node is empty or a rank has no place."""
    if ranks is None:
        ranks = nodes * (1 if per_node is None else per_node)
    if per_node is None:
        per_node = -(-ranks // max(nodes, 1))
    if min(nodes, ranks, per_node) < 1 or ranks > MOST_RANKS:
        raise ValueError(f"--nodes, --ranks and --ranks-per-node: expected 1 or more, and at most {MOST_RANKS} ranks")
    if not (nodes - 1) * per_node < ranks <= nodes * per_node:
        raise ValueError(
            f"{ranks} ranks on {nodes} nodes, {per_node} on each: expected {(nodes - 1) * per_node + 1} to "
            f"{nodes * per_node} ranks; change --ranks, --nodes or --ranks-per-node"
        )
    return np.arange(ranks) // per_node


def table(rows: list[dict]) -> str:
    """Return a line per strategy; unknown values are dashes, with the reason below."""
    lines = [
        f"{'':<24}{'exchange':>10}{'times':>7}  {'busiest node, MB':>18}  {'memory':>8}{'step':>10}{'overlapped':>12}\n"
        f"{'strategy':<24}{'ms':>10}{'bound':>7}  {'in':>8}{'out':>10}  {'GB/rank':>8}{'ms':>10}{'ms':>12}"
    ]
    for row in rows:
        lines.append(
            f"{row['strategy'] + '*' * (not row['same_weights']):<24}{short_number(row['exchange_s'], 1e3):>10}"
            f" {short_number(row['times_bound']):>6}  "
            f"{short_number(row['bytes_in'], 1e-6):>8}{short_number(row['bytes_out'], 1e-6):>10}  "
            f"{short_number(row['memory_bytes'], 1e-9):>8}{short_number(row['step_s'], 1e3):>10}"
            f"{short_number(row['step_overlapped_s'], 1e3):>12}" + compared_text(row)
        )
    lines += [f"{row['strategy']}: {row['unknown']}" for row in rows if row["unknown"]]
    return "\n".join(lines if all(row["same_weights"] for row in rows) else [*lines, OTHER_WEIGHTS])


def compared_text(row: dict) -> str:
    """Return the range of a calibrated row and how it compares with the run; "" for other rows."""
    if "compared" not in row:
        return ""
    low, high = (short_number(end, 1e3) for end in row["range_s"])
    return f"  {low} to {high}: {row['compared']}"


if __name__ == "__main__":
    open_console()
    main()
