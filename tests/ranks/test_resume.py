"""A run taken up again: the same bits on the same ranks, the same curve on others, whatever the strategy."""

import json
import shutil

import numpy as np
import pytest

from dist.probe.links import probe_links
from dist.world import start_world, world_of
from gpt2.data.shards import write_shard
from gpt2.errors import UserError
from gpt2.formats import weights
from gpt2.optimizer import LearningRateSchedule
from scripts.training import plan
from scripts.training.meeting import MeetingPoint
from strategies import STRATEGIES
from tests.support.in_process import log, train
from tests.support.refusal import refusal_of_all
from traces import read_run

SMALL = ["--n-layer", 2, "--n-head", 1, "--n-embd", 10, "--context", 8, "--vocab-size", 100, "--trace", "off"]
# eps: where the true gradient is 0 (the key bias), AdamW makes steps of rounding noise otherwise.
STEPS = ["--steps", 6, "--checkpoint-every", 3, "--eval-every", 6, "--lr", 1e-2, "--warmup", 1, "--eps", 1e-4]
GLOBAL_BATCH = 6


class Runs:
    """Runs of scripts/train.py in this process, on all ranks of a world or some."""

    def __init__(self, comm, folder):
        self.world, self.folder = start_world(), folder
        if comm.rank == 0:
            tokens = np.sort(np.random.default_rng(1).integers(100, size=3001)).astype(np.uint16)
            write_shard(self.folder / "tokens.bin", tokens)
            write_shard(self.folder / "val.bin", tokens[::2])
        comm.Barrier()

    def run(self, out, *flags, world=None, code=None):
        world = world or self.world
        workers = world.size - ("dedicated" in flags)
        data = ["--train-data", self.folder / "tokens.bin", "--val-data", self.folder / "val.bin"]
        batch = ["--batch-size", GLOBAL_BATCH // workers]
        train(world, self.folder / out, *SMALL, *STEPS, *data, *batch, *flags, code=code)

    def interrupted(self, out, copy, world=None):
        """Copy a run as it would be if it had been killed after its checkpoint of step 3 and before that of step 6."""
        world = world or self.world
        if world.rank == 0:
            shutil.copytree(self.folder / out, self.folder / copy)
            checkpoints = self.folder / copy / "checkpoints"
            (checkpoints / "step-00000006").rename(checkpoints / "step-00000006.part")
        world.comm.Barrier()

    def result(self, out):
        """(loss, norm of each step and the last validation loss), the last model's bytes, and its parameters."""
        lines = log(self.folder / out)
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
        curve = [number for line in lines for number in (line["loss"], line["grad_norm"])] + [lines[-1]["val_loss"]]
        last = self.folder / out / "checkpoints" / "step-00000006"
        return np.array(curve), (last / "model.bin").read_bytes(), weights.load(last).flat


@pytest.fixture
def runs(comm, shared_path):
    return None if comm is None else Runs(comm, shared_path)


def cases(ranks):
    for name, kind in STRATEGIES.items():
        if name == "none":
            continue
        if kind.traits.overlaps:
            yield ["--strategy", name, "--overlap", "--wire", "bfloat16"]
        else:
            yield ["--strategy", name]
    yield ["--strategy", "ring", "--wire", "bfloat16", "--error-feedback"]
    local = ["--strategy", "diloco", "--local-steps", 4, "--skip-outliers", 1]
    yield [*local, "--replica", "rank"]
    yield [*local, "--replica", "rank", "--fragments", 2, "--wire", "bfloat16", "--error-feedback"]
    if ranks > 1:
        yield ["--strategy", "reduce-bcast", "--server", "dedicated"]


@pytest.mark.any_mpi
@pytest.mark.ranks(3)
def test_the_same_ranks_go_on_bit_for_bit(comm, runs):
    for number, flags in enumerate(cases(comm.size)):
        whole, resumed = f"{number}-whole", f"{number}-resumed"
        runs.run(whole, *flags)
        runs.interrupted(whole, resumed)
        runs.run(resumed, *flags, "--resume")
        curve, model, _ = runs.result(whole)
        curve_resumed, model_resumed, _ = runs.result(resumed)
        np.testing.assert_array_equal(curve_resumed, curve, err_msg=str(flags))
        assert model_resumed == model, flags


@pytest.mark.any_mpi
@pytest.mark.ranks(3)
def test_int8_on_nodes_goes_on_bit_for_bit(comm, runs):
    """The errors of values and of sums are in the checkpoint."""
    nodes, flags = world_of(comm, comm.Split(comm.rank, comm.rank)), ["--strategy", "hierarchical", "--wire", "int8"]
    for out, more in ("whole", []), ("plain", ["--no-error-feedback"]):
        runs.run(out, *flags, *more, world=nodes)
    runs.interrupted("whole", "resumed", world=nodes)
    runs.run("resumed", *flags, "--resume", world=nodes)
    assert runs.result("resumed")[1] == runs.result("whole")[1] != runs.result("plain")[1]


@pytest.mark.any_mpi
@pytest.mark.ranks(3)
def test_a_default_run_goes_on_as_it_chose(comm, runs, capsys, monkeypatch):
    """Without a trial and bit for bit on the same nodes, and on other nodes it chooses anew.

    Links are measured once: what else this machine does could change their rates by more than a run may overlook.
    """
    links = {}

    def measured(world):
        if world.node_count not in links:
            links[world.node_count] = probe_links(world)
        return links[world.node_count]

    monkeypatch.setattr(plan, "probe_links", measured)
    nodes = world_of(comm, comm.Split(min(comm.rank, 1), comm.rank))
    runs.run("whole", world=nodes)
    config = json.loads((runs.folder / "whole" / "config.json").read_text())
    chosen = {name: config["settings"][name] for name in ("strategy", "overlap")}
    assert chosen == {name: config["auto"][name] for name in chosen}
    printed = capsys.readouterr().out
    assert comm.rank or printed.count(f"--strategy auto chose {chosen['strategy']}") == 1
    for where, world in (("same", nodes), ("other", runs.world)):
        runs.interrupted("whole", where)
        capsys.readouterr()
        runs.run(where, "--resume", world=world)
        said = capsys.readouterr().out
        assert comm.rank or (": as before, on the same nodes" in said) == (where == "same"), said
    assert runs.result("same")[1] == runs.result("whole")[1]
    np.testing.assert_allclose(runs.result("other")[0], runs.result("whole")[0], rtol=1e-5)


@pytest.mark.ranks(3)
def test_other_ranks_and_strategies_go_on_with_the_same_curve(comm, runs):
    """From three ranks to two, or one, or the same as two nodes; each strategy hands over to the next in the list."""
    pair = comm.Split(0 if comm.rank < 2 else 1, comm.rank)
    worlds = {
        3: runs.world,
        2: world_of(pair, pair.Split(0, pair.rank)),
        1: world_of(comm.Split(comm.rank), comm.Split(comm.rank)),
        "two nodes": world_of(comm, comm.Split(min(comm.rank, 1), comm.rank)),
    }
    names = [name for name, kind in STRATEGIES.items() if kind.traits.exchanges and kind.traits.same_weights]
    runs.run("0", "--strategy", names[0])
    curve, _, parameters = runs.result("0")
    for number, (name, after) in enumerate(zip(names, [*names[1:], names[0]], strict=True)):
        start, end = f"{name}", f"{name}-{after}"
        ranks = list(worlds)[number % len(worlds)]
        runs.run(start, "--strategy", name)
        runs.interrupted(start, end)
        if worlds[ranks].comm.rank == comm.rank < worlds[ranks].size:  # the ranks that the smaller world has
            runs.run(end, "--strategy", after, "--resume", world=worlds[ranks])
        comm.Barrier()
        found, _, found_parameters = runs.result(end)
        np.testing.assert_allclose(found, curve, rtol=1e-5, err_msg=f"{name} then {after} on {ranks}")
        np.testing.assert_allclose(found_parameters, parameters, atol=1e-5, err_msg=f"{name} then {after} on {ranks}")


@pytest.mark.ranks(4)
def test_factors_go_on_bit_for_bit_or_begin_anew_on_other_ranks(comm, runs, capsys):
    """Of 8 sequences a step: up to the checkpoint the curve is the same, after it nearly."""
    pair = comm.Split(comm.rank // 2, comm.rank)
    flags = ["--strategy", "powersgd", "--low-rank", 2, "--batch-size"]
    runs.run("whole", *flags, 2)
    for out in ("same", "fewer"):
        runs.interrupted("whole", out)
    runs.run("same", *flags, 2, "--resume")
    assert runs.result("same")[1] == runs.result("whole")[1]
    np.testing.assert_array_equal(runs.result("same")[0], runs.result("whole")[0])
    if comm.rank < 2:
        runs.run("fewer", *flags, 4, "--resume", world=world_of(pair, pair.Split(0, pair.rank)))
    comm.Barrier()
    assert comm.rank or "error feedback begins anew" in capsys.readouterr().out
    whole, fewer = runs.result("whole")[0], runs.result("fewer")[0]
    np.testing.assert_allclose(fewer[:7], whole[:7], rtol=1e-5)
    assert fewer[-1] == pytest.approx(whole[-1], rel=0.05)


@pytest.mark.ranks(2)
def test_what_resuming_refuses(comm, runs, capsys):
    runs.run("run")
    mistakes = {
        ("--seq-len", 4): "its seq_len is 8, this run's 4, expected the same: change --seq-len",
        ("--batch-size", 1): "its global_batch is 6, this run's 2",
        ("--seed", 3): "its seed is 1337, this run's 3",
        ("--no-shuffle",): "its shuffle is True",
        ("--n-layer", 1): "its model is",
    }
    for flags, says in mistakes.items():
        assert says in refusal_of_all(comm, capsys, runs.run, "run", "--resume", *flags)


@pytest.mark.ranks(2)
def test_a_longer_run_keeps_its_learning_rates_or_is_asked(comm, runs, capsys):
    """Refused, nothing of the run is changed; each start leaves its word in config.json."""
    run = runs.folder / "run"
    runs.run("run")
    before = {path: path.read_bytes() for path in (run / "config.json", run / "log.jsonl")}
    comm.Barrier()
    line = refusal_of_all(comm, capsys, runs.run, "run", "--resume", "--steps", 9)
    assert "step-00000006: made with --lr-steps 6, this run has" in line
    assert {path: path.read_bytes() for path in before} == before
    comm.Barrier()
    runs.run("run", "--resume", "--steps", 9, "--lr-steps", 6)
    assert "; changed" not in capsys.readouterr().out
    runs.run("run", "--resume", "--steps", 9, "--lr-steps", 6)  # as a job that is queued again: nothing is left to do
    runs.run("run", "--resume", "--steps", 12, "--lr-steps", 12)
    said = capsys.readouterr().out
    assert comm.rank or "continues from step 9; changed: lr-steps 12 (before 6); the learning rate of step 10" in said
    short, long = (LearningRateSchedule("cosine", 1e-2, 1e-3, 1, steps) for steps in (6, 12))
    expected = [short.at(step) for step in range(1, 10)] + [long.at(step) for step in range(10, 13)]
    assert [line["lr"] for line in log(run)] == pytest.approx(expected, rel=1e-12)
    config = json.loads((run / "config.json").read_text())
    assert [start["resumed_step"] for start in config["earlier"]] == [None, 6], "a start without a step leaves no word"
    assert all(start["code"].keys() >= {"commit", "dirty"} for start in (*config["earlier"], config))
    assert [config["settings"][name] for name in ("model", "n_head", "lr_steps")] == ["baby", 1, 12]


def content(folder):
    """{path: bytes} of all files."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.any_mpi
@pytest.mark.ranks(2)
def test_a_start_without_a_step_to_make_changes_nothing(comm, runs, capsys):
    """It says so in one line. The summary's new time tells --restarts that this start has ended well."""
    run = runs.folder / "run"
    runs.run("run", "--trace", "on")
    before, summary = content(run), (run / "summary.json").stat().st_mtime_ns
    comm.Barrier()
    for more in (["--strategy", "auto"], ["--steps", 4, "--lr-steps", 6]):
        capsys.readouterr()
        runs.run("run", "--resume", *more, code=0)
        said = capsys.readouterr().out
        assert comm.rank or (said.count("\n") == 1 and "nothing is left to do" in said), said
        assert content(run) == before
    assert (run / "summary.json").stat().st_mtime_ns > summary
    comm.Barrier()
    if comm.rank == 0:
        (run / "summary.json").unlink()  # killed between the last checkpoint and the summary
    runs.run("run", "--resume", code=0)
    assert json.loads((run / "summary.json").read_text()) == {}


@pytest.mark.any_mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("fails", ["a tokenizer of no such vocabulary", "in the first step"])
def test_a_start_that_fails_before_its_first_step_changes_nothing(comm, runs, monkeypatch, fails):
    """On two nodes, which see each other by files among the traces. Of a new run no file stays.

    Its folder may: the node that removes the last file among the traces can be later than rank 0 with the lock.
    """

    def fail(*arguments):
        with runs.world.together(UserError):
            raise UserError("a late mistake")

    nodes = world_of(comm, comm.Split(comm.rank))
    runs.run("run", "--trace", "on", "--strategy", "ring", world=nodes)
    runs.interrupted("run", "interrupted")
    before = content(runs.folder)
    comm.Barrier()
    flags = ["--trace", "on", "--strategy", "ring"]
    if fails == "in the first step":
        monkeypatch.setattr(MeetingPoint, "meet", fail)
    else:
        flags += ["--sample-every", 1, "--tokenizer", "bytes"]
    for out, more in (("interrupted", ["--resume"]), ("new", [])):
        with pytest.raises(SystemExit) as ended:
            runs.run(out, *flags, *more, world=nodes)
        assert ended.value.code == 2
        comm.Barrier()
        assert content(runs.folder) == before
        comm.Barrier()
    monkeypatch.undo()
    runs.run("interrupted", *flags[:4], "--resume", world=nodes)
    assert (runs.folder / "interrupted" / "earlier-traces" / "to-step-00000003" / "rank-00001.trace").exists()
    assert read_run(runs.folder / "interrupted").config["resumed_step"] == 3
    assert runs.result("interrupted")[1] == runs.result("run")[1]


@pytest.mark.ranks(2)
def test_a_damaged_checkpoint_is_passed_over(comm, runs, capsys):
    """The newest is damaged where rank 1 looks: the one before is taken, and --keep does not count the damaged one.

    When all are damaged, the job ends.
    """
    runs.run("run")
    curve, model, _ = runs.result("run")
    if comm.rank == 0:
        path = runs.folder / "run" / "checkpoints" / "step-00000006" / "rank-00001.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    comm.Barrier()
    runs.run("run", "--resume", "--steps", 5, "--lr-steps", 6, "--keep", 1)
    kept = sorted(path.name for path in (runs.folder / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000005", "step-00000006.damaged"]
    runs.run("run", "--resume")
    again, model_again, _ = runs.result("run")
    np.testing.assert_array_equal(again, curve)
    assert model_again == model
    captured = capsys.readouterr()
    assert comm.rank or ("does not have its checksum" in captured.err and "continues from step 3" in captured.out)
    if comm.rank == 0:
        for path in (runs.folder / "run" / "checkpoints").glob("*/rank-00000.safetensors"):
            path.write_bytes(path.read_bytes()[:-1])
    comm.Barrier()
    assert "none of its 2 checkpoints can be read" in refusal_of_all(comm, capsys, runs.run, "run", "--resume")
