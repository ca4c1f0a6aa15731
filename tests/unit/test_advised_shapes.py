"""advise.py --global-batch: how many copies, parts and stages; beside other functions, and numbers made by hand."""

from dataclasses import replace

import numpy as np
import pytest

from dist.cost.model import Cluster
from dist.cost.model_parallel import Head, Seats, simulate
from dist.cost.overlap import Training
from gpt2.config import PRESETS
from gpt2.parameters import Layout
from gpt2.pipeline import SCHEDULES
from scripts.prediction.cut_step import stage_exchange_s
from scripts.prediction.predictor import predicted_exchange, predicted_steps
from scripts.prediction.shapes import (
    advise_shapes,
    flags_of,
    row_of,
    shapes,
    shapes_sentence,
    shapes_table,
    step_of,
    strategies_of,
)
from scripts.prediction.workload import Workload
from scripts.settings.checks import complete
from scripts.settings.memory import bytes_of_pieces
from scripts.settings.training import parse_settings
from strategies import STRATEGIES
from tests.unit.test_advise import run
from tests.unit.test_mesh import places

pytestmark = pytest.mark.any_mpi
BABY, TINY = PRESETS["baby"], PRESETS["tiny"]


def cluster(placement, rate=50e6, **others):
    return Cluster(placement, rate, rate, **{"latency_s": 1e-4, "nominal": False} | others)


def workload(config, batch, size=1, compute_s=0.1, memory_bytes=None):
    layout = Layout(config)
    ranges = tuple(stop - start for start, stop in layout.ranges)
    return Workload(config, batch, size, config.context, Training(layout.count, compute_s, ranges=ranges), memory_bytes)


@pytest.fixture
def by_formula(monkeypatch):
    """No step is so small that it is replayed."""
    monkeypatch.setattr("scripts.prediction.cut_step.MOST_REPLAYED", -1)


def test_every_shape_that_divides():
    """4 heads, 4 layers, and eight micro-steps of two: parts within a node's four, 5 stages only without parts."""
    found = set(shapes(workload(BABY, 16, 2), cluster([0] * 4 + [1] * 4)))
    assert found == {(8, 1, 1), (4, 1, 2), (2, 1, 4), (4, 2, 1), (2, 2, 2), (1, 2, 4), (2, 4, 1), (1, 4, 2)}
    assert set(shapes(workload(BABY, 2, 2), cluster([0] * 4 + [1] * 4))) == {(1, 2, 4), (1, 4, 2)}
    assert set(shapes(workload(BABY, 4), cluster([0, 0, 0, 1]))) == {(4, 1, 1), (2, 1, 2), (1, 1, 4)}, (
        "nodes of 3 and 1"
    )
    assert set(shapes(workload(BABY, 5), cluster([0] * 5))) == {(5, 1, 1), (1, 1, 5)}, "parts: at most 4 heads"
    assert set(shapes(workload(BABY, 3), cluster([0] * 6))) == {(3, 1, 2), (3, 2, 1), (1, 2, 3), (1, 3, 2)}, "5 stages"
    of_twelve = shapes(workload(BABY, 12), cluster([0] * 4 + [1] * 4 + [2] * 4))
    assert {parts for _, parts, _ in of_twelve} == {1, 2, 4}, "three parts would not lie within nodes of four"


def test_copies_alone_are_what_the_other_table_says():
    ranks = cluster([0, 0, 1, 1])
    row = next(row for row in advise_shapes(workload(BABY, 8), ranks, "mpich") if row["copies"] == 4)
    training = replace(workload(BABY, 8).training, micro_steps=2)
    steps = {step.name: step for step in predicted_steps(ranks, training, "mpich")}
    assert row["step_s"] == pytest.approx(steps[row["strategy"]].seconds(True))
    same = [step for name, step in steps.items() if STRATEGIES[name.partition("/")[0]].traits.same_weights]
    assert row["step_s"] <= 1.01 * min(step.seconds(True) for step in same if step.exchange is not None)
    assert (row["micro_steps"], row["shares"]["bubble"], row["shares"]["sums"], row["shares"]["links"]) == (2, 0, 0, 0)
    assert row["shares"]["exchange"] == pytest.approx(1 - 0.1 / row["step_s"])


def test_one_micro_step_goes_through_all_stages_and_back():
    """On three ranks a step of 0.1 s is 0.3 s of one rank's; four hops of 64 x 64 float32 at 50 MB/s. The last stage is
    the head alone, so the gradient of that, 256 x 64, leaves its port before the rows'."""
    row = row_of(workload(TINY, 1), cluster([0, 1, 2]), 1, 3, "mpich")
    links_s = 4 * (4 * 64 * 64 / 50e6 + 1e-4) + 4 * 256 * 64 / 50e6
    assert row["step_s"] == pytest.approx(0.3 + links_s)
    assert row["layers"] == [1, 1, 0]
    assert row["shares"]["links"] == pytest.approx(links_s / row["step_s"])
    assert row["shares"]["bubble"] == pytest.approx(0.2 / row["step_s"])
    assert row["links_bytes"] == 4 * 4 * 64 * 64
    assert row["head_bytes"] == 2 * 4 * 256 * 64


def test_stages_share_the_operations():
    """A layer 72 C^2 + 6 C T, the head 6 C Vp; two micro-steps of one copy."""
    layer, head = 72 * 64**2 + 6 * 64 * 64, 6 * 64 * 256
    found, _ = step_of(workload(TINY, 2), cluster([0, 1]), 1, 2, "mpich")
    assert found.cut.layers == (1, 1)
    assert found.stage_s.tolist() == pytest.approx(
        [0.1 * share / (2 * layer + head) for share in (layer, layer + head)]
    )


def test_parts_sum_through_memory():
    """4 layers of 4 sums, and one at each end, each of which sends as much as two parts have: 64 x 128 float32."""
    row = row_of(workload(BABY, 4), cluster([0, 0], local_rate=1e9), 2, 1, "mpich")
    sums_s = 4 * 18 * 4 * 64 * 128 / 1e9
    assert row["step_s"] == pytest.approx(0.1 + sums_s)
    assert row["shares"]["sums"] == pytest.approx(sums_s / row["step_s"])
    assert row["sums_bytes"] == 4 * 18 * 4 * 64 * 128
    assert row["strategy"] is None, "one copy exchanges nothing"


def test_four_stages_by_the_closed_form():
    """Fast links: (m-1) max tau + sum tau, for m = 8. The last stage is the longest."""
    fast = cluster([0, 1, 2, 3], rate=1e12, latency_s=0.0, local_rate=1e12)
    found, _ = step_of(workload(BABY, 8), fast, 1, 4, "mpich")
    tau_s = found.stage_s
    assert max(found.ends_s) == pytest.approx(7 * tau_s.max() + tau_s.sum(), rel=1e-4)
    row = row_of(workload(BABY, 8), fast, 1, 4, "mpich")
    assert row["shares"]["bubble"] == pytest.approx(1 - 8 * tau_s.mean() / row["step_s"], rel=1e-3)


def test_a_long_pipeline_goes_on_as_it_began(by_formula):
    found, _ = step_of(workload(BABY, 300), cluster([0, 1, 2]), 1, 3, "mpich")
    plans, hop_s = [SCHEDULES["1f1b"](stage, 3, 300) for stage in range(3)], found.seats.hop_s(found.rows)
    layer, head = 72 * 128**2 + 6 * 128 * 64, 6 * 128 * 256
    head = Head(4 * 256 * 128 / 50e6 + 1e-4, head / (found.cut.layers[-1] * layer + head))
    whole_s = simulate(plans, found.stage_s / 3, 2 * found.stage_s / 3, hop_s, head)
    assert found.simulated.micro_steps < 300
    assert found.ends_s == pytest.approx(whole_s, rel=1e-3)


def test_a_late_head_holds_the_last_stage_up(by_formula):
    """One micro-step of two stages over slow links. The last computes its layers, waits for the token embedding, and
    computes the head; the gradient of that leaves after the head's part of its backward."""
    found, _ = step_of(workload(BABY, 1), cluster([0, 1], rate=1e5), 1, 2, "mpich")
    layer, head = 72 * 128**2 + 6 * 128 * 64, 6 * 128 * 256
    share, head_s, rows_s = head / (2 * layer + head), 4 * 256 * 128 / 1e5 + 1e-4, 4 * 64 * 128 / 1e5 + 1e-4
    first_s, last_s = found.stage_s
    assert head_s > first_s / 3 + rows_s + last_s / 3
    forward_s = head_s + share * last_s / 3
    there_and_back_s = forward_s + share * 2 / 3 * last_s + head_s
    assert there_and_back_s > forward_s + 2 / 3 * last_s + rows_s + 2 / 3 * first_s
    assert found.ends_s.tolist() == pytest.approx([there_and_back_s, forward_s + 2 / 3 * last_s])


def test_a_slow_port_holds_all_micro_steps_up(by_formula):
    """Both neighbours of the stage in the middle: two messages of a micro-step leave its port."""
    found, _ = step_of(workload(BABY, 300, compute_s=1e-6), cluster([0, 1, 2], rate=1e6, latency_s=0.0), 1, 3, "mpich")
    assert found.ends_s.max() >= 300 * 2 * 4 * 64 * 128 / 1e6


@pytest.mark.parametrize("rate", [5e5, 50e6])
def test_the_copies_exchange_their_pieces_when_their_stages_are_through(rate, by_formula):
    """Two copies of each of two stages, on four nodes: two ranks exchange a piece in the time that it takes a port."""
    found, _ = step_of(workload(BABY, 8), cluster([0, 1, 2, 3], rate=rate), 1, 2, "mpich")
    embedding, layer = 256 * 128 + 64 * 128, 12 * 128**2 + 13 * 128
    assert found.cut.layers == (2, 2)
    seconds = [4 * count / rate for count in (embedding + 2 * layer, 2 * layer + 2 * 128)]
    through = [end_s + exchange_s for end_s, exchange_s in zip(found.ends_s, seconds, strict=True)]
    expected = max(through) - max(found.ends_s)
    assert found.exchange_s(STRATEGIES["ring"], False) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("rate", [5e5, 1e9])
def test_a_last_stage_with_most_parameters_is_waited_for(rate, by_formula):
    """All layers but one are the last stage's, and its exchange begins a backward earlier than the first's. So where
    the exchange is short, the first is waited for."""
    found, _ = step_of(workload(BABY, 8), cluster([0, 1, 2, 3], rate=rate, latency_s=0.0), 1, 2, "mpich")
    found = replace(found, cut=replace(found.cut, layers=(1, 3)))
    layer = 12 * 128**2 + 13 * 128
    last_s, first_s = (4 * count / rate for count in (3 * layer + 2 * 128, 256 * 128 + 64 * 128 + layer))
    early_s = found.ends_s[0] - found.ends_s[1]
    assert early_s > 0
    expected = max(last_s - early_s, first_s)
    assert found.exchange_s(STRATEGIES["ring"], False) == pytest.approx(expected, rel=0.02)


def test_an_update_is_of_the_largest_piece():
    ask = workload(BABY, 8)
    found, _ = step_of(ask, cluster([0, 1, 2, 3]), 1, 2, "mpich")
    share = (256 * 128 + 64 * 128 + 2 * (12 * 128**2 + 13 * 128)) / Layout(BABY).count
    assert found.updated_share(STRATEGIES["allreduce"], False) == pytest.approx(share)
    assert found.updated_share(STRATEGIES["zero-2"], False) == pytest.approx(share / 2, rel=1e-4)


@pytest.mark.parametrize("name", ["zero-2", "zero-3", "ring"])
def test_many_exchanges_of_a_step_are_told_by_two(name):
    training, ranks = replace(workload(BABY, 8).training, micro_steps=6), cluster([0, 1, 2])
    whole = predicted_exchange(STRATEGIES[name], ranks, training, "mpich").seconds
    found = stage_exchange_s(STRATEGIES[name], Seats(ranks, 1, 1), 0, training, "mpich")
    assert found == pytest.approx(whole, rel=0.02)


@pytest.mark.parametrize(("parts", "stages"), [(1, 2), (1, 4), (2, 1), (2, 2)])
def test_memory_is_what_a_run_checks(parts, stages):
    """With a rank on each node, what check_memory counts on the node that holds most."""
    found, _ = step_of(workload(BABY, 8), cluster([0, 1, 2, 3]), parts, stages, "mpich")
    flags = f"--tensor-parallel {parts} --pipeline-parallel {stages} --batch-size 1 --strategy zero-2"
    settings, config = complete(parse_settings("", [*flags.split(), "--grad-accum", str(found.cut.micro_steps)]), 4)
    nodes = [World(node) for node in range(4)]
    assert found.memory_bytes(STRATEGIES["zero-2"]) == max(bytes_of_pieces(settings, config, node) for node in nodes)


class World:
    """Of four ranks on a node each, one."""

    def __init__(self, node):
        self.places, self.size, self.node = places([0, 1, 2, 3]), 4, node


def test_what_fits_comes_first_and_the_sentence_says_what_does_not():
    ranks = cluster([0, 0, 1, 1], rate=1e9)
    free = advise_shapes(workload(BABY, 8), ranks, "mpich")
    assert all(row["fits"] for row in free)
    assert [row["step_s"] for row in free] == sorted(row["step_s"] for row in free)
    limit = min(row["memory_bytes"] for row in free)
    rows = advise_shapes(workload(BABY, 8, memory_bytes=limit), ranks, "mpich")
    assert rows[0]["fits"]
    assert not rows[-1]["fits"]
    assert all(row["fits"] == (row["memory_bytes"] <= limit) for row in rows)
    sentence, table = shapes_sentence(rows, limit), shapes_table(rows)
    assert sentence.startswith(f"Take {rows[0]['copies']} x {rows[0]['parts']} x {rows[0]['stages']}, ")
    assert "not fit in" in sentence
    assert table.count("does not fit") == sum(not row["fits"] for row in rows)
    none = advise_shapes(workload(BABY, 8, memory_bytes=1000), ranks, "mpich")
    assert "None fits in 1e-06 GB" in shapes_sentence(none, 1000)


def made_row(copies, stages, step_s, memory, fits=True, **shares):
    shares = dict.fromkeys(("bubble", "sums", "links", "exchange"), 0.0) | shares
    return {
        "copies": copies, "parts": 1, "stages": stages, "micro_steps": 8, "strategy": "ring", "overlap": False,
        "step_s": step_s, "shares": shares, "memory_bytes": memory, "fits": fits,
    }  # fmt: skip


def test_the_fastest_comes_last_if_it_does_not_fit(monkeypatch):
    of_stages = {1: (1.0, False), 2: (3.0, True), 4: (2.0, True)}

    def row_of(workload, cluster, parts, stages, library):
        step_s, fits = of_stages[stages]
        return made_row(4 // stages, stages, step_s, 5e9, fits)

    monkeypatch.setattr("scripts.prediction.shapes.row_of", row_of)
    rows = advise_shapes(workload(BABY, 8), cluster([0, 1, 2, 3]), "mpich")
    assert [row["stages"] for row in rows] == [4, 2, 1]


def test_the_sentence_names_what_excludes_the_others():
    rows = [made_row(2, 2, 1.0, 5e9), made_row(1, 4, 1.5, 4e9, bubble=0.3), made_row(4, 1, 3.0, 6e9, exchange=0.7)]
    take = "Take 2 x 1 x 2, --strategy ring --pipeline-parallel 2 --grad-accum 8: a step 1000 ms"
    next_one = "1 x 1 x 4 takes 1.50 times as long, 30% of it bubble"
    last = "4 x 1 x 1, the slowest, 3.00 times, 70% of it the replicas' exchange"
    assert shapes_sentence(rows, None) == f"{take}; {next_one}; {last}."
    assert shapes_sentence(rows[:2], None) == f"{take}; {next_one}."
    rows[2]["fits"] = False
    assert shapes_sentence(rows, 5.5e9) == f"{take}; 1 other does not fit in 5.5 GB (4 x 1 x 1 needs 6); {next_one}."


def test_a_strategy_that_fits_is_taken_before_a_faster_one():
    """Of four copies zero-3 holds a quarter; the rest of what a rank holds is the same."""
    ranks = cluster([0, 1, 2, 3])
    step, _ = step_of(workload(BABY, 8), ranks, 1, 1, "mpich")
    by_name = {row["strategy"]: row for row in strategies_of(step, np.inf)}
    assert by_name["zero-3"]["memory_bytes"] < by_name["ring"]["memory_bytes"]
    assert by_name["zero-3"]["step_s"] > by_name["hierarchical"]["step_s"]
    limit = by_name["zero-3"]["memory_bytes"]
    row = row_of(workload(BABY, 8, memory_bytes=limit), ranks, 1, 1, "mpich")
    assert (row["strategy"], row["fits"], row["memory_bytes"]) == ("zero-3", True, limit)


def test_flags_are_train_py_s():
    for row in advise_shapes(workload(BABY, 8), cluster([0, 0, 1, 1]), "mpich"):
        s = parse_settings("", flags_of(row).split())
        assert (s.tensor_parallel, s.pipeline_parallel, s.grad_accum, bool(s.overlap)) == (
            row["parts"], row["stages"], row["micro_steps"], row["overlap"],
        )  # fmt: skip
        if row["strategy"]:
            assert s.strategy == row["strategy"]


def test_no_shape_is_one_line():
    with pytest.raises(ValueError, match="5 ranks allow no number of replicas that divides the 2 microbatches"):
        advise_shapes(workload(TINY, 2), cluster([0, 1, 2, 3, 4]), "mpich")


CASE = ["--nodes", "2", "--ranks-per-node", "2", "--link", "1gbit", "--model", "baby", "--compute-ms", "100"]
CASE += ["--global-batch", "16"]


def test_the_program_prints_it():
    result = run(*CASE, "--memory", "1GB")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 2 + 5 + 2
    assert lines[-1].startswith("Take ")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--global-batch", "0"], "--global-batch 0: expected a number from 1"),
        (["--batch-size", "0"], "--batch-size 0: expected a number from 1"),
        (["--batch-size", "3"], "--global-batch 16 with --batch-size 3, expected a multiple of it"),
        (["--seq-len", "65"], "--seq-len 65: expected a number from 1 to 64"),
        (["--memory", "much"], "'much' is not a size: expected one"),
        (["--parameters", "2M"], "--parameters or --layers with --global-batch"),
        (["--layers", "2"], "--parameters or --layers with --global-batch"),
        (["--grad-accum", "2"], "--grad-accum with --global-batch"),
        (["--from-run", "nowhere"], "--from-run knows --model"),
        (
            ["--nodes", "7", "--ranks-per-node", "1"],
            "7 ranks allow no number of replicas that divides the 4 microbatches",
        ),
    ],
)
def test_mistakes_are_one_line(change, said):
    result = run(*CASE, *change)
    assert result.returncode == 2
    assert result.stderr.startswith("advise.py: error: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_flags_that_need_a_global_batch():
    for flag in (["--memory", "1GB"], ["--batch-size", "2"], ["--seq-len", "8"]):
        result = run(*CASE[:-2], *flag)
        assert (result.returncode, f"{flag[0]} without --global-batch" in result.stderr) == (2, True)
    result = run("--nodes", "2", "--link", "1gbit", "--compute-ms", "1", "--global-batch", "4")
    assert (result.returncode, "--model is missing" in result.stderr) == (2, True)
