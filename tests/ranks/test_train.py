"""scripts/train.py as users run it: one curve on any number of ranks, what a run leaves, every user's mistake."""

import itertools
import json
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest

from dist.world import start_world
from gpt2.data.shards import write_shard
from gpt2.formats import llmc
from gpt2.optimizer import SCHEDULES, LearningRateSchedule
from gpt2.parameters import Layout, Parameters
from scripts import train as program
from strategies import STRATEGIES
from tests.support.in_process import ROOT, alone, log
from tests.support.in_process import train as train_here
from tests.support.launch import launch
from tests.support.refusal import refusal_of_all
from traces import read_run
from traces.read.schemas import LOG_ROW
from traces.record.phases import NAMES

TRAIN = str(ROOT / "scripts" / "train.py")
SMALL = ["--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--context", "16", "--lr", "1e-2", "--warmup", "2"]


def train(ranks, out, *flags, check=True):
    """As a user starts it."""
    result = launch(ranks, [sys.executable, TRAIN, *SMALL, "--out", str(out), *map(str, flags)], cwd=ROOT)
    assert result.returncode == 0 or not check, result.stderr[-3000:]
    return result


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Two small shards of tokens below 100."""
    folder = tmp_path_factory.mktemp("tokens")
    random = np.random.default_rng(1)
    for number, count in enumerate((5001, 3003)):
        write_shard(folder / f"part_{number}.bin", np.sort(random.integers(100, size=count)).astype(np.uint16))
    return folder


CURVES = {  # by ranks: batch size, micro-steps and strategy that make a global batch of 12
    1: [(4, 3, [])],
    2: [
        (3, 2, ["--strategy", "sliced"]), (3, 2, ["--strategy", "hierarchical-sharded", "--overlap"]),
        (3, 2, ["--strategy", "zero-3", "--overlap"]),
    ],
    3: [
        (4, 1, ["--strategy", "reduce-bcast"]), (4, 1, ["--strategy", "tree", "--overlap"]),
        (2, 2, ["--strategy", "zero-2", "--overlap"]), (2, 2, ["--strategy", "zero-3"]),
    ],
    4: [(3, 1, ["--strategy", "reduce-scatter"]), (4, 1, ["--strategy", "reduce-bcast", "--server", "dedicated"])],
}  # fmt: skip


@pytest.mark.ranks(1, 2, 3, 4)
def test_the_global_batch_decides_the_curve_not_the_ranks(comm, shared_path, tokens):
    """12 sequences as ranks and micro-steps, one of the ranks a dedicated server, against one rank alone."""

    def curve(world, out, B, K, *flags):
        data = ["--train-data", tokens / "part_*.bin", "--vocab-size", 100, "--steps", 8, "--eval-every", 0]
        train_here(world, out, *SMALL, *data, "--batch-size", B, "--grad-accum", K, *flags)
        return [(line["loss"], line["grad_norm"]) for line in log(out)]

    reference = curve(alone(), shared_path / f"alone-{comm.rank}", 12, 1)
    assert reference[-1][0] < reference[0][0] - 0.1, "it must learn"
    for number, (B, K, flags) in enumerate(CURVES[comm.size]):
        found = curve(start_world(), shared_path / f"{number}", B, K, *flags)
        np.testing.assert_allclose(found, reference, rtol=2e-4, err_msg=str(flags))


@pytest.mark.any_mpi
def test_what_a_run_leaves(tmp_path):
    """The embedded corpus, all phases of all steps, the settings, a checkpoint that --init reads."""
    run = tmp_path / "run"
    result = train(2, run, "--steps", 6, "--eval-every", 3, "--eval-steps", 2, "--strategy", "sliced")
    assert result.stdout.count("step 6/6") == 1
    config = json.loads((run / "config.json").read_text())
    assert config["settings"]["strategy"] == "sliced"
    assert config["settings"]["seq_len"] == 16
    assert [place["rank"] for place in config["ranks"]] == [0, 1]
    lines = log(run)
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert {name for line in lines for name in line} <= {"step", *LOG_ROW}
    assert [line["step"] for line in lines if "val_loss" in line] == [3, 6]
    assert lines[-1]["tokens"] == 6 * 2 * 4 * 16
    for line in lines:
        # The mean over ranks, which may have waited for rank 0 between its steps too.
        assert 0 <= line["exposed_exchange_s"] <= line["step_s"] + 1
        assert line["tokens_per_s"] == pytest.approx(2 * 4 * 16 / line["step_s"])

    trace = read_run(run)
    assert [rank.identity["rank"] for rank in trace.ranks] == [0, 1]
    for rank in trace.ranks:
        seen = {NAMES[index] for index in np.unique(rank.records["phase"])}
        assert seen == {"step", "data", "forward", "backward", "reduce", "allreduce", "update", "bcast", "wait", "eval"}

    checkpoint = run / "checkpoints" / "step-00000006"
    marker = json.loads((checkpoint / "checkpoint.json").read_text())
    assert (marker["step"], marker["next_window"], marker["updates"]) == (6, 6 * 8, 6)
    parameters = Parameters.zeros(Layout(llmc.read_config(checkpoint / "model.bin")))
    llmc.read_parameters(checkpoint / "model.bin", parameters)
    assert parameters.layout.count == config["parameters"]
    assert parameters.lnf_weight.any()
    assert marker["model_crc32"] == zlib.crc32((checkpoint / "model.bin").read_bytes())

    again = tmp_path / "again"
    train(2, again, "--steps", 1, "--init", run, "--seed", 9, "--eval-every", 1, "--eval-steps", 2, "--lr", 0)
    assert log(again)[-1]["val_loss"] == pytest.approx(lines[-1]["val_loss"], rel=1e-5)


@pytest.mark.ranks(3)
def test_validation_does_not_depend_on_ranks_or_batch(comm, shared_path, tokens):
    """The whole validation set, which no batch size divides: 187 windows of 16 tokens."""

    def loss(world, out, B):
        data = ["--train-data", tokens / "part_0.bin", "--val-data", tokens / "part_1.bin", "--vocab-size", 100]
        flags = ["--batch-size", B, "--steps", 1, "--lr", 0, "--eval-every", 1, "--eval-steps", 0]
        train_here(world, out, *SMALL, *data, *flags)
        return log(out)[0]["val_loss"]

    reference = loss(alone(), shared_path / f"alone-{comm.rank}", 8)
    assert loss(start_world(), shared_path / "together", 7) == pytest.approx(reference, rel=1e-6)


@pytest.mark.ranks(2)
def test_the_header_counts_tokens_and_epochs(comm, shared_path, tokens, capsys):
    """Three windows of 16 tokens a rank and step; 5,001 and 3,003 tokens hold 312 and 187 of them."""
    flags = [*SMALL, "--vocab-size", 100, "--batch-size", 3, "--eval-every", 0]
    data = ["--train-data", tokens / "part_*.bin", "--val-data", tokens / "part_1.bin"]
    train_here(start_world(), shared_path / "both", *flags, *data, "--steps", 150)
    printed, lines = capsys.readouterr(), []
    if comm.rank == 0:
        lines = [line for line in printed.out.splitlines() if line.startswith("data  ")]
        assert lines == ["data          8,004 tokens for training, 3,003 for validation; all steps make 1.80 epochs"]
        warning = (
            f"warning: {tokens}/part_1.bin: both training and validation data, so val loss does not show overfitting"
        )
        assert printed.err.splitlines().count(warning) == 1
    data = ["--train-data", tokens / "part_0.bin", "--val-data", tokens / "part_1.bin"]
    train_here(start_world(), shared_path / "apart", *flags, *data, "--steps", 1)
    printed = capsys.readouterr()
    assert "both training" not in printed.err
    assert ("5,001 tokens for training, 3,003 for validation; all steps make 0.019 epochs" in printed.out) == (
        comm.rank == 0
    )
    assert ("warning: --warmup 2 is above --steps 1" in printed.err) == (comm.rank == 0)


@pytest.mark.ranks(1)
def test_trace_window_and_off(comm, shared_path):
    run, off = shared_path / "window", shared_path / "off"
    train_here(alone(), run, *SMALL, "--steps", 5, "--eval-every", 0, "--trace", "2:3")
    assert set(read_run(run).ranks[0].records["step"]) == {2, 3}
    train_here(alone(), off, *SMALL, "--steps", 2, "--eval-every", 0, "--trace", "off")
    assert not list((off / "traces").glob("*"))


CORPUS = ROOT.parent / "shared" / "corpus" / "tinyshakespeare.txt"
VOCABULARY = ROOT.parent / "shared" / "tiktoken_cache"


@pytest.mark.skipif(not CORPUS.exists(), reason="tinyshakespeare.txt is not beside the project")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_text(comm, shared_path, tokenizer, monkeypatch):
    """A run in another folder finds the shards of the first, which are training data like any other."""
    if tokenizer == "gpt2" and not VOCABULARY.exists():
        pytest.skip("GPT-2's vocabulary files are not beside the project")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(VOCABULARY))
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_path / "cache"))
    flags = ["--text", CORPUS, "--tokenizer", tokenizer, "--steps", 2, "--eval-every", 2, "--eval-steps", 1]
    first, second, third = shared_path / "a", shared_path / "elsewhere" / "b", shared_path / "c"
    train_here(start_world(), first, *SMALL, *flags)
    assert log(first)[0]["loss"] == pytest.approx(np.log(50257 if tokenizer == "gpt2" else 256), rel=0.02)
    shards = sorted((shared_path / "cache" / "gpt2-mpi" / "tokens").glob("*.bin"))
    times = [shard.stat().st_mtime_ns for shard in shards]
    assert len(shards) == 2
    train_here(start_world(), second, *SMALL, *flags)
    assert [shard.stat().st_mtime_ns for shard in shards] == times
    assert [line["loss"] for line in log(second)] == [line["loss"] for line in log(first)]
    train_here(start_world(), third, *SMALL, "--train-data", shards[0], "--steps", 1, "--eval-every", 0)


@pytest.mark.ranks(2)
def test_documents_in_a_text(comm, shared_path, monkeypatch, capsys):
    """Split at a literal end-of-text, they are the documents of a folder. Else one line says that they are not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_path / "cache"))
    documents = [f"Story {number}.\n" * 20 for number in range(9)]
    folder = shared_path / "a"
    path = shared_path / "b.txt"
    if comm.rank == 0:
        folder.mkdir()
        for number, document in enumerate(documents):
            (folder / f"{number}.txt").write_text(document)
        path.write_text("<|endoftext|>".join(documents))
    flags = ["--steps", 2, "--eval-every", 2, "--eval-steps", 1]
    runs = {"folder": ["--text", folder], "split": ["--text", path, "--split-documents"], "text": ["--text", path]}
    remarks = []
    for name, more in runs.items():
        capsys.readouterr()
        train_here(start_world(), shared_path / name, *SMALL, *flags, *more)
        remarks.append(capsys.readouterr().err.count("<|endoftext|> is read as ordinary text"))
    assert remarks == [0, 0, 1 if comm.rank == 0 else 0]
    of_folder, of_split, of_text = ([line["loss"] for line in log(shared_path / name)] for name in runs)
    assert of_folder == of_split
    assert of_folder != of_text


HELP_WITHOUT_MPI = f"""
import runpy, sys
import mpi4py
mpi4py.rc(initialize=False)
from mpi4py import MPI
MPI.Init_thread = None  # calling it would fail, as MPI_Init does on some login nodes
sys.argv = ["train.py", "--help"]
runpy.run_path({TRAIN!r}, run_name="__main__")
"""


def test_help_needs_no_mpi():
    result = subprocess.run([sys.executable, "-c", HELP_WITHOUT_MPI], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "--strategy" in result.stdout
    assert "reduce-bcast" in result.stdout


def write_model_header(path, *numbers):
    path.write_bytes(struct.pack("<256i", *numbers, *[0] * (256 - len(numbers))))


MISTAKES = {
    "unknown strategy": (["--strategy", "fastest"], "invalid choice: 'fastest'"),
    "unknown flag": (["--batchsize", "3"], "--batchsize is not a flag: did you mean --batch-size?"),
    "heads": (["--n-head", "3"], "3 heads do not divide 16 channels"),
    "no heads": (["--n-head", "0"], "--n-head is 0"),
    "batch of none": (["--batch-size", "0"], "--batch-size is 0"),
    "batch beyond the data": (
        ["--batch-size", "1", "--grad-accum", "1000000"],
        "windows of 16 tokens, expected at least 2000000",
    ),
    "nan": (["--lr", "nan"], "--lr is nan"),
    "trace window": (["--trace", "5:2"], "--trace"),
    "missing data": (["--train-data", "nowhere/*.bin"], "no file matches nowhere/*.bin"),
    "missing text": (["--text", "nowhere.txt"], "nowhere.txt"),
    "empty text": (["--text", "{tmp}/empty.txt"], "empty.txt"),
    "model as data": (["--train-data", "{tmp}/model.bin"], "model.bin"),
    "short shard": (["--train-data", "{tmp}/short.bin"], "windows of 16 tokens, expected at least 8"),
    "token beyond the vocabulary": (["--train-data", "{tmp}/large.bin", "--vocab-size", "100"], "token 150 is 5000"),
    "data as model": (["--init", "{tmp}/short.bin"], "short.bin"),
    "truncated model": (["--init", "{tmp}/model.bin"], "model.bin"),
    "a run without a checkpoint": (["--init", "{tmp}"], "holds no checkpoints"),
    "a run is there": (["--out", "{tmp}/taken"], "already holds a run"),
    "out is a file": (["--out", "{tmp}/empty.txt"], "empty.txt"),
    "text and data": (["--text", "a", "--train-data", "b"], "--text and --train-data"),
    "none, once": (["--strategy", "none"], "--no-exchange"),
    "server without one": (["--strategy", "sliced", "--server", "dedicated"], "has no server"),
    "server of zero-3": (["--strategy", "zero-3", "--server", "dedicated"], "--strategy zero-3, which has no server"),
    "feedback of nothing": (["--strategy", "auto", "--error-feedback"], "--error-feedback with --wire float32"),
    "too few ranks": (["--expect-ranks", "64"], "2 ranks, expected 64"),
}


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    (folder / "empty.txt").write_text("")
    write_shard(folder / "short.bin", np.arange(100, dtype=np.uint16))
    large = np.arange(1000, dtype=np.uint16) % 100
    large[150] = 5000
    write_shard(folder / "large.bin", large)
    write_model_header(folder / "model.bin", 20240326, 3, 16, 256, 1, 2, 16, 256)
    (folder / "taken").mkdir()
    (folder / "taken" / "config.json").write_text("{}")
    return folder


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_users_mistake_is_one_line(comm, shared_path, bad_files, mistake, monkeypatch, capsys):
    flags, says = MISTAKES[mistake]
    out = shared_path / "run"
    arguments = [*SMALL, "--out", str(out), *(flag.format(tmp=bad_files) for flag in flags)]
    monkeypatch.setattr(sys, "argv", [TRAIN, *arguments])
    assert says in refusal_of_all(comm, capsys, program.main)
    comm.Barrier()  # rank 0 has removed its lock
    assert not out.exists(), "nothing may be left behind"


@pytest.mark.any_mpi
@pytest.mark.parametrize("mistake", ["unknown flag", "a run is there"])
def test_with_it_the_command_ends(tmp_path, bad_files, mistake):
    """Before or after MPI starts, one line is the only output, and mpirun returns the exit code."""
    flags, says = MISTAKES[mistake]
    result = train(2, tmp_path / "run", *(flag.format(tmp=bad_files) for flag in flags), check=False)
    assert result.returncode == 2, result.stderr
    assert [says in line for line in result.stderr.splitlines() if line.startswith("error: ")] == [True]
    assert "Traceback" not in result.stderr


def test_divergence_ends_the_run(tmp_path):
    result = train(2, tmp_path / "run", "--lr", "1e30", "--grad-clip", 0, "--steps", 50, "--eval-every", 0, check=False)
    assert result.returncode == 2
    assert result.stderr.count("error: the loss of step") == 1


@pytest.mark.ranks(1, 3)
def test_auto_takes_a_strategy_and_says_why(comm, shared_path, capsys):
    run = shared_path / "run"
    train_here(start_world(), run, *SMALL, "--strategy", "auto", "--wire", "bfloat16", "--steps", 2)
    chosen = json.loads((run / "config.json").read_text())["settings"]["strategy"]
    assert "bfloat16" in STRATEGIES[chosen].traits.wires
    printed = capsys.readouterr().out
    assert comm.rank or printed.count("--strategy auto chose ") == 1
    why = "one rank exchanges nothing" if comm.size == 1 else "predicted "
    assert comm.rank or f"--strategy auto chose {chosen}: {why}" in printed
    assert comm.rank or " trial" not in printed


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name):
    """Up to lr over the warm-up, never above it, down to min_lr at the last step (constant: stays)."""
    schedule = LearningRateSchedule(name, lr=1.0, min_lr=0.1, warmup=10, steps=100)
    rates = [schedule.at(step) for step in range(1, 101)]
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) / 10)
    assert max(rates) <= 1.0
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(rates[9:]))
    assert rates[-1] == pytest.approx(1.0 if name == "constant" else 0.1)
    middle = {"cosine": 0.55, "linear": 0.55, "constant": 1.0, "wsd": 1.0}[name]
    assert rates[54] == pytest.approx(middle, abs=0.01)
