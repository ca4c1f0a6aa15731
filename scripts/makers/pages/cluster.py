"""Parts of make_docs.py: training on virtual hosts whose ports are limited. As root."""

import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

from scripts.makers.pages.page import FIGURES, SCRIPTS, comparison_table, log_of, machine, replace_block, train_on
from traces.read.analysis import measure
from traces.read.runs import read_run
from traces.record.phases import INDEX

CLUSTER = "--nodes 5 --ranks 9 --ranks-per-node 2 --first-node 1 --rate 400mbit"
DEDICATED = "reduce-bcast/dedicated"
CLUSTER_STRATEGIES = (
    DEDICATED, "sliced", "reduce-scatter", "hierarchical", "hierarchical-sharded/bfloat16/overlap",
)  # fmt: skip
# As on the cluster that the project's first measurement comes from, where Reduce brought 4 D to the server's port and
# Bcast took D from it. By itself MPICH scatters what it broadcasts and gathers it: 2 D and more through the ports.
# Composition 3 leaves nodes out of account, as libraries do that do not know them.
TREE_AND_CHAIN = (
    "MPIR_CVAR_REDUCE_COMPOSITION=3", "MPIR_CVAR_REDUCE_INTRA_ALGORITHM=binomial",
    "MPIR_CVAR_BCAST_COMPOSITION=3", "MPIR_CVAR_BCAST_INTRA_ALGORITHM=pipelined_tree",
    "MPIR_CVAR_BCAST_TREE_TYPE=kary", "MPIR_CVAR_BCAST_TREE_KVAL=1", "MPIR_CVAR_BCAST_TREE_PIPELINE_CHUNK_SIZE=131072",
)  # fmt: skip
CLUSTER_TRAINING = "--n-layer 4 --n-head 4 --n-embd 256 --batch-size 2 --steps 12 --eval-every 0"
OVERLAP_CLUSTER = "--nodes 2 --ranks 2 --rate 240mbit"
OVERLAP_TRAINING = "--n-layer 12 --n-head 4 --n-embd 256 --context 128 --batch-size 12 --steps 7 --eval-every 0"


def cluster(folder: Path, _) -> None:
    """Nine ranks on five hosts, the server alone on its own, each host's port limited."""
    runs = []
    for name in CLUSTER_STRATEGIES:
        environment = TREE_AND_CHAIN if name == DEDICATED else ()
        runs.append(train_on(CLUSTER, name, CLUSTER_TRAINING, folder / name.replace("/", "-"), environment))
    plot = [sys.executable, str(SCRIPTS / "plot.py"), *map(str, runs), "--out", str(folder / "plots")]
    output = subprocess.run(plot, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(output)
    shutil.copy(folder / "plots" / "comparison.png", FIGURES / "cluster.png")
    command = f"sudo python scripts/virtual_cluster.py run {CLUSTER} -- python scripts/train.py {CLUSTER_TRAINING}"
    dedicated, *_, best = (statistics.median(line["step_s"] for line in log_of(run)[2:]) for run in runs)
    settings = (
        f"The dedicated server runs with MPICH's Reduce as a binomial tree and its Bcast as a chain in pieces "
        f"(`env {' '.join(TREE_AND_CHAIN)}`), all others with MPICH as it is. {server_shares(runs[0])} "
        f"The last line's step is {dedicated / best:.1f} times shorter."
    )
    text = f"```\n{command} ...\n\n{comparison_table(output)}\n```\n\n{settings} {machine(runs[-1])}"
    replace_block("README.md", "cluster", text)


def server_shares(run: Path) -> str:
    """How a step divides where rank 0 serves: Reduce from when the last rank has come, Bcast until the last one has
    all parameters, and what the others compute."""
    times = measure(read_run(run))
    names = ("forward", "backward", "reduce", "bcast", "wait")
    seconds = {name: times.seconds[:, :, INDEX[name]] for name in names}
    compute = np.median(seconds["forward"][:, 1:] + seconds["backward"][:, 1:])
    # The server's part of Bcast ends when all has left it; then it waits until all has arrived.
    bcast = np.median(seconds["bcast"][:, 0] + seconds["wait"][:, 0])
    reduced = np.median(seconds["reduce"][:, 0] - times.waiting[:, 0, INDEX["reduce"]])
    shares = " : ".join(f"{500 * part / reduced:.0f}" for part in (reduced, bcast, compute))
    return f"Reduce : Bcast : compute of its step are {shares}."


def overlap(folder: Path, _) -> None:
    """A step without exchange, with it after computing, and during it: a core a rank, so that both can go on."""
    names = ("none", "hierarchical-sharded", "hierarchical-sharded/overlap")
    lines = {name: [] for name in names}
    for number, name in enumerate(names * 3):  # in turns, as the machine drifts
        run = train_on(OVERLAP_CLUSTER, name, OVERLAP_TRAINING, folder / str(number))
        lines[name] += log_of(run)[2:]
    keys = ("step_s", "exposed_exchange_s")
    seconds = {name: [statistics.median(line[key] for line in lines[name]) for key in keys] for name in names}
    rows = ["| strategy | step, s | exchange exposed, s |", "|---|---|---|"]
    rows += [f"| `{name}` | {step_s:.3f} | {exposed_s:.3f} |" for name, (step_s, exposed_s) in seconds.items()]
    (alone, _), (after, exchange_s), (during, exposed_s) = seconds.values()
    rows += [
        "",
        f"Of what the exchange adds to a step overlap hides {(after - during) / (after - alone):.0%}, of the time that "
        f"ranks spend in the exchange and nothing else, {1 - exposed_s / exchange_s:.0%}.",
        "",
        f"`virtual_cluster.py run {OVERLAP_CLUSTER} -- train.py {OVERLAP_TRAINING}`. {machine(run)}",
    ]
    replace_block("docs/benchmarks.md", "overlap", "\n".join(rows))
