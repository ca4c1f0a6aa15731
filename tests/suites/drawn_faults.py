"""Whether the verdict is right on clusters that nobody chose: drawn hosts, rates, bursts, strategies, a fault or none.

    sudo python tests/suites/drawn_faults.py --count 30 --out runs/drawn --json drawn.json
    sudo python tests/suites/drawn_faults.py --count 10 --out runs/drawn-gpt2 --model gpt2 --seed 8

3 to 8 virtual hosts under this Python's MPI, ports of 15 to 400 Mbit/s that pass 32 KiB to 2 MiB at once after a pause,
one or two ranks a host, one of three strategies and two models; nothing wrong in four of ten, else one fault: a port
that is slow in, out or both, a rank that computes at half speed, a rank whose batches arrive late. --model gpt2:
9 ranks on 5 hosts train 12 layers and GPT-2's vocabulary, narrow enough for a step of about a second.

Drawn again is what could show nothing: a fault that a step would not notice, a step of many seconds. Right is the
fault's kind with its node, rank and direction; and of a healthy run any verdict that accuses nobody: a server's port is
no fault. Exit code 1: a healthy run was accused, or less than 97% were right.
"""

import argparse
import json
import math
import random
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.cluster.launch import place_ranks
from scripts.machine.host import machine, versions
from tests.suites.fault_suite import ACCUSES_NOBODY, Case, run, verdict_on

STEPS = 24
ENOUGH = 0.97  # of all runs
LATE_S = 0.2  # faulty_train.py's
CORES, MOST_RANKS = 2, 10
KINDS = None, "slow-link", "straggler", "data"
# Bytes through a port in a step over the gradients' bytes, of strategies with so many ranks a node.
AMOUNT = {"hierarchical-sharded": lambda q: 1.7, "reduce-scatter": lambda q: 1.7 * q, "reduce-bcast": lambda q: 2.5 * q}


@dataclass(frozen=True)
class Model:
    """bytes: of its gradients. core_s: about the core's seconds of a rank's step. chances: of each of KINDS."""

    flags: tuple
    bytes: float
    core_s: float
    chances: tuple[int, ...] = (4, 4, 1, 1)


def model_flags(layers: int, heads: int, channels: int, batch: int, *more) -> tuple:
    shape = ("--n-layer", layers, "--n-head", heads, "--n-embd", channels, "--context", 64, "--seq-len", 64)
    return *shape, "--batch-size", batch, "--eval-every", 0, "--steps", STEPS, *more


MODELS = {
    "small": Model(model_flags(1, 4, 160, 16), 1.5e6, 0.05),
    "larger": Model(model_flags(4, 4, 256, 8), 12.9e6, 0.2),
    # Beside its exchange a batch that comes LATE_S late would not be noticed.
    "gpt2": Model(model_flags(12, 12, 96, 1, "--vocab-size", 50257), 24.7e6, 0.2, (4, 4, 1, 0)),
}


@dataclass(frozen=True)
class Drawn:
    """A cluster and what is wrong there: kind None for nothing; rate in bits/s, burst in bytes."""

    model: str
    strategy: str
    nodes: int
    placement: tuple[int, ...]
    rate: float
    burst: float
    kind: str | None
    node: int | None
    rank: int | None
    direction: str | None
    slowdown: float

    @property
    def compute_s(self) -> float:
        return MODELS[self.model].core_s * max(1.0, sum(self.placement) / CORES)

    def exchange_s(self, rate: float) -> float:
        """About a step's, through a port of `rate` bits/s; what a burst takes is saved up while computing."""
        amount = AMOUNT[self.strategy](max(self.placement)) * MODELS[self.model].bytes
        return max(0.0, amount - min(self.burst, self.compute_s * rate / 8)) / (rate / 8)

    def is_worth_a_run(self) -> bool:
        """The step is not too long, and the fault costs a part of it that is worth naming."""
        healthy_s, slow_s = self.exchange_s(self.rate), self.exchange_s(self.rate * self.slowdown)
        if self.kind == "slow-link":
            return slow_s < 5 and slow_s - healthy_s > 0.25 * (self.compute_s + slow_s)
        if self.kind == "straggler":
            return healthy_s < self.compute_s
        return healthy_s < 3 and (self.kind != "data" or self.compute_s + healthy_s < 6 * LATE_S)

    def case(self) -> Case:
        slow, fault = (), "nothing"
        if self.kind == "slow-link":
            way = "" if self.direction == "both" else f":{self.direction}"
            slow = (f"node{self.node}{way}:{self.rate * self.slowdown / 1e3:.0f}kbit",)
        elif self.kind:
            fault = f"{'slow' if self.kind == 'straggler' else 'starved'}-rank:{self.rank}"
        kinds = (self.kind,) if self.kind else (*ACCUSES_NOBODY, "server-hotspot")
        return Case(
            "", kinds, self.node, self.rank, self.direction, f"{self.rate / 1e3:.0f}kbit", slow, fault,
            sum(self.placement), self.nodes, ("--burst", f"{self.burst:.0f}", *self._placement_flags()),
            train=("--strategy", self.strategy, *MODELS[self.model].flags),
        )  # fmt: skip

    def _placement_flags(self) -> tuple:
        most, others = self.placement[0], self.placement[1]
        return ("--first-node", most) if most > others else ("--ranks-per-node", most)


def draw(random: random.Random, model: str | None) -> Drawn:
    kind = random.choices(KINDS, MODELS[model or "small"].chances)[0]
    while True:
        drawn = _draw(random, model, kind)
        if drawn.is_worth_a_run():
            return drawn


def _draw(random: random.Random, model: str | None, kind: str | None) -> Drawn:
    if model == "gpt2":
        nodes, placement = 5, place_ranks(9, 5, 2, None)
    else:
        nodes = random.randint(3, 8)
        shapes = (nodes, 1, None), (nodes + 1, None, 2), (2 * nodes - 1, 2, None)  # ranks, on each node, on the first
        placements = [place_ranks(ranks, nodes, each, first) for ranks, each, first in shapes if ranks <= MOST_RANKS]
        placement = random.choice(placements)
    rank = random.randrange(sum(placement))
    node = next(node for node in range(nodes) if rank < sum(placement[: node + 1]))
    return Drawn(
        model or random.choice(("small", "larger")),
        random.choice(("reduce-bcast", "reduce-scatter", "hierarchical-sharded")),
        nodes, tuple(placement), _log_uniform(random, 15e6, 400e6), _log_uniform(random, 32 << 10, 2 << 20), kind,
        node if kind else None,
        rank if kind in ("straggler", "data") else None,
        random.choice(("in", "out", "both")) if kind == "slow-link" else None,
        random.uniform(0.15, 0.45) if kind == "slow-link" else 1.0,
    )  # fmt: skip


def _log_uniform(random: random.Random, low: float, high: float) -> float:
    return math.exp(random.uniform(math.log(low), math.log(high)))


def main():
    settings = parse()
    print(f"seed {settings.seed}", flush=True)
    numbers, rows = random.Random(settings.seed), []
    for number in range(1, settings.count + 1):
        drawn = draw(numbers, settings.model)
        folder = settings.out / str(number)
        if not (folder / "config.json").exists():
            run(drawn.case(), folder)
        rows.append(judge(drawn, number, folder))
        print(line(rows[-1]), flush=True)
        if settings.json:
            keep(settings, rows, json.loads((folder / "config.json").read_text())["mpi_library"])
    print(summary(rows))
    accused, right = sum(row["accused"] for row in rows), sum(row["right"] for row in rows)
    raise SystemExit(1 if accused or right < ENOUGH * len(rows) else 0)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    seed = random.SystemRandom().randrange(10**6)
    parser.add_argument("--seed", type=int, default=seed, help="of the draw (a new one)")
    parser.add_argument("--count", type=int, default=30, help="runs (30)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the runs go to DIR/NUMBER")
    parser.add_argument("--model", choices=MODELS, help="this one alone (small, larger)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="put the rows into this file, beside other sets")
    return parser.parse_args()


def keep(settings, rows: list[dict], mpi: str) -> None:
    """{name of a set: its seed, summary, rows, and what it was made on}: a set is one MPI library's, of one --model."""
    name = f"{re.match('[A-Za-z ]+(?= v?[0-9])', mpi)[0]}, {settings.model or 'small and larger'}"
    made_on = machine() | {"mpi": mpi} | versions("numpy", "mpi4py")
    sets = json.loads(settings.json.read_text()) if settings.json.exists() else {}
    sets[name] = {"seed": settings.seed, "summary": summary(rows), "made_on": made_on, "rows": rows}
    settings.json.write_text(json.dumps(sets, indent=1) + "\n")


def judge(drawn: Drawn, number: int, folder: Path) -> dict:
    """The row of a run: what was drawn, the verdict, whether it is right, and whether it accuses where nothing is."""
    found = verdict_on(drawn.case(), folder)
    if drawn.kind is None:
        names_the_server = found["kind"] == "server-hotspot" and drawn.strategy == "reduce-bcast" and found["node"] == 0
        found["right"] = names_the_server or found["kind"] in ACCUSES_NOBODY
    facts = {"number": number, "accused": drawn.kind is None and not found["right"]}
    return facts | {"drawn": asdict(drawn), "found": found, "right": found["right"]}


def summary(rows: list[dict]) -> str:
    right, healthy = sum(row["right"] for row in rows), [row for row in rows if row["drawn"]["kind"] is None]
    accused = sum(row["accused"] for row in rows)
    return f"{right} of {len(rows)} runs right; of {len(healthy)} healthy ones {accused} accused."


def line(row: dict) -> str:
    drawn, found = row["drawn"], row["found"]
    cluster = f"{drawn['nodes']} hosts {sum(drawn['placement']):>2} ranks {drawn['rate'] / 1e6:>4.0f} Mbit/s"
    cluster += f" {drawn['burst'] / 1024:>5.0f} KiB {drawn['model']:<6} {drawn['strategy']:<20}"
    truth = f"{drawn['kind'] or 'healthy'} {place(drawn)}"
    return f"{row['number']:>3} {'right' if row['right'] else 'WRONG'} {cluster} {truth:<28} {found['verdict']}"


def place(where: dict) -> str:
    parts = (f"{name} {where[name]}" for name in ("node", "rank", "direction") if where[name] is not None)
    return ", ".join(parts)


if __name__ == "__main__":
    main()
