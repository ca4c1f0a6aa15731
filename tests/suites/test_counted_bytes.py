"""What the ports of virtual hosts count: the bytes that cross them, in every step, whatever the ports' rate."""

import sys

import pytest

from dist.cost.model_parallel import head_bytes, pipeline_bytes
from tests.suites.test_virtual_cluster import SCRIPTS, needs_cluster, result_of, run
from traces import read_run
from traces.read.analysis import measure
from traces.read.traffic import WAYS, node_traffic

# 8 MB to the rank beside, then to the other node, with what left this node's port meanwhile.
CROSSING = """
import json
import numpy as np
from pathlib import Path
from dist.world import start_world
world = start_world()
comm, data = world.comm, np.ones(8_000_000, np.uint8)
left = lambda: int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())
sent = {}
for name, other in (("warm up", 2), ("within", 1), ("across", 2)):
    comm.Barrier()
    before = left()
    if world.rank == 0: comm.Send(data, other)
    if world.rank == other: comm.Recv(data, 0)
    comm.Barrier()
    sent[name] = (left() - before) / data.nbytes
world.print("RESULT", json.dumps(sent))
"""
EMBEDDING, ROWS, MICRO_STEPS = 256 * 128 * 4, 4 * 64 * 128 * 4, 4  # bytes of float32; bytes of a micro-step's rows
SETTINGS = {
    "pipeline-parallel": 2, "strategy": "hierarchical", "grad-accum": MICRO_STEPS, "batch-size": 4, "seq-len": 64,
    "n-layer": 2, "n-head": 4, "n-embd": 128, "steps": 20, "eval-every": 0,
}  # fmt: skip


@needs_cluster
@pytest.mark.parametrize(
    ("burst", "least", "most"), [([], 1.0, 1.02), (["--burst", "32KiB"], 1.04, 1.07)], ids=["packets", "frames"]
)
def test_bytes_cross_the_ports(tmp_path, burst, least, most):
    """8 MB to another host leave through the port, 8 MB to a rank of the same host do not.

    Their headers count where the shaper cuts packets into frames; else the port sees one for up to 64 KiB.
    """
    sent = result_of(tmp_path, CROSSING, "--nodes", 2, "--ranks", 4, "--rate", "400mbit", *burst)
    assert least < sent["across"] < most
    assert sent["within"] < 0.02


@pytest.mark.any_mpi
@needs_cluster
@pytest.mark.parametrize("rate", ["400mbit", "10gbit"])
def test_the_bytes_between_two_stages(tmp_path, rate):
    """Of each step, in and out of both hosts: rows of every micro-step and the head, and at most 2% for all else."""
    command = [sys.executable, str(SCRIPTS / "train.py"), "--out", str(tmp_path / "run")]
    command += [str(word) for name, value in SETTINGS.items() for word in (f"--{name}", value)]
    ended = run("run", "--nodes", 2, "--ranks", 2, "--rate", rate, command=command)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    traced = read_run(tmp_path / "run")
    traffic = node_traffic(traced, measure(traced))
    each_way = (pipeline_bytes(2, ROWS, MICRO_STEPS) + head_bytes(2, EMBEDDING)) / 2
    for way in WAYS:
        assert traffic.step_bytes(way) / each_way == pytest.approx([1.01, 1.01], abs=0.01), way
