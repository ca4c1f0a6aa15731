"""What bench_training.py makes of the steps of its contenders: computing and exchange, the table, the figure."""

import copy

import pytest

from gpt2.errors import UserError
from scripts.bench_training import check_names, measure
from scripts.training_bench.training_table import HEADERS, summarize, table

pytestmark = pytest.mark.any_mpi
SIZE_BYTES, NODES, RATE = 120_000_000, 4, 50e6  # the exchange takes at least 3.6 s, and with headers 3.76


def turns_of(*seconds, losses=(3.0, 2.0, 1.0, 0.5)):
    """Two turns, of which each begins with a slow step of warm-up."""
    return [[(second, loss) for second, loss in zip((9.0, *seconds), losses, strict=True)] for _ in range(2)]


TURNS = {
    "ours, no exchange": turns_of(0.6, 0.5, 0.7, losses=(3.1, 2.2, 1.2, 0.6)),
    "ours": turns_of(4.4, 4.5, 4.6),
    "ours, bfloat16 wire": turns_of(2.4, 2.4, 2.4, losses=(3.0, 2.0, 1.0, 0.495)),
    "PyTorch, no exchange": turns_of(0.8, 0.8, 0.8),
    "DDP": turns_of(5.4, 5.4, 5.4, losses=(3.0, 2.0, 1.0, 0.5005)),
}


@pytest.fixture
def report():
    found = summarize(copy.deepcopy(TURNS), SIZE_BYTES, NODES, RATE)
    return found | {
        "parameters": 30_000_000, "tokens": 1024, "ranks": 4, "nodes": NODES, "turns": 2, "steps": 4,
        "left_out": {"FSDP": "RuntimeError: not over gloo"}, "mpi_library": "MPICH Version:      5.0.2",
        "link": {"bytes_per_s": RATE, "nominal": True}, "machine": {"processor": "a CPU", "cores": 2},
    }  # fmt: skip


def test_a_step_is_cut_by_the_same_librarys_step_alone(report):
    ours, ddp = (report["contenders"][name] for name in ("ours", "DDP"))
    assert (ours["step_s"], ours["compute_s"], ours["exposed_s"]) == pytest.approx((4.5, 0.6, 3.9))
    assert (ddp["step_s"], ddp["compute_s"], ddp["exposed_s"]) == pytest.approx((5.4, 0.8, 4.6))
    assert ours["times_as_fast"] == pytest.approx(1.2)
    assert ours["turns_s"] == [4.5, 4.5]
    assert report["contenders"]["ours, no exchange"]["exposed_s"] == 0


def test_the_least_step_is_the_longer_of_computing_and_exchange(report):
    assert report["exchange_bound_s"] == pytest.approx(HEADERS * 2 * 3 / 4 * SIZE_BYTES / RATE)
    assert report["least_s"] == report["exchange_bound_s"]
    assert summarize(TURNS, SIZE_BYTES, 1, None)["least_s"] == 0.6


def test_losses_are_compared_with_ours(report):
    differs = {name: one.get("loss_differs") for name, one in report["contenders"].items()}
    assert differs["ours"] == 0
    assert differs["DDP"] == pytest.approx(1e-3)
    assert differs["ours, bfloat16 wire"] == pytest.approx(1e-2)
    assert differs["ours, no exchange"] is differs["PyTorch, no exchange"] is None  # models of their own


def test_the_table(report):
    text = table(report)
    assert text.startswith("30.0M parameters, 1,024 tokens a step, 4 ranks on 4 nodes, links of 400 Mbit/s; median")
    row = next(line for line in text.splitlines() if line.startswith("ours  "))
    assert row.split() == ["ours", "4.500", "0.600", "3.900", "1.20", "0.5000", "0.0e+00"]
    assert "lower bound of a step, the longer of computing and exchange: 3.762 s" in text
    assert text.endswith("FSDP: skipped: RuntimeError: not over gloo")


def test_turns_alternate_and_what_does_not_run_is_left_out(capsys):
    order = []

    class World:
        class comm:
            allgather = staticmethod(lambda value: [value])

        print = staticmethod(print)

    def steps(name, fails=False):
        order.append(name)
        yield 9.0, 2.0
        if fails:
            raise RuntimeError("no such collective\nand more")
        yield 1.0, 1.0

    makers = {"a": lambda: steps("a"), "b": lambda: steps("b", fails=True), "c": lambda: steps("c")}
    found, left_out = measure(World, makers, 2)
    assert order == ["a", "b", "c", "a", "c"]
    assert found == {name: [[(9.0, 2.0), (1.0, 1.0)]] * 2 for name in ("a", "c")}
    assert left_out == {"b": "RuntimeError: no such collective"}
    assert "turn 1 of 2, a: 1.000 s a step" in capsys.readouterr().out


def test_names_that_are_none_or_lack_their_yardstick():
    makers = dict.fromkeys(TURNS)
    check_names([*makers], makers)
    with pytest.raises(UserError, match=r"^no strategy 'DDPP': expected one of "):
        check_names(["DDPP"], makers)
    with pytest.raises(UserError, match="'DDP' without 'PyTorch, no exchange', which measures computing alone"):
        check_names(["ours, no exchange", "ours", "DDP"], makers)
    with pytest.raises(UserError, match="'ring/bfloat16' without 'ours, no exchange'"):
        check_names(["PyTorch, no exchange", "ring/bfloat16", "DDP"], makers)
