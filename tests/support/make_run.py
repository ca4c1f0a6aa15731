"""Run folders with known times, for the tests of traces/ and scripts/plot.py."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from traces.record import files
from traces.record.files import COUNTERS
from traces.record.phases import INDEX, STEP

MS = 1_000_000
# Of the one rank of a run.
IDENTITY = {"rank": 0, "ranks": 1, "node": 0, "host": "a", "local_rank": 0, "strategy": "sliced"}


def write_run(
    folder, spans, nodes, strategy="reduce-bcast", log=None, offsets_ns=None, links=None, samples=None,
    parameters=124439808, places=None, **settings,
) -> Path:  # fmt: skip
    """Write a run folder. spans: per rank a list of (step, phase, root, start_ms, end_ms), on rank 0's clock; bytes may
    follow. links: as in config.json; places: per rank what its trace says of a mesh; samples: per node a list of
    (time_ms, bytes in, bytes out) of its counters.
    """
    folder = Path(folder)
    offsets_ns = offsets_ns or [0] * len(nodes)
    identities = identify(nodes, strategy)
    identities = [own | (places[rank] if places else {}) for rank, own in enumerate(identities)]
    for identity, rank_spans, offset in zip(identities, spans, offsets_ns, strict=True):
        clock = {"offset_ns": offset, "error_ns": 3000 if offset else 0}
        path = files.trace_path(folder / "traces", identity["rank"])
        path.parent.mkdir(parents=True, exist_ok=True)
        header = json.dumps(files.header_of(identity, clock)).encode()
        path.write_bytes(header + b"\n" + records_of(rank_spans, offset).tobytes())
    config = {
        "format": files.RUN_FORMAT,
        "settings": {"strategy": strategy, "server": "colocated", **settings},
        "mpi_library": "MPICH Version:      5.0.1\nMPICH Release date: 2025",
        "parameters": parameters,
        "ranks": identities,
        "links": links or [],
    }
    (folder / "config.json").write_text(json.dumps(config))
    for node, rows in enumerate(samples or []):
        write_counters(folder / "traces", node, rows)
    rows = log if log is not None else default_log(spans)
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_counters(folder, node: int, rows) -> None:
    records = np.array([(round(ms * MS), into, out, 0) for ms, into, out in rows], COUNTERS)
    header = {"format": files.COUNTERS_FORMAT, "version": files.VERSION, "node": node, "host": f"cn{node:02d}"}
    header |= {"ports": ["eth0"], "clock": {"offset_ns": 0, "error_ns": 0, "at_ns": 0}}
    path = files.counters_path(folder, node)
    path.write_bytes(json.dumps(header).encode() + b"\n" + records.tobytes())


def with_counters(run, nodes):
    """Node n's port: (n+1) MB/s in, twice as much out, from 10 ms to 110 ms after the start; then nothing."""
    begin = min(trace.records["start"].min() for trace in run.ranks)
    counters = []
    for node in nodes:
        bytes_in = np.array([0, (node + 1) * 100_000, (node + 1) * 100_000])
        rows = zip(begin + np.array([10, 110, 120]) * MS, bytes_in, 2 * bytes_in, 0 * bytes_in, strict=True)
        records = np.array([tuple(row) for row in rows], COUNTERS)
        counters.append(SimpleNamespace(node=node, host=f"cn{node:02d}", ports=["eth0"], records=records))
    return replace(run, counters=counters)


def identify(nodes, strategy):
    job = {"ranks": len(nodes), "strategy": strategy}
    return [
        {"rank": rank, "node": node, "host": f"cn{node:02d}", "local_rank": nodes[:rank].count(node)} | job
        for rank, node in enumerate(nodes)
    ]


def records_of(spans, offset_ns=0):
    rows = [
        (step, INDEX[phase], root, round(start * MS) - offset_ns, round(end * MS) - offset_ns, sum(size))
        for step, phase, root, start, end, *size in spans
    ]
    return np.array(rows, files.RECORD)


def default_log(spans, tokens=4096):
    """One row a step with rank 0's step time, a falling loss, and a validation loss every tenth step."""
    noise = np.random.default_rng(0)
    rows = []
    for step, _, _, start, end, *_ in (span for span in spans[0] if span[1] == STEP):
        seconds = (end - start) / 1000
        loss = 3 + 6 * np.exp(-step / 15) + noise.normal(0, 0.1)
        row = {"step": step, "loss": loss, "tokens": tokens, "step_s": seconds, "tokens_per_s": tokens / seconds}
        if step % 10 == 0:
            row["val_loss"] = 3.1 + 6 * np.exp(-step / 15)
        rows.append(row)
    return rows


def three_ranks(steps=1, root=0):
    """Per step of 100 ms: compute 10, 14 and 30 ms, then a reduce until 50, an update on the root, a bcast until 80."""
    spans = [[], [], []]
    for step in range(1, steps + 1):
        zero = 100 * step
        for rank, compute in enumerate((10, 14, 30)):
            end = 50 if rank == root else 45
            spans[rank] += [
                (step, "forward", -1, zero, zero + compute),
                (step, "reduce", root, zero + compute, zero + end),
            ]
            if rank == root:
                spans[rank].append((step, "update", -1, zero + 50, zero + 60))
            spans[rank].append((step, "bcast", root, zero + (60 if rank == root else 45), zero + 80))
            spans[rank].append((step, STEP, -1, zero, zero + 84))
    return spans


class Cluster:
    """Ranks with a clock each, in ms; every operation moves the clocks on and writes spans."""

    def __init__(self, nodes, seed=0):
        self.nodes = nodes
        self.clock = np.zeros(len(nodes))
        self.spans = [[] for _ in nodes]
        self.random = np.random.default_rng(seed)

    def work(self, step, phase, ms, ranks=None, slow=()):
        for rank in ranks if ranks is not None else range(len(self.nodes)):
            factor = self.random.normal(1, 0.03) * (1.3 if rank in slow else 1)
            self.span(step, phase, -1, rank, self.clock[rank], self.clock[rank] + ms * factor)

    def collective(self, step, phase, ms, root=-1):
        """All enter when they come and leave when the last has come and the data has moved."""
        ready = self.clock[root] if phase == "bcast" and root >= 0 else self.clock.max()
        for rank in range(len(self.nodes)):
            begin = self.clock[rank]
            end = max(ready, begin) + ms * self.random.normal(1, 0.02)
            if phase == "reduce" and rank != root:
                end = begin + ms * self.random.normal(0.8, 0.02)
            self.span(step, phase, root, rank, begin, end)

    def span(self, step, phase, root, rank, begin, end):
        self.spans[rank].append((step, phase, root, begin, end))
        self.clock[rank] = end

    def step(self, step, body):
        begin = self.clock.copy()
        body(step)
        for rank, start in enumerate(begin):
            self.spans[rank].append((step, STEP, -1, start, self.clock[rank] + 0.3))
        self.clock += 0.5


def simulate(strategy, nodes, steps=24, seed=0, dedicated=False, slow=()):
    """Spans of a plausible run. Times: compute 20 ms, all gradients into one rank 24 ms a further node or rank."""
    cluster = Cluster(nodes, seed)
    ranks = range(len(nodes))
    full = 6.0 * max(2, len(set(nodes)))

    def body(step):
        workers = [rank for rank in ranks if rank or not dedicated]
        cluster.work(step, "data", 0.4, workers)
        cluster.work(step, "forward", 7, workers, slow)
        cluster.work(step, "backward", 14, workers, slow)
        if strategy == "reduce-bcast":
            cluster.collective(step, "reduce", full, 0)
            cluster.work(step, "update", 4, [0])
            cluster.collective(step, "bcast", full * 0.4, 0)
        elif strategy == "sliced":
            for root in ranks:
                cluster.collective(step, "reduce", full * 0.6 / len(ranks), root)
            cluster.work(step, "update", 4 / len(ranks))
            for root in ranks:
                cluster.collective(step, "bcast", full * 0.3 / len(ranks), root)
        elif strategy == "reduce-scatter":
            cluster.collective(step, "reduce_scatter", 4)
            cluster.work(step, "update", 4 / len(ranks))
            cluster.collective(step, "allgather", 3)
        elif strategy == "allreduce":
            cluster.collective(step, "allreduce", 7.5)
            cluster.work(step, "update", 4)

    for step in range(1, steps + 1):
        cluster.step(step, body)
    return cluster.spans
