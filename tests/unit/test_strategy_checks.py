"""Which settings a strategy refuses, by what it declares, and which files hold one."""

import pytest

from gpt2.errors import UserError
from strategies import STRATEGIES, find
from strategies.compatibility import (
    DEVICE_TRANSPORTS,
    check_exchange,
    check_server,
    check_transport,
    device_transports,
    operation_of,
    worker_count,
)

ONE = "from strategies import Strategy, Traits\n\n\nclass {}(Strategy):\n    traits = Traits(line='mine')\n"


def test_a_dedicated_server_is_no_worker():
    assert [worker_count("colocated", ranks) for ranks in (1, 4)] == [1, 4]
    assert worker_count("dedicated", 4) == 3


def test_a_server_needs_another_rank():
    kind = STRATEGIES["reduce-bcast"]
    check_server(kind, "dedicated", 2, False)
    with pytest.raises(UserError, match="dedicated on 1 rank, expected at least 2"):
        check_server(kind, "dedicated", 1, False)
    with pytest.raises(UserError, match="which has no server: use --strategy reduce-bcast"):
        check_server(STRATEGIES["ring"], "dedicated", 2, False)


@pytest.mark.parametrize(("name", "no_exchange", "fits"), [
    ("ring", False, True), ("ring", True, False), ("none", True, True), ("none", False, False),
])  # fmt: skip
def test_who_exchanges_nothing_is_asked_for_twice(name, no_exchange, fits):
    if fits:
        check_server(STRATEGIES[name], "colocated", 2, no_exchange)
    else:
        with pytest.raises(UserError, match="say both, --strategy none --no-exchange"):
            check_server(STRATEGIES[name], "colocated", 2, no_exchange)


@pytest.mark.parametrize(
    ("name", "wire", "feedback", "overlap", "says"),
    [
        ("none", "bfloat16", False, False, "--wire bfloat16 with --strategy none"),
        ("sliced-in-turn", "float32", False, True, "--overlap with --strategy sliced-in-turn"),
        ("ring", "float32", True, False, "--error-feedback"),
        ("zero-2", "bfloat16", True, False, "--error-feedback with --strategy zero-2"),
        (
            "ring",
            "int8",
            True,
            False,
            "--wire int8 with --strategy ring, which sends float32 or bfloat16: use hierarch",
        ),
        ("hierarchical-sharded", "int8", True, False, "--wire int8 with --strategy hierarchical-sharded"),
    ],
)
def test_an_exchange_that_the_strategy_does_not_have(name, wire, feedback, overlap, says):
    with pytest.raises(UserError, match=says):
        check_exchange(STRATEGIES[name], wire, feedback, overlap)


def test_int8_travels_through_host_memory():
    kind = STRATEGIES["hierarchical"]
    check_exchange(kind, "int8", True, True)
    check_transport(kind, "host", "int8", True)
    assert device_transports(kind, "int8", False) == ()
    for transport in DEVICE_TRANSPORTS:
        with pytest.raises(UserError, match=r"hierarchical, which adds that in host memory: use --transport host$"):
            check_transport(kind, transport, "int8", False)


def test_mpis_own_sum_knows_no_bfloat16():
    check_exchange(STRATEGIES["ring"], "bfloat16", True, False)
    for name in ("allreduce", "sliced", "sliced-in-turn", "reduce-bcast", "reduce-scatter"):
        check_exchange(STRATEGIES[name], "float32", False, False, "own")
        check_exchange(STRATEGIES[name], "bfloat16", False, False)
        assert operation_of("bfloat16", None) == operation_of("float32", "own") == "own"
        with pytest.raises(UserError, match="--op mpi with --wire bfloat16, which MPI cannot sum: leave --op out"):
            check_exchange(STRATEGIES[name], "bfloat16", False, False, "mpi")
        with pytest.raises(UserError, match=f"--error-feedback with --strategy {name}, where no rank holds what"):
            check_exchange(STRATEGIES[name], "bfloat16", True, False)
    for op in ("mpi", "own"):
        with pytest.raises(UserError, match=f"--op {op} with --strategy ring, which lets no collective of MPI's add"):
            check_exchange(STRATEGIES["ring"], "float32", False, False, op)


def test_the_own_operation_adds_in_host_memory():
    kind = STRATEGIES["reduce-scatter"]
    assert device_transports(kind, "float32", False) == DEVICE_TRANSPORTS
    assert device_transports(kind, "float32", False, "own") == ()
    check_transport(kind, "host", "float32", False, "own")
    with pytest.raises(UserError, match="--transport nccl with --op own, which adds in host memory: use --transport"):
        check_transport(kind, "nccl", "float32", False, "own")


def test_a_file_holds_one_strategy(tmp_path):
    for count, name in ((0, "none.py"), (2, "two.py")):
        path = tmp_path / name
        path.write_text("from strategies import Strategy\n" + "".join(ONE.format(f"Mine{n}") for n in range(count)))
        with pytest.raises(UserError, match=f"{name} defines {count} subclasses of Strategy, expected one"):
            find(str(path))
    path = tmp_path / "mine.py"
    path.write_text("from strategies.ring import Ring\n" + ONE.format("Mine"))  # what it builds on is not what it holds
    assert (find(str(path)).name, find(str(path)).traits.line) == ("mine", "mine")
