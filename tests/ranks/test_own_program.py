"""Parts for programs of others: all-reduces of NumPy arrays, and docs/your-own-program.md's example, traced."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from dist.host.allreduce import HierarchicalAllReduce, RingAllReduce, TreeAllReduce
from dist.world import world_of
from scripts import diagnose, plot
from scripts.own_program.traced import traced
from scripts.watching.run_state import FINISHED, Watcher
from tests.support.in_process import answer
from tests.support.launch import launch
from traces import read_run
from traces.read.analysis import measure

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "gradient_descent.py"
SHAPES = ((0,), (1,), (3,), (), (7, 11), (1001,))


@pytest.mark.ranks(1, 3, 4)
@pytest.mark.parametrize("way", [RingAllReduce, TreeAllReduce, HierarchicalAllReduce])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_arrays_become_numpys_sum_with_the_same_bits_on_every_rank(comm, way, dtype):
    """On nodes of two ranks, the last of three with one; in messages of 64 bytes, and in one."""
    world = world_of(comm, comm.Split(comm.rank // 2, comm.rank))
    for segment_bytes in (64, 1 << 20):
        allreduce = way(world, segment_bytes)
        for shape in SHAPES * 2:
            arrays = [np.random.default_rng(rank).normal(size=shape).astype(dtype) for rank in range(comm.size)]
            own = np.array(arrays[comm.rank])
            allreduce(own)
            expected = np.sum(np.array(arrays, np.float64), axis=0)
            np.testing.assert_allclose(own, expected, rtol=0, atol=16 * np.finfo(dtype).eps)
            assert own.shape == shape
            assert len(set(comm.allgather(own.tobytes()))) == 1


@pytest.mark.ranks(1)
def test_what_cannot_be_summed_is_refused(comm):
    world = world_of(comm, comm.Split(0, comm.rank))
    allreduce, constant = RingAllReduce(world), np.zeros(3)
    constant.flags.writeable = False
    for wrong in (np.zeros(3, int), 1.0, np.zeros((4, 4))[:, 1], constant):
        with pytest.raises(ValueError, match=r"expected a float32 or float64 array|hand over a copy"):
            allreduce(wrong)


@pytest.mark.ranks(2)
def test_a_run_folder_holds_steps_and_what_the_program_notes(comm, tmp_path):
    """On one node, where there are no links to probe; tests/suites/test_own_program.py has several."""
    out, world = comm.bcast(tmp_path), world_of(comm, comm.Split(0, comm.rank))
    with traced(world, str(out / "run"), "mine") as tracer:
        for step in range(1, 6):
            with tracer.step(step):
                with tracer.phase("compute"):
                    sum(range(20_000))
                    locked = (out / "run" / "lock.json").exists()
                if step < 5:
                    tracer.note(loss=np.float32(1 / step))
    comm.Barrier()
    run = read_run(out / "run")
    assert (run.missing, run.label, len(run.ranks)) == ([], "mine", 2)
    assert (locked, (out / "run" / "lock.json").exists()) == (True, False)
    assert json.loads((out / "run" / "summary.json").read_text()) == {"steps": 5}
    assert [row.get("loss") for row in run.log] == [*(float(np.float32(1 / step)) for step in range(1, 5)), None]
    times = measure(run)
    steps_s, compute_s = times.phase("step"), times.phase("compute")
    assert ((compute_s > 0) & (compute_s <= steps_s)).all()
    logged = [row["step_s"] for row in run.log if row["step"] in times.steps]
    np.testing.assert_allclose(logged, steps_s[:, 0], rtol=0, atol=1e-8)
    comm.Barrier()  # what follows takes the lock again
    for folder, name in (("run", "mine"), ("new", "my own")):  # it holds a run; a name with a space
        with pytest.raises(SystemExit), traced(world, str(out / folder), name):
            pass


@pytest.mark.any_mpi
def test_the_page_shows_the_example_and_every_program_reads_its_run(tmp_path):
    page = (ROOT / "docs" / "your-own-program.md").read_text()
    assert re.findall(r"```python\n(.*?)```", page, re.DOTALL) == [EXAMPLE.read_text()]
    assert len(EXAMPLE.read_text().splitlines()) < 80
    run = tmp_path / "run"
    ended = launch(3, [sys.executable, str(EXAMPLE), str(run)])
    assert ended.returncode == 0, ended.stderr
    found = re.search(r"error ([\d,]+), after 20 steps ([\d,.]+)", ended.stdout).groups()
    before, after = (float(text.replace(",", "")) for text in found)
    assert after < before / 100
    answered = json.loads(answer(diagnose, run, "--json"))
    assert answered["evidence"]["steps"] == 18
    assert min(row["compute_s"]["median"] for row in answered["evidence"]["ranks"]) > 0
    assert set(answered["evidence"]["exchange_by_phase_s"]) == {"allreduce"}
    assert answered["evidence"]["model"]["reason"].startswith("it is a program of your own")
    assert "gradient-descent" in answer(plot, run)
    watched = Watcher(run).look()
    assert (watched.word, watched.log[-1]["step"]) == (FINISHED, 20)
    assert (run / "plots" / "loss.png").exists()
