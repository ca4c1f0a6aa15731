"""advise.py: the table and the object it prints, and what it says to bad input."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpt2.config import PRESETS
from gpt2.parameters import Layout
from scripts.prediction.predictor import advice_sentence
from scripts.prediction.replayed_run import replayed_cluster
from strategies import STRATEGIES
from tests.support.make_run import write_run

SCRIPTS = Path(__file__).parents[2] / "scripts"
CASE = ["--nodes", "5", "--ranks", "9", "--ranks-per-node", "2", "--link", "400mbit", "--latency", "100us"]
CASE += ["--parameters", "2M", "--compute-ms", "100"]
WITHOUT_MPI = """
import runpy, sys
sys.modules["mpi4py"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], None, "__main__")
"""


def run(*arguments):
    command = [sys.executable, "-c", WITHOUT_MPI, SCRIPTS / "advise.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=SCRIPTS.parent)


def answer(*arguments):
    result = run(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_table_and_object_agree():
    report, lines = answer(*CASE), run(*CASE).stdout.splitlines()
    rows = [row for row in report["strategies"] if row["unknown"] is None]
    names = [row["strategy"] for row in rows]
    assert [line.split()[0].rstrip("*") for line in lines[2 : 2 + len(rows)]] == names
    assert lines[-1] == report["advice"]
    for line, row in zip(lines[2:], rows, strict=False):
        exchange_ms = float(line.split()[1])
        assert exchange_ms == pytest.approx(1e3 * row["exchange_s"], rel=0.01)
    steps = [row["step_s"] if row["step_overlapped_s"] is None else row["step_overlapped_s"] for row in rows]
    assert steps == sorted(steps)


def test_five_hosts():
    """The case of the port counters: 27 MB into the server's node, 12.8 = the bound on a ring of leaders."""
    rows = {row["strategy"]: row for row in answer(*CASE)["strategies"]}
    assert rows["reduce-bcast"]["bytes_in"] == pytest.approx(27e6, rel=0.02)
    assert rows["sliced-in-turn"]["bytes_in"] == pytest.approx(29e6, rel=0.02)
    assert rows["hierarchical"]["bytes_in"] == pytest.approx(12.8e6, rel=1e-5)
    assert rows["hierarchical"]["times_bound"] == pytest.approx(1.05, abs=0.01)
    assert rows["ring"]["times_bound"] == pytest.approx(1.16, abs=0.01)
    dedicated = rows["reduce-bcast/dedicated"]
    assert dedicated["exchange_s"] == rows["reduce-bcast"]["exchange_s"]
    assert dedicated["step_s"] == pytest.approx(dedicated["exchange_s"] + 0.1 * 9 / 8)


def test_overlap_hides_what_computing_leaves_room_for():
    """8 MB, an exchange of 268 ms: two thirds of the computing hide so much, all but the last eighth at most."""
    for compute_ms in (0, 100, 10_000):
        report = answer(*CASE[:-1], str(compute_ms))
        row = next(row for row in report["strategies"] if row["strategy"] == "hierarchical")
        hidden = row["step_s"] - row["step_overlapped_s"]
        assert hidden == pytest.approx(min(compute_ms / 1e3 * 2 / 3, row["exchange_s"] * 7 / 8))


def test_half_the_bytes_with_bfloat16():
    whole, half = (answer(*CASE, "--wire", wire)["strategies"] for wire in ("float32", "bfloat16"))
    bytes_in = [{row["strategy"]: row["bytes_in"] for row in rows} for rows in (whole, half)]
    for strategy in ("ring", "hierarchical", "zero-3"):
        assert bytes_in[1][strategy] == pytest.approx(bytes_in[0][strategy] / 2, rel=1e-5)
    assert bytes_in[1]["reduce-scatter"] == pytest.approx(bytes_in[0]["reduce-scatter"] / 2, rel=1e-5)
    # To add bfloat16 takes an operation of our own, for which MPICH has its simplest algorithms alone.
    assert bytes_in[1]["allreduce"] > 0.55 * bytes_in[0]["allreduce"]


def test_an_own_operation_changes_what_mpich_sends():
    """Its best algorithms are for its own operations: a binomial tree is worse for one root, and the best for all."""
    mpi, own = (answer(*CASE, "--op", op)["strategies"] for op in ("mpi", "own"))
    ratio = {row["strategy"]: row["bytes_in"] for row in own}
    ratio = {row["strategy"]: ratio[row["strategy"]] / row["bytes_in"] for row in mpi if row["unknown"] is None}
    assert ratio["sliced"] < 0.6 < 1 < ratio["reduce-bcast"]
    assert ratio["ring"] == ratio["reduce-scatter"] == 1
    result = run("--from-run", "nowhere", "--op", "own")
    assert (result.returncode, "--from-run knows --op from the run" in result.stderr) == (2, True)
    result = run(*CASE, "--op", "mpi", "--wire", "bfloat16")
    assert (result.returncode, "which MPI cannot sum: leave --op out" in result.stderr) == (2, True)


@pytest.mark.parametrize("ranks", [1, 4])
def test_one_node(ranks):
    report = answer("--nodes", "1", "--ranks", str(ranks), "--link", "10gbit", *CASE[-4:])
    rows = [row for row in report["strategies"] if row["unknown"] is None]
    assert all(row["bytes_in"] == 0 and row["times_bound"] is None for row in rows)
    assert ranks > 1 or all(row["exchange_s"] == 0 for row in rows)
    assert "One node" in report["advice"]


def test_local_steps_divide_the_exchange_but_other_weights_are_not_advised():
    report = answer(*CASE, "--local-steps", "20")
    rows = {row["strategy"]: row for row in report["strategies"]}
    for what in ("exchange_s", "bytes_in", "bytes_out"):
        assert rows["diloco"][what] == pytest.approx(rows["hierarchical"][what] / 20, rel=1e-4)
    assert rows["diloco"]["step_overlapped_s"] == pytest.approx(0.1)
    assert report["strategies"][0]["strategy"] == "diloco"
    assert not report["advice"].startswith("Take diloco")


def test_thousands_of_nodes():
    large = ["--nodes", "4096", "--ranks-per-node", "8", "--link", "200gbit", "--latency", "3us"]
    large += ["--parameters", "1.5B"]
    report = answer(*large, "--compute-ms", "400", "--transport", "rdma", "--memory-rate", "300")
    rows = {row["strategy"]: row for row in report["strategies"]}
    assert rows.keys() >= {name for name, kind in STRATEGIES.items() if kind.traits.exchanges}
    assert rows["hierarchical"]["times_bound"] < rows["ring"]["times_bound"] < rows["reduce-bcast"]["times_bound"]


def test_an_unknown_choice_is_a_dash_and_a_reason():
    arguments = ["--nodes", "9", "--link", "10gbit", "--parameters", "124M", "--library", "openmpi", *CASE[-2:]]
    assert "reduce-scatter: openmpi's reduce_scatter_block" in run(*arguments).stdout
    rows = {row["strategy"]: row for row in answer(*arguments)["strategies"]}
    assert rows["reduce-scatter"]["step_s"] is None
    assert "the shapes of the matrices, which travel as factors, are unknown" in rows["powersgd"]["unknown"]


def test_factors_of_a_models_matrices():
    """Of GPT-2 124M, by hand; nobody is advised to train other weights."""
    model = [*CASE[:-4], "--model", "gpt2-124M", "--compute-ms", "100"]
    for rank in (2, 4):
        report = answer(*model, "--low-rank", str(rank))
        row = next(row for row in report["strategies"] if row["strategy"] == "powersgd")
        factors = 50304 + 1024 + 2 * 768 + 12 * (2304 + 768 + 2 * 768 + 2 * (3072 + 768))
        sent = 4 * (rank * factors + 12 * 13 * 768 + 2 * 768)
        assert row["bytes_in"] == pytest.approx(2 * 8 / 9 * sent, rel=1e-3)
        assert row is report["strategies"][0]
        assert not report["advice"].startswith("Take powersgd")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--link", "fast"], "'fast' is not a rate"),
        (["--latency", "soon"], "'soon' is not a time"),
        (["--parameters", "124X"], "'124X' is not a count"),
        (["--parameters", "0"], "'0' is not a count"),
        (["--compute-ms", "-1"], "expected 0 or more"),
        (["--compute-ms", "nan"], "expected 0 or more"),
        (["--ranks", "12"], "expected 9 to 10 ranks"),
        (["--nodes", "0"], "expected 1 or more"),
        (["--nodes", "2000000", "--ranks", "4000000"], "at most"),
        (["--memory-rate", "0"], "expected more than 0"),
    ],
)
def test_mistakes_are_one_line(change, said):
    result = run(*CASE, *change)
    assert result.returncode == 2
    assert result.stderr.startswith("advise.py: error: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def row(strategy, ms, memory):
    return {"strategy": strategy, "step_s": ms / 1e3, "step_overlapped_s": None, "memory_bytes": memory,
            "times_bound": 1.5, "same_weights": True}  # fmt: skip


def test_of_steps_within_a_percent_the_one_with_the_least_memory_is_advised():
    rows = [row("ring", 100, 16), row("tree", 100.9, 8), row("sliced", 101.1, 4)]
    assert advice_sentence(rows).startswith("Take tree: its exchange is 1.50 times the lower bound, a step 101 ms")
    assert advice_sentence(rows[::2]).startswith("Take ring:")


def test_what_is_there_for_memory_is_not_advised_where_another_is_as_fast():
    rows = [row("zero-3", 100, 2), row("hierarchical-sharded", 100.5, 8), row("ring", 100.6, 16)]
    assert advice_sentence(rows).startswith("Take hierarchical-sharded:")
    assert advice_sentence([row("zero-3", 90, 2), *rows[1:]]).startswith("Take zero-3:")


# --- a run replayed ---

LINKS = [
    {"node": node, "host": f"cn{node:02d}", "latency_s": 1e-4, "out": 5e6, "in": 5e6, "both": 5e6} for node in (0, 1)
]
NO_STEPS = """{"format": "gpt2-mpi run 1", "settings": {"strategy": "ring"}, "parameters": 9, "mpi_library": "",
"ranks": [{"rank": 0, "node": 0, "host": "a"}]}"""
MODEL = {"model": "tiny", "tokenizer": "bytes", "grad_accum": 1}


def made_run(folder, spans, nodes, strategy, **settings):
    """A run of the tiny model, which has 141,568 parameters, on links of 5 MB/s."""
    write_run(folder, spans, nodes, strategy, **MODEL, **settings)
    config = json.loads((folder / "config.json").read_text())
    config |= {"parameters": Layout(PRESETS["tiny"]).count, "links": LINKS}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def steps_of(compute_ms, exchange_ms, update_ms, steps=5):
    """Each rank's spans: forward and backward as long as its compute_ms, an allreduce that ends for all together."""
    spans = [[] for _ in compute_ms]
    for step in range(1, steps + 1):
        zero = 1000 * step
        end = zero + max(compute_ms) + exchange_ms
        for rank, ms in enumerate(compute_ms):
            spans[rank] += [
                (step, "forward", -1, zero, zero + ms / 4),
                (step, "backward", -1, zero + ms / 4, zero + ms),
                (step, "allreduce", -1, zero + ms, end),
                (step, "update", -1, end, end + update_ms),
                (step, "step", -1, zero, end + update_ms),
            ]
    return spans


def test_a_run_is_predicted_next_to_what_it_took(tmp_path):
    """4 ranks on 2 nodes: a ring of 4 carries 1.5 D through each port, and the slowest rank computes 40 ms."""
    size = 4 * Layout(PRESETS["tiny"]).count
    exchange_ms = 1.5 * size / 5e6 * 1e3
    run_folder = made_run(tmp_path / "run", steps_of([30, 40, 35, 20], exchange_ms, 8), [0, 0, 1, 1], "ring")
    report = answer("--from-run", str(run_folder))
    assert report["measured"]["step_s"] == pytest.approx((40 + exchange_ms + 8) / 1e3)
    assert report["measured"]["predicted_s"] == pytest.approx(report["measured"]["step_s"], rel=0.01)
    rows = {row["strategy"]: row for row in report["strategies"]}
    # The leaders' ring carries D; each of the node's two ranks updates half of the vector.
    assert rows["hierarchical"]["step_s"] == pytest.approx(0.040 + size / 5e6 + 0.004, rel=0.01)
    assert rows["reduce-bcast/dedicated"]["step_s"] > rows["reduce-bcast"]["exchange_s"] + 0.040 * 4 / 3
    assert any("off by" in note for note in report["notes"])


def test_a_run_on_other_links_and_nodes(tmp_path):
    run_folder = made_run(tmp_path / "run", steps_of([40, 40, 40, 40], 100, 8), [0, 0, 1, 1], "ring")
    faster = answer("--from-run", str(run_folder), "--link", "400mbit", "--latency", "0us")
    row = next(row for row in faster["strategies"] if row["strategy"] == "ring")
    size = 4 * Layout(PRESETS["tiny"]).count
    assert row["exchange_s"] == pytest.approx(1.5 * size / 50e6 * 1514 / 1448, rel=0.01)
    larger = answer("--from-run", str(run_folder), "--nodes", "4", "--ranks", "8")
    row = next(row for row in larger["strategies"] if row["strategy"] == "ring")
    factor = larger["measured"]["factor"]
    assert factor == pytest.approx(0.100 / (1.5 * size / 5e6 + 6e-4), rel=0.01)
    assert row["step_s"] == pytest.approx(0.020 + factor * (1.75 * size / 5e6 + 14e-4) + 0.008, rel=0.01)
    assert faster["measured"]["factor"] == factor, "which says nothing about another network"


def test_other_nodes_have_the_runs_median_link():
    """One slow link of the run is no reason to expect as slow ones elsewhere."""
    links = {node: {"in": rate, "out": 2 * rate, "latency_s": 1e-4} for node, rate in enumerate((1e8, 3e8, 2e8))}
    run = SimpleNamespace(config={"ranks": [{"node": node} for node in links]}, links=links)
    cluster = replayed_cluster(run, [0, 1, 2, 3], None, None)
    assert (cluster.rate_in, cluster.rate_out, cluster.latency_s) == (2e8, 4e8, 1e-4)
    assert replayed_cluster(run, None, None, None).rate_in.tolist() == [1e8, 3e8, 2e8]


def test_a_dedicated_server_and_overlap(tmp_path):
    """Three ranks compute 40 ms: on all four it would be 30; overlap is predicted for the run that had it."""
    spans = steps_of([0.001, 40, 40, 40], 100, 8)
    served = answer(
        "--from-run", str(made_run(tmp_path / "a", spans, [0, 1, 1, 1], "reduce-bcast", server="dedicated"))
    )
    rows = {row["strategy"]: row for row in served["strategies"]}
    assert rows["reduce-bcast/dedicated"]["step_s"] == served["measured"]["step_s"] == pytest.approx(0.148)
    assert served["measured"]["predicted_s"] == pytest.approx(0.048 + 0.100 / served["measured"]["factor"])
    assert rows["ring"]["step_s"] - rows["ring"]["exchange_s"] == pytest.approx(0.030 + 0.008, rel=0.01)
    overlapped = answer("--from-run", str(made_run(tmp_path / "b", spans, [0, 0, 1, 1], "ring", overlap=True)))
    rows = {row["strategy"]: row for row in overlapped["strategies"]}
    assert pytest.approx(0.148) == rows["ring"]["step_overlapped_s"] < rows["ring"]["step_s"]
    assert rows["ring"]["compared"] == "this run"


def test_a_damaged_run_says_what_is_there(tmp_path):
    folder = made_run(tmp_path / "run", steps_of([30, 40, 35, 20], 100, 8), [0, 0, 1, 1], "ring")
    (folder / "traces" / "rank-00003.trace").unlink()
    (folder / "traces" / "rank-00002.trace").write_bytes(b"torn")
    report = answer("--from-run", str(folder))
    assert report["notes"][0].startswith("2 of 4 ranks left traces")
    assert report["measured"]["step_s"] == pytest.approx(0.148)
    for file in (folder / "traces").iterdir():
        file.unlink()
    (folder / "log.jsonl").write_text('{"step": 1, "step_s": 0.2, "exposed_exchange_s": 0.05}\n{"step": 2, "st')
    report = answer("--from-run", str(folder))
    assert "log.jsonl" in report["notes"][0]
    assert report["measured"]["step_s"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "config.json is missing"),
        ({"config.json": "{"}, "is not what scripts/train.py writes"),
        ({"config.json": '{"format": "gpt2-mpi run 1", "settings": {"strategy": "ring"}}'}, "lacks 'ranks'"),
        ({"config.json": NO_STEPS}, "no complete step"),
    ],
)  # fmt: skip
def test_a_folder_that_says_too_little_is_one_line(tmp_path, files, said):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    result = run("--from-run", str(tmp_path))
    assert result.returncode == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_layers_and_micro_steps():
    """ZeRO's exchanges: 2 micro-steps reduce twice; zero-3 gathers what has left its two layers' slots."""
    case = ["--nodes", "4", "--link", "400mbit", "--parameters", "8M", "--layers", "8", "--compute-ms", "100"]
    vector = 0.75 * 32e6  # bytes through a port of a ring's half
    for micro_steps, zero_2, zero_3 in ((1, 2, 2 + 6 / 8), (2, 3, 3 + 3 * 6 / 8)):
        rows = {row["strategy"]: row for row in answer(*case, "--grad-accum", str(micro_steps))["strategies"]}
        assert rows["zero-2"]["bytes_in"] == pytest.approx(zero_2 * vector, rel=1e-4)
        assert rows["zero-3"]["bytes_in"] == pytest.approx(zero_3 * vector, rel=1e-4)
        assert rows["ring"]["bytes_in"] == pytest.approx(2 * vector, rel=1e-4)


def test_a_model_by_name():
    case = ["--nodes", "4", "--link", "10gbit", "--model", "gpt2-124M", "--compute-ms", "100"]
    row = next(row for row in answer(*case)["strategies"] if row["strategy"] == "zero-2")
    assert row["bytes_in"] == pytest.approx(1.5 * 4 * Layout(PRESETS["gpt2-124M"]).count, rel=1e-4)
