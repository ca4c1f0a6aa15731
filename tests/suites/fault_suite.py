"""Whether the verdict finds what is wrong: runs with one known fault each on a virtual cluster, each diagnosed.

    sudo python tests/suites/fault_suite.py --out runs/faults --json faults.json
    sudo python tests/suites/fault_suite.py --out runs/faults --cases slow-port-in,slow-rank --repeat 1

Five hosts of one rank each; two where a server is the fault, as then more comes in to its node than goes out. Nothing
but traces and config.json tells diagnose.py what was done to a run: its folder holds `truth.json` for this script
alone. Right is a verdict whose kind, node, rank and direction are the fault's. Runs that are there already are
diagnosed and not run again.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.diagnose import diagnose
from scripts.machine.host import machine, versions
from tests.suites.faults.named_cases import cases_of
from traces import read_run

NODES = 5
SUITES = Path(__file__).parent
SCRIPTS = SUITES.parents[1] / "scripts"
TRAIN = ("--eval-every", 0, "--steps", 42)
MODEL = ("--n-layer", 2, "--n-head", 4, "--n-embd", 160, "--context", 64, "--seq-len", 64, "--batch-size", 12, *TRAIN)
TINY = ("--n-layer", 1, "--n-head", 2, "--n-embd", 32, "--context", 32, "--seq-len", 32, "--batch-size", 1, *TRAIN)
RATE, LOW_RATE, QUARTER = "400mbit", "40mbit", "100mbit"


@dataclass(frozen=True)
class Case:
    """What is done to a run, and what the verdict is to say of it: one of `kinds`, and whose node, rank, direction."""

    says: str
    kinds: tuple[str, ...]
    node: int | None = None
    rank: int | None = None
    direction: str | None = None
    rate: str = RATE
    slow: tuple[str, ...] = ()
    fault: str = "nothing"
    ranks: int = NODES
    train: tuple[str, ...] = ("--strategy", "hierarchical-sharded", *MODEL)


CASES = {
    "clean": Case("nothing", ("none", "compute-bound")),
    "slow-port-in": Case("node 2 receives at a quarter of the rate", ("slow-link",), 2, None, "in",
                         slow=(f"node2:in:{QUARTER}",)),
    "slow-port-out": Case("node 3 sends at a quarter of the rate", ("slow-link",), 3, None, "out",
                          slow=(f"node3:out:{QUARTER}",)),
    "slow-port": Case("node 1 does both at a quarter of the rate", ("slow-link",), 1, None, "both",
                      slow=(f"node1:{QUARTER}",)),
    "slow-rank": Case("rank 3 computes at half the speed", ("straggler",), 3, 3, fault="slow-rank:3"),
    "starved-rank": Case("rank 2's batches come late", ("data",), 2, 2, fault="starved-rank:2"),
    "server": Case("reduce-bcast, all else healthy", ("server-hotspot",), 0, None, "in", ranks=9,
                   train=("--strategy", "reduce-bcast", *MODEL)),
    "all-ports-slow": Case("all ports at a tenth of the rate", ("network-congestion",), rate=LOW_RATE),
    "small-messages": Case("a tiny model, exchanged tensor by tensor", ("latency-bound",), fault="small-messages",
                           train=("--strategy", "allreduce", *TINY)),
    "stalling-rank": Case("rank 4 stands still for a second, once in 20 steps", ("straggler",), 4, 4,
                          fault="stalling-rank:4"),
}  # fmt: skip


def main():
    settings = parse()
    rows = []
    for name in settings.cases:
        for number in range(1, settings.repeat + 1):
            folder = settings.out / name / str(number)
            if not (folder / "config.json").exists():
                run(CASES[name], folder)
            rows.append(judge(name, CASES[name], folder))
            print(line(rows[-1]), flush=True)
    right = sum(row["right"] for row in rows)
    print(f"{right} of {len(rows)} right")
    if settings.json:
        report = {"rows": rows, "right": right, "machine": machine() | versions("numpy", "mpi4py")}
        settings.json.write_text(json.dumps(report, indent=1) + "\n")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the runs go to DIR/CASE/NUMBER")
    parser.add_argument("--cases", type=cases_of(CASES), default=list(CASES), help=f"of {', '.join(CASES)} (all)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each case (3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all verdicts to this file")
    return parser.parse_args()


def run(case: Case, folder: Path) -> None:
    """Train on a virtual cluster with the case's fault; the run goes to `folder`."""
    cluster = [sys.executable, SCRIPTS / "virtual_cluster.py", "run", "--nodes", NODES, "--ranks", case.ranks]
    cluster += ["--rate", case.rate, *(word for port in case.slow for word in ("--slow", port)), "--"]
    command = [sys.executable, SUITES / "faulty_train.py", case.fault, *case.train, "--out", folder]
    done = subprocess.run([str(word) for word in cluster + command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"fault_suite.py: error: {folder}: exit code {done.returncode}: {done.stderr[-2000:]}")
    truth = {"kind": case.kinds[0], "node": case.node, "rank": case.rank, "direction": case.direction}
    (folder / "truth.json").write_text(json.dumps(truth) + "\n")


def judge(name: str, case: Case, folder: Path) -> dict:
    """The verdict on a run, and whether it is right."""
    found = diagnose(read_run(folder))
    bottleneck = found["bottleneck"]
    right = bottleneck["kind"] in case.kinds
    if case.kinds[0] != "none":
        right &= bottleneck["node"] == case.node and bottleneck["rank"] == case.rank
        right &= bottleneck["direction"] == (None if case.direction == "both" else case.direction)
    else:
        right &= bottleneck["node"] is None and bottleneck["rank"] is None
    return {"case": name, "says": case.says, "right": bool(right), "verdict": found["verdict"], **bottleneck}


def line(row: dict) -> str:
    return f"{row['case']:<16} {'right' if row['right'] else 'WRONG'}  {row['kind']:<19} {row['verdict']}"


if __name__ == "__main__":
    main()
