"""Run folders of a cluster with one thing wrong: five nodes, nine ranks, the server alone on the first.

Times follow from a small model of its own: a rank computes, all meet in an exchange, which lasts as long as the busiest
port needs for its bytes. Computing varies by 10 % for all ranks together and by 8 % for each.
"""

from dataclasses import dataclass, field

import numpy as np

from tests.support.make_run import Cluster, write_run
from tests.support.pipeline_runs import make_shared
from traces import read_run

NODES = [0, 1, 1, 2, 2, 3, 3, 4, 4]
LATENCY_MS = 0.1
# Vectors through the ports of the server's node and of the others: (phase, root, server in, out, other in, out).
CALLS = {
    "hierarchical": [("allreduce", -1, 1.6, 1.6, 1.6, 1.6)],
    "hierarchical-sharded": [("reduce_scatter", -1, 0.8, 0.8, 0.8, 0.8), ("allgather", -1, 0.8, 0.8, 0.8, 0.8)],
    "reduce-bcast": [("reduce", 0, 3.3, 0.8, 0.8, 1.5), ("bcast", 0, 0.0, 2.4, 1.6, 1.0)],
    "none": [],
}


@dataclass
class Setting:
    """slow: rank to the factor of its computing; data_ms: rank to milliseconds a step; stall: (rank, in so many
    steps, ms); ports: (node, way) to bytes/s, of all others `rate`; probed: what the probe saw, where that differs.
    """

    strategy: str = "hierarchical"
    nodes: list = field(default_factory=lambda: NODES)
    steps: int = 42
    first: int = 1  # step
    compute_ms: float = 100.0
    rate: float = 50e6
    vector: float = 10e6
    calls: int = 1
    slow: dict = field(default_factory=dict)
    data_ms: dict = field(default_factory=dict)
    stall: tuple = (-1, 1, 0.0)
    ports: dict = field(default_factory=dict)
    probed: dict = field(default_factory=dict)
    counted: bool = True
    seed: int = 0


def make(folder, **changes):
    """Write the run of a Setting and read it back; with a mesh, that of a Shared."""
    if "mesh" in changes:
        return make_shared(folder, **changes)
    setting = Setting(**changes)
    cluster = PortCluster(setting)
    for step in range(setting.first, setting.first + setting.steps):
        cluster.step(step, cluster.train)
    links = cluster.links() if len(set(setting.nodes)) > 1 else None
    samples = cluster.samples if setting.counted else None
    size = int(setting.vector) // 4
    return read_run(
        write_run(folder, cluster.spans, setting.nodes, setting.strategy, links=links, samples=samples, parameters=size)
    )


class PortCluster(Cluster):
    def __init__(self, setting: Setting):
        super().__init__(setting.nodes, setting.seed)
        self.setting = setting
        self.node_numbers = sorted(set(setting.nodes))
        self.totals = {node: np.zeros(2) for node in self.node_numbers}
        self.samples = [[(0.0, 0, 0)] for _ in self.node_numbers]

    def rate(self, node: int, way: str) -> float:
        return self.setting.ports.get((node, way), self.setting.rate)

    def links(self) -> list[dict]:
        result = []
        for node in self.node_numbers:
            rates = {way: self.setting.probed.get((node, way), self.rate(node, way)) for way in ("in", "out")}
            noisy = {way: rate * self.random.normal(1, 0.03) for way, rate in rates.items()}
            link = {"node": node, "host": f"cn{node:02d}", "latency_s": LATENCY_MS * 1e-3, **noisy}
            result.append(link | {"both": min(noisy.values())})
        return result

    def train(self, step: int) -> None:
        setting, together = self.setting, max(0.7, self.random.normal(1, 0.1))
        victim, every, stall_ms = setting.stall
        for rank in range(len(setting.nodes)):
            own = together * max(0.7, self.random.normal(1, 0.08)) * setting.slow.get(rank, 1.0)
            stall = stall_ms if rank == victim and step % every == 0 else 0.0
            self.work_ms(step, "data", rank, setting.data_ms.get(rank, 0.05))
            self.work_ms(step, "forward", rank, setting.compute_ms / 3 * own + stall)
            self.work_ms(step, "backward", rank, setting.compute_ms * 2 / 3 * own)
        for call in CALLS[setting.strategy]:
            for _ in range(setting.calls):
                self.exchange(step, *call)
            self.update(step, call[0])
        self.meet(step)

    def work_ms(self, step, phase, rank, ms):
        self.span(step, phase, -1, rank, self.clock[rank], self.clock[rank] + ms)

    def update(self, step, after):
        for rank in [0] if self.setting.strategy == "reduce-bcast" else range(len(self.nodes)):
            if after != "bcast" and after != "allgather":
                self.work_ms(step, "update", rank, 2.0)

    def exchange(self, step, phase, root, server_in, server_out, other_in, other_out):
        size = self.setting.vector / self.setting.calls
        bytes_of = {node: np.array([other_in, other_out]) * size for node in self.node_numbers}
        bytes_of[0] = np.array([server_in, server_out]) * size
        rates = {node: np.array([self.rate(node, "in"), self.rate(node, "out")]) for node in self.node_numbers}
        moving_ms = max(1e3 * float((bytes_of[node] / rates[node]).max()) for node in self.node_numbers)
        moving_ms += 2 * len(self.nodes) * LATENCY_MS
        ready = self.clock[root] if phase == "bcast" and root >= 0 else self.clock.max()
        for rank, node in enumerate(self.nodes):
            begin, end = self.clock[rank], ready + moving_ms * self.random.normal(1, 0.02)
            self.spans[rank].append((step, phase, root, begin, end, int(size)))
            self.clock[rank] = end
            if rank == self.nodes.index(node):
                self.sample(node, max(begin, ready), end, bytes_of[node])

    def sample(self, node, begin, end, amounts):
        for moment, passed in ((begin, 0.0), (end, amounts)):
            self.totals[node] += passed
            self.samples[node].append((moment, *np.rint(self.totals[node]).astype(int)))

    def meet(self, step):
        end = self.clock.max() + 1.0
        for rank in range(len(self.nodes)):
            self.span(step, "wait", -1, rank, self.clock[rank], end)
