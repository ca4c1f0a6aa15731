"""Whether the verdict finds what is wrong: runs with one known fault each on a virtual cluster, each diagnosed.

    sudo python tests/suites/fault_suite.py --out runs/faults --json faults.json
    sudo python tests/suites/fault_suite.py --out runs/faults --cases slow-port-in,slow-rank --repeat 1

Five hosts of one rank each; two where a server is the fault, as then more comes in to its node than goes out. Nothing
but traces and config.json tells diagnose.py what was done to a run: its folder holds `truth.json` for this script
alone. Right is a verdict whose kind, node, rank and direction are the fault's; of a run where nothing is wrong, one
that accuses nobody. Runs that are there already are diagnosed and not run again.
"""

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.machine.host import machine, versions
from scripts.reports.verdict import diagnose
from tests.suites.faults.suite import RowsFile, suite_parser
from traces import read_run

NODES = 5
SUITES = Path(__file__).parent
SCRIPTS = SUITES.parents[1] / "scripts"
STEPS = 42  # of a start
TRAIN = ("--eval-every", 0, "--steps", STEPS)
MODEL = ("--n-layer", 2, "--n-head", 4, "--n-embd", 160, "--context", 64, "--seq-len", 64, "--batch-size", 12, *TRAIN)
TINY = ("--n-layer", 1, "--n-head", 2, "--n-embd", 32, "--context", 32, "--seq-len", 32, "--batch-size", 1, *TRAIN)
# Four stages of two equal layers, with a vocabulary so small that the head is nothing beside them: bytes.
STAGES = ("--strategy", "allreduce", "--pipeline-parallel", 4, *MODEL[2:], "--n-layer", 8, "--batch-size", 4)
PARTS = ("--strategy", "allreduce", "--tensor-parallel", 2, *MODEL)
RATE, LOW_RATE, QUARTER = "400mbit", "40mbit", "100mbit"


@dataclass(frozen=True)
class Case:
    """What is done to a run, and what the verdict is to say of it: one of `kinds`, and whose node, rank, direction.

    starts: how often it is started, each time for STEPS steps more. What is slow is so in the last start alone.
    """

    says: str
    kinds: tuple[str, ...]
    node: int | None = None
    rank: int | None = None
    direction: str | None = None
    rate: str = RATE
    slow: tuple[str, ...] = ()
    fault: str = "nothing"
    ranks: int = NODES
    nodes: int = NODES
    cluster: tuple[str, ...] = ()  # more flags of virtual_cluster.py
    starts: int = 1
    train: tuple[str, ...] = ("--strategy", "hierarchical-sharded", *MODEL)


HEALTHY = ("none", "compute-bound")
ACCUSES_NOBODY = (*HEALTHY, "network-congestion", "latency-bound")  # where nothing is wrong, and cores are fast
CASES = {
    "clean": Case("nothing", ACCUSES_NOBODY),
    "slow-port-in": Case("node 2 receives at a quarter of the rate", ("slow-link",), 2, None, "in",
                         slow=(f"node2:in:{QUARTER}",)),
    "slow-port-out": Case("node 3 sends at a quarter of the rate", ("slow-link",), 3, None, "out",
                          slow=(f"node3:out:{QUARTER}",)),
    "slow-port": Case("node 1 sends and receives at a quarter of the rate", ("slow-link",), 1, None, "both",
                      slow=(f"node1:{QUARTER}",)),
    "slow-rank": Case("rank 3 computes at half speed", ("straggler",), 3, 3, fault="slow-rank:3"),
    "starved-rank": Case("rank 2's batches arrive late", ("data",), 2, 2, fault="starved-rank:2"),
    "server": Case("reduce-bcast, all else healthy", ("server-hotspot",), 0, None, "in", ranks=9,
                   train=("--strategy", "reduce-bcast", *MODEL)),
    "all-ports-slow": Case("all ports at a tenth of the rate", ("network-congestion",), rate=LOW_RATE),
    "small-messages": Case("a tiny model, exchanged tensor by tensor", ("latency-bound",), fault="small-messages",
                           train=("--strategy", "allreduce", *TINY)),
    "stalling-rank": Case("rank 4 pauses for a second, once in 20 steps", ("straggler",), 4, 4,
                          fault="stalling-rank:4"),
    "few-micro-steps": Case("a pipeline of 4 stages with 2 microbatches", ("pipeline-bubble",), ranks=4, nodes=4,
                            train=(*STAGES, "--grad-accum", 2)),
    "long-stage": Case("stage 1 of 4 has 5 of 8 layers", ("stage-imbalance",), ranks=4, nodes=4,
                       train=(*STAGES, "--grad-accum", 12, "--pipeline-layers", "1,5,1,1")),
    "slow-stage": Case("the host of stage 2 of 4 runs at half speed", ("straggler",), 2, 2, ranks=4, nodes=4,
                       fault="slow-rank:2", train=(*STAGES, "--grad-accum", 12)),
    "slow-part": Case("2 replicas of 2 shards each; rank 1 computes at half speed", ("straggler",), 0, 1,
                      ranks=4, nodes=2, fault="slow-rank:1", train=PARTS),
    "parts-apart": Case("the 2 shards of a model are on 2 hosts", ("tensor-exchange",), ranks=2, nodes=2, train=PARTS),
}  # fmt: skip
# Run only where they are asked for: docs/diagnosis.md has pictures of them besides.
FOR_PICTURES = {
    "one-rank": Case("nothing, one rank", HEALTHY, ranks=1),
    "two-ranks": Case("nothing, two ranks, ports of 10 Gbit/s", HEALTHY, ranks=2, rate="10gbit"),
    "ring": Case("nothing, another strategy", ACCUSES_NOBODY, train=("--strategy", "ring", *MODEL)),
    "two-ranks-slow": Case("all ports at a tenth of the rate, two ranks", ("network-congestion",), ranks=2,
                           rate=LOW_RATE),
    "server-slow": Case("reduce-bcast, nine ranks, ports of half the rate", ("server-hotspot",), 0, None, "in", ranks=9,
                        rate="200mbit", train=("--strategy", "reduce-bcast", *MODEL)),
    "high-lr": Case("--lr 0.3, three hundred times too much", ACCUSES_NOBODY,
                    train=("--strategy", "hierarchical-sharded", *MODEL, "--lr", 0.3)),
    "restarted": Case("taken up again twice, the second time with node 1's port at a quarter of the rate",
                      ("slow-link",), 1, None, "both", slow=(f"node1:{QUARTER}",), starts=3),
}  # fmt: skip
ALL = CASES | FOR_PICTURES


def main():
    settings, rows = parse(), []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else it would leave its virtual cluster to itself
    made_on, file = machine() | versions("numpy", "mpi4py"), RowsFile(settings.json, "number", ALL, summary)
    for name in settings.cases:
        for number in range(1, settings.repeat + 1):
            folder = settings.out / name / str(number)
            if not (folder / "config.json").exists():
                run(ALL[name], folder)
            rows.append(judge(name, number, folder))
            print(line(rows[-1]), flush=True)
            file.put(rows[-1], "virtual hosts", made_on)
    print(summary(rows))


def parse():
    parser = suite_parser(__doc__, "DIR/CASE/NUMBER", CASES, FOR_PICTURES)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each case (3)")
    return parser.parse_args()


def run(case: Case, folder: Path) -> None:
    """Train on a virtual cluster with the case's fault; the run goes to `folder`."""
    for start in range(1, case.starts + 1):
        more = ("--steps", start * STEPS, "--lr-steps", case.starts * STEPS) if case.starts > 1 else ()
        train_once(case, case.slow if start == case.starts else (), folder, *more, *(["--resume"] if start > 1 else []))
    truth = {"kind": case.kinds[0], "node": case.node, "rank": case.rank, "direction": case.direction}
    (folder / "truth.json").write_text(json.dumps(truth) + "\n")


def train_once(case: Case, slow: tuple[str, ...], folder: Path, *flags: object) -> None:
    """One start of a run on a virtual cluster. slow: ports, as virtual_cluster.py takes them."""
    cluster = [sys.executable, SCRIPTS / "virtual_cluster.py", "run", "--nodes", case.nodes, "--ranks", case.ranks]
    cluster += ["--rate", case.rate, *(word for port in slow for word in ("--slow", port)), *case.cluster, "--"]
    command = [sys.executable, SUITES / "faulty_train.py", case.fault, *case.train, *flags, "--out", folder]
    done = subprocess.run([str(word) for word in cluster + command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"fault_suite.py: error: {folder}: exit code {done.returncode}: {done.stderr[-2000:]}")


def judge(name: str, number: int, folder: Path) -> dict:
    """The row of a run of a case."""
    case = ALL[name]
    row = verdict_on(case, folder) | {"case": name, "number": number}
    return row | {"says": case.says, "train": " ".join(map(str, case.train))}


def verdict_on(case: Case, folder: Path) -> dict:
    """The verdict on a run of a case, and whether it is right."""
    found = diagnose(read_run(folder))
    bottleneck = found["bottleneck"]
    right = bottleneck["kind"] in case.kinds
    if case.kinds[0] != "none":
        right &= bottleneck["node"] == case.node and bottleneck["rank"] == case.rank
        right &= bottleneck["direction"] == (None if case.direction == "both" else case.direction)
    else:
        right &= bottleneck["node"] is None and bottleneck["rank"] is None
    return bottleneck | {"right": bool(right), "verdict": found["verdict"]}


def summary(rows: list[dict]) -> str:
    right = sum(row["right"] for row in rows)
    return f"{right} of {len(rows)} runs right: kind, node, rank and direction."


def line(row: dict) -> str:
    return f"{row['case']:<16} {'right' if row['right'] else 'WRONG'}  {row['kind']:<19} {row['verdict']}"


if __name__ == "__main__":
    main()
