"""bench_exchange.py: the ports' counters, exact sums, every contender, wrong sums, mistakes, figure, JSON."""

import copy
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import launch
from test_virtual_cluster import needs_cluster
from test_virtual_cluster import run as run_on_cluster

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))
BENCH = str(SCRIPTS / "bench_exchange.py")

from exchange_contenders import Allreduce, chosen, makers  # noqa: E402
from exchange_rounds import measure  # noqa: E402
from exchange_table import lower_bound_s, summarize, tables  # noqa: E402
from exchange_values import LARGEST, PERIOD, fill, is_filled, rank_values, summed_values  # noqa: E402

from dist.buffers import OwnBuffers  # noqa: E402
from dist.ports import Ports  # noqa: E402
from dist.wire import round_to_bfloat16, widen  # noqa: E402
from dist.world import world_of  # noqa: E402
from gpt2.errors import UserError  # noqa: E402
from strategies import STRATEGIES, Bucketed  # noqa: E402
from traces import exchange_bars  # noqa: E402

HAS_TORCH = importlib.util.find_spec("torch") is not None

# --- ports ---


def write_tree(folder: Path, files: dict) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return folder


def interface(name, kind, bytes_in, bytes_out, **more):
    counters = {"statistics/rx_bytes": bytes_in, "statistics/tx_bytes": bytes_out, "type": kind, **more}
    return {f"class/net/{name}/{file}": text for file, text in counters.items()}


def infiniband(device, port, received, sent):
    folder = f"class/infiniband/{device}/ports/{port}/counters"
    return {f"{folder}/port_rcv_data": received, f"{folder}/port_xmit_data": sent}


def test_a_hosts_ports(tmp_path):
    """Each byte once: two devices under a bond, IP over InfiniBand, containers, and a port without counters."""
    system = write_tree(
        tmp_path,
        interface("lo", 772, 10**9, 10**9)
        | interface("eth0", 1, 1000, 2000, device="")
        | interface("eth1", 1, 100, 200, device="")
        | interface("bond0", 1, 1100, 2200, lower_eth0="", lower_eth1="")
        | interface("ib0", 32, 10**8, 10**8, device="")
        | interface("veth1", 1, 10**7, 10**7)
        | interface("docker0", 1, 10**7, 10**7, lower_veth1="")
        | infiniband("mlx5_0", 1, 10, 20)
        | infiniband("mlx5_0", 2, "N/A (no PMA)", "N/A (no PMA)"),
    )
    (system / "class/net/bonding_masters").write_text("bond0\n")  # a file among the folders
    ports = Ports(system)
    assert ports.names == ["eth0", "eth1", "mlx5_0:1"]
    assert ports.read() == (1100 + 4 * 10, 2200 + 4 * 20)
    write_tree(system, infiniband("mlx5_0", 1, 11, 20) | interface("eth1", 1, 150, 207, device=""))
    assert ports.read() == (1150 + 4 * 11, 2207 + 4 * 20)


def test_a_containers_ports(tmp_path):
    """Without devices of its own, what it reaches the others by is virtual."""
    ports = Ports(write_tree(tmp_path, interface("lo", 772, 5, 5) | interface("eth0", 1, 30, 40)))
    assert (ports.names, ports.read()) == (["eth0"], (30, 40))
    nothing = Ports(tmp_path / "none")
    assert (nothing.names, nothing.read()) == ([], (0, 0))


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
    round_to_bfloat16(every_whole_number, half, np.empty(LARGEST + 1, np.uint32))
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
    fill(flat, summed_values([True, True, False]))
    assert not is_filled(flat, summed_values([True] * 3))
    fill(flat, summed_values([True] * 3))
    assert not is_filled(np.roll(flat, 1), summed_values([True] * 3))


# --- contenders ---


def placements(comm):
    """The ranks as one node and as nodes of two, of which the last may have one."""
    for per_node in sorted({2, comm.size}):
        yield world_of(comm, comm.Split(comm.rank // per_node, comm.rank))


@pytest.mark.ranks(1, 3)
def test_every_contender_sums_right(comm):
    """Each strategy but none, our own exchanges in bfloat16 too, the server in both places, MPI's collectives."""
    names = chosen("all", comm.size)
    expected = set(STRATEGIES) - {"none"}
    expected |= {f"{name}/bfloat16" for name, kind in STRATEGIES.items() if issubclass(kind, Bucketed)}
    expected |= {"reduce-bcast/dedicated"} if comm.size > 1 else set()
    assert {name for name in names if not name.startswith("MPI_")} == expected
    for world in placements(comm):
        own_buffers = OwnBuffers(world, 16 * 1000 * comm.size)
        contenders = {name: makers()[name](world, own_buffers) for name in names}
        results = measure(world, contenders, 2, Ports())
        for name in names:
            assert len(results[name]) == 2
            assert all(len(repetition["node_bytes"]) == world.node_count for repetition in results[name])
            assert all(repetition["seconds"] > 0 and repetition["cpu_s"] >= 0 for repetition in results[name])
            contenders[name].close()
        others = comm.allgather(json.dumps(results))
        assert others.count(others[0]) == comm.size, "all ranks know the same figures"


class Nothing(Allreduce):
    """What is in the buffer stays: the right sums of the contender before, if nobody had put junk there."""

    def exchange(self):
        self.comm.Barrier()


class LastLost(Allreduce):
    """The last element is wrong, on rank 1."""

    def exchange(self):
        super().exchange()
        self.parameters[-1] += self.comm.rank == 1


class OneMissing(Allreduce):
    """Rank 2 gives nothing, and all agree on the wrong sum."""

    def exchange(self):
        if self.comm.rank == 2:
            self.gradients.fill(0.0)
        super().exchange()


@pytest.mark.ranks(3)
def test_wrong_sums_end_the_job_with_one_line(comm, capfd):
    world = next(placements(comm))
    for wrong, where in ((Nothing, "ranks 0, 1, 2"), (LastLost, "rank 1"), (OneMissing, "ranks 0, 1, 2")):
        own_buffers = OwnBuffers(world, 48 * 1000)
        contenders = {"MPI_Allreduce": Allreduce(world, own_buffers), "wrong": wrong(world, own_buffers)}
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            measure(world, contenders, 1, Ports())
        assert end.value.code == 2
        line = f"error: wrong, round 0: wrong sums on {where} of 3\n"
        assert capfd.readouterr().err == (line if comm.rank == 0 else "")


def test_names():
    assert chosen("ring,MPI_Allreduce,ring", 2) == ["ring", "MPI_Allreduce"]
    assert "reduce-bcast/dedicated" not in chosen("all", 1)
    with pytest.raises(UserError, match="at least 2"):
        chosen("reduce-bcast/dedicated", 1)
    for wrong in ("none", "ring/float16", "allreduce/bfloat16", "", "all,ring"):
        with pytest.raises(UserError, match="no contender"):
            chosen(wrong, 4)


# --- figures ---


def test_bound_and_rates():
    """The project's case by hand: 8 MB, 5 nodes, 400 Mbit/s; the middle of three repetitions."""
    bound_s = lower_bound_s(8_000_000, 5, 50e6)
    assert bound_s == pytest.approx(0.256)
    assert lower_bound_s(8_000_000, 1, None) is None
    repetitions = [
        {"seconds": seconds, "cpu_s": seconds / 2, "node_bytes": [[10 * count, 1], [7, 20 + count]]}
        for count, seconds in enumerate((0.512, 0.3, 2.0))
    ]
    figures = summarize(Allreduce, repetitions, 8_000_000, 9, bound_s)
    assert figures["seconds"] == {"median": 0.512, "min": 0.3, "max": 2.0}
    assert figures["times_bound"] == pytest.approx(2)
    assert figures["algbw"] == pytest.approx(8e6 / 0.512)
    assert figures["busbw"] == pytest.approx(8e6 / 0.512 * 16 / 9)
    assert figures["node_bytes"] == [[10, 1], [7, 21]]
    half = summarize(makers()["MPI_Reduce"], repetitions, 8_000_000, 9, bound_s)
    assert half["busbw"] == half["algbw"]


def figures_of(family, seconds, wire="float32", whole=True, node_bytes=((12_800_000, 12_800_000),) * 5):
    spread = {"median": seconds, "min": 0.9 * seconds, "max": 1.1 * seconds}
    return {
        "family": family, "wire": wire, "whole": whole, "seconds": spread, "times_bound": seconds / 0.256,
        "algbw": 8e6 / seconds, "busbw": 8e6 / seconds, "cpu_s": 0.1, "node_bytes": [list(ways) for ways in node_bytes],
    }  # fmt: skip


@pytest.fixture
def report():
    lopsided = [[27_000_000, 19_000_000], *[[9_000_000, 15_000_000]] * 4]
    contenders = {
        "MPI_Allreduce": figures_of("mpi", 0.768),
        "MPI_Bcast": figures_of("mpi", 0.2, whole=False),
        "hierarchical/bfloat16": figures_of("own", 0.15, "bfloat16"),
        "hierarchical": figures_of("own", 0.2816),
        "reduce-bcast": figures_of("strategy", 1.0, node_bytes=lopsided),
        "gloo": figures_of("torch", 0.32),
    }  # fmt: skip
    return {
        "settings": {"repeat": 3}, "ranks": 9, "nodes": 5, "link": {"bytes_per_s": 50e6, "nominal": True},
        "machine": {"processor": "AMD EPYC", "cores": 2}, "mpi_library": "MPICH Version: 5.0.2",
        "sizes": [{"bytes": 8_000_000, "bound_s": 0.256, "contenders": contenders}],
    }  # fmt: skip


def on_one_node(report):
    result = copy.deepcopy(report) | {"nodes": 1}
    for size in result["sizes"]:
        size["bound_s"] = None
        for one in size["contenders"].values():
            one |= {"times_bound": None, "node_bytes": [[0, 0]]}
    return result


def test_the_table_goes_from_fast_to_slow(report):
    head, link, _, columns, *rows = tables(report, report["sizes"][0]).splitlines()
    assert "9 ranks on 5 nodes" in head
    assert "bound 256.0 ms" in head
    assert "400 Mbit/s each way (nominal)" in link
    assert [row.split()[0] for row in rows[:6]] == [
        "hierarchical/bfloat16", "MPI_Bcast", "hierarchical", "gloo", "MPI_Allreduce", "reduce-bcast"
    ]  # fmt: skip
    heads = "median, ms min max x bound algbw, GB/s busbw max in, MB max out CPU, ms"
    assert " ".join(columns.split()) == heads
    assert " ".join(rows[5].split()) == "reduce-bcast 1000.0 900.0 1100.0 3.906 0.0080 0.0080 27.00 19.00 100"
    assert "27.00 / 19.00" in tables(report, report["sizes"][0])


def test_one_node_has_no_bound(report):
    text = tables(on_one_node(report), on_one_node(report)["sizes"][0])
    assert "no network and no bound" in text
    assert "x bound" not in text
    assert "bytes in / out" not in text


def is_inside(figure):
    width, height = figure.get_size_inches()
    box = figure.get_tightbbox()
    return box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height


def test_the_figure_says_who_comes_close(report):
    figure = exchange_bars.draw(report)
    title = figure.texts[0].get_text()
    assert title == "hierarchical takes 1.10 times the network's bound, MPI_Allreduce 3.00"
    times, into = figure.axes
    names = [label.get_text() for label in times.get_yticklabels()]
    assert names[0] == "hierarchical/bfloat16"
    assert names[-1] == "reduce-bcast"
    assert {round(line.get_xdata()[0], 3) for line in times.lines if len(set(line.get_xdata())) == 1} == {1.0, 1.045}
    lengths = [bar.get_width() for bar in into.patches]
    assert lengths[-1] == pytest.approx(27)
    assert is_inside(figure)


def test_figures_of_several_sizes_of_few_and_of_one_node(report):
    larger = copy.deepcopy(report)
    larger["sizes"].append(copy.deepcopy(larger["sizes"][0]) | {"bytes": 64_000_000})
    assert exchange_bars.finding(larger).startswith("64 MB: hierarchical takes")
    assert len(exchange_bars.draw(larger).axes) == 4
    assert is_inside(exchange_bars.draw(larger))
    alone = exchange_bars.draw(on_one_node(report))
    assert len(alone.axes) == 1
    assert is_inside(alone)
    only_half = copy.deepcopy(report)
    contenders = only_half["sizes"][0]["contenders"]
    only_half["sizes"][0]["contenders"] = {"MPI_Bcast": contenders["MPI_Bcast"]}
    assert exchange_bars.finding(only_half) == "MPI_Bcast takes 0.78 times the network's bound"
    assert is_inside(exchange_bars.draw(only_half))


# --- the command ---


def bench(ranks, *flags):
    return launch(ranks, [sys.executable, BENCH, *map(str, flags)], cwd=ROOT)


HELP = f"""
import runpy, sys
sys.path.insert(0, {str(SCRIPTS)!r})
sys.argv = ["bench_exchange.py", "--help"]
try:
    runpy.run_path({BENCH!r}, run_name="__main__")
finally:
    from mpi4py import MPI
    print("MPI is started:", MPI.Is_initialized())
"""


def test_help_needs_no_mpi():
    result = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "--strategies all|LIST" in result.stdout
    assert "MPI is started: False" in result.stdout


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


def rejected(result, says):
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.returncode == 2, result.stderr
    assert len(errors) == 1, result.stderr
    assert says in errors[0]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--strategies", "fastest"], "no contender 'fastest', expected all, or some of reduce-bcast"),
        (["--bytes", "8MB,pear"], "'8MB,pear' is no list of sizes"),
        (["--bytes", "0"], "'0' is no list of sizes"),
        (["--repeat", "0"], "'0' rounds, expected 1 or more"),
        (["--link", "4pears"], "'4pears' is no rate"),
        (["--link", "400mbit"], "--link with all ranks on one node"),
        (["--json", "/none/exchange.json"], "--json /none/exchange.json: No such file or directory"),
        (["--json", "."], "--json .: Is a directory"),
        (["--figure", "exchange.pdf"], "expected a name that ends in .png"),
    ],
)
def test_a_users_mistake_is_one_line(flags, says):
    rejected(bench(2, *flags), says)


@pytest.mark.skipif(HAS_TORCH, reason="PyTorch is installed here")
def test_without_torch():
    rejected(bench(2, "--vs", "torch"), "--vs torch needs PyTorch: pip install torch")


@pytest.mark.skipif(not HAS_TORCH, reason="PyTorch is not installed here")
def test_gloo_on_one_node():
    result = bench(3, "--strategies", "ring", "--bytes", "100kB,200kB", "--repeat", 1, "--vs", "torch")
    assert result.returncode == 0, result.stderr
    assert sum(line.startswith("gloo ") for line in result.stdout.splitlines()) == 2


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
    command = [sys.executable, BENCH, "--strategies", "ring", "--bytes", "1MB", "--repeat", "1", "--json", str(file)]
    result = run_on_cluster("run", "--nodes", 2, "--ranks", 2, "--rate", "200mbit", command=command)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "as probed" in result.stdout
    link = json.loads(file.read_text())["link"]
    assert link["bytes_per_s"] == min(one["both"] for one in link["probed"])
    assert 0.4 < link["bytes_per_s"] / 25e6 < 1.2
