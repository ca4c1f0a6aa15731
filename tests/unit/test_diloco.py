"""diloco on ranks that are threads, over an MPI that delivers late: as PyTorch, and where it equals other methods."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gpt2.optimizer import AdamW, AdamWSettings, Clipping
from gpt2.parameters import Layout
from scripts.settings.checks import complete
from scripts.settings.derived import unused_steps
from scripts.settings.memory import bytes_of_wholes
from scripts.settings.training import parse_settings
from strategies import find
from strategies.base import OuterSteps
from tests.fixtures import make_diloco_fixture as pytorch
from tests.ranks.test_strategies import CONFIG, KERNELS
from tests.support.jobs import host_job
from tests.support.refusal import refusal
from tests.support.thread_ranks import run_ranks, share_memory
from traces import Tracer

ADAMW = AdamWSettings(*pytorch.BETAS, pytorch.EPS, weight_decay=0.0)
LAYOUT = Layout(CONFIG)
EXPECTED = np.load(Path(pytorch.__file__).with_name("diloco.npz"))
TARGETS = pytorch.targets()
ALONE = 1, 1, 1, 1


@pytest.fixture(autouse=True)
def _shared_in_process(monkeypatch):
    share_memory(monkeypatch)


def new_adamw(start, stop):
    return AdamW(KERNELS, LAYOUT, start, stop, ADAMW)


class Training:
    """A rank's part of the training of make_diloco_fixture.py. All ranks of a replica have the same gradients."""

    def __init__(self, world, outer, max_norm=pytorch.CLIP, **options):
        kind = find("diloco")
        self.world = world
        self.buffers = kind.traits.buffers(world, LAYOUT.size, replica=outer.replica)
        self.replica = world.rank if outer.replica == "rank" else world.node
        if self.buffers.fills_parameters:
            self.buffers.parameters[:] = pytorch.start()
        world.comm.Barrier()
        job = host_job(
            kind, world=world, buffers=self.buffers, new_optimizer=new_adamw, sum_of_squares=KERNELS.sum_of_squares,
            clipping=Clipping(max_norm), tracer=Tracer(), final_ranges=LAYOUT.final_ranges(), outer=outer, **options,
        )  # fmt: skip
        self.strategy = kind(job)

    def step(self, target):
        """The norm that `update` returns."""
        gradients = np.tanh(self.buffers.parameters - target[self.replica]) / self.strategy.workers
        self.buffers.gradients[:] = gradients
        self.strategy.progress()
        return self.strategy.update(pytorch.LR)

    def globals(self):
        with self.strategy.evaluated():
            return self.buffers.parameters.copy()

    def run(self, targets=TARGETS, saved=pytorch.SAVED):
        """The global parameters after the saved steps."""
        found = []
        for step, target in enumerate(targets, 1):
            self.step(target)
            if step in saved:
                found.append(self.globals())
        return np.array(found)


def train(nodes, outer, most=0, **options):
    """Of each rank: its global parameters after the saved steps."""
    return run_ranks(nodes, lambda world: Training(world, outer, **options).run(), most=most, slow=sum(nodes) - 1)


@pytest.mark.parametrize("fragments", pytorch.FRAGMENTS)
@pytest.mark.parametrize(("nodes", "replica"), [(ALONE, "node"), ((2, 2), "rank"), ((2, 3, 2, 2), "node")])
def test_it_is_pytorch(nodes, replica, fragments):
    """With late messages, whatever ranks train a replica; every rank has the same bits."""
    outer = OuterSteps(pytorch.LOCAL_STEPS, pytorch.OUTER_LR, pytorch.MOMENTUM, replica, fragments)
    found = train(nodes, outer, most=2)
    assert len({one.tobytes() for one in found}) == 1
    np.testing.assert_allclose(found[0], EXPECTED[str(fragments)], rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{"wire": "bfloat16"}, {"wire": "bfloat16", "error_feedback": True}], ids=str)
@pytest.mark.parametrize("fragments", [1, 5])
def test_rounded_changes_are_close(fragments, options):
    outer = OuterSteps(pytorch.LOCAL_STEPS, pytorch.OUTER_LR, pytorch.MOMENTUM, "rank", fragments)
    found = train(ALONE, outer, most=2, **options)
    assert len({one.tobytes() for one in found}) == 1
    difference = np.abs(found[0] - EXPECTED[str(fragments)]).max()
    assert 1e-5 < difference < 1e-2


def test_an_outer_step_of_rate_1_each_step_averages_parameters():
    outer = OuterSteps(local_steps=1, lr=1.0, momentum=0.0)
    found = train(ALONE, outer, max_norm=0.0)[0]
    shared, optimizers = pytorch.start(), [new_adamw(0, LAYOUT.size) for _ in ALONE]
    for step, target in enumerate(TARGETS, 1):
        own = [shared.copy() for _ in ALONE]
        for x, optimizer, goal in zip(own, optimizers, target, strict=True):
            optimizer.update(x, np.tanh(x - goal), pytorch.LR, 1.0)
        shared = np.mean(own, axis=0)
        if step in pytorch.SAVED:
            np.testing.assert_allclose(found[pytorch.SAVED.index(step)], shared, rtol=0, atol=1e-6)


def test_one_replica_is_adamw_alone():
    found = train([3], OuterSteps(local_steps=5, lr=1.0, momentum=0.0), max_norm=0.0)[0]
    x, optimizer = pytorch.start(), new_adamw(0, LAYOUT.size)
    for step, target in enumerate(TARGETS, 1):
        optimizer.update(x, np.tanh(x - target[0]), pytorch.LR, 1.0)
        if step in pytorch.SAVED:
            np.testing.assert_allclose(found[pytorch.SAVED.index(step)], x, rtol=0, atol=1e-6)


def test_the_norm_is_that_of_the_replica_and_nothing_travels_between_outer_steps():
    """A rank whose neighbours make no step gets through H - 1 steps."""

    def program(world):
        training = Training(world, OuterSteps(local_steps=4))
        if world.rank == 0:
            return [training.step(target) for target in TARGETS[:3]]

    norms = run_ranks([1, 1], program)[0]
    expected = np.linalg.norm(np.tanh(pytorch.start() - TARGETS[0, 0]))
    assert norms[0] == pytest.approx(expected, rel=1e-6)


def test_a_piece_waits_for_a_kernel_of_the_next_step():
    """So it delays no message of the meeting after the step. At the latest it starts when the next update needs it."""

    def program(world):
        training = Training(world, OuterSteps(local_steps=4, fragments=2))
        exchange = training.strategy.outer_exchange
        begun = []
        allreduce = exchange.allreduce
        exchange.allreduce = lambda *piece: begun.append(piece) or allreduce(*piece)
        counts = []
        for target in TARGETS[:3]:
            training.step(target)
            counts.append(len(begun))
        training.strategy.update(pytorch.LR)  # a step without a kernel
        return [*counts, len(begun)]

    assert run_ranks([1, 1], program) == [[0, 0, 1, 2]] * 2


def completed(*flags):
    return complete(parse_settings("", ["--strategy", "diloco", *flags]), 4)[0]


def test_flags():
    """Fragments travel during training. A warning names steps that the global parameters will lack."""
    assert completed("--local-steps", "6", "--fragments", "3").overlap
    assert not completed("--local-steps", "6").overlap
    said = refusal(completed, "--local-steps", "6", "--fragments", "4")
    assert said.startswith("--local-steps 6 with --fragments 4, expected a multiple of it")
    assert "the last 3 steps do not enter" in unused_steps(completed("--steps", "45", "--local-steps", "6"))
    assert not unused_steps(completed("--steps", "42", "--local-steps", "6"))


def test_memory_of_a_node():
    """A replica holds 6 vectors besides gradients: its own and the global parameters, velocity, change, two moments.

    A node of four ranks has one replica or four. Rounding errors are one more vector of each replica.
    """
    world = SimpleNamespace(local_size=4, size=8, node_count=2)
    config = complete(parse_settings("", []), 8)[1]
    by_node, by_rank, with_errors = (
        bytes_of_wholes(completed(*flags), config, 1000, world)
        for flags in ([], ["--replica", "rank"], ["--wire", "bfloat16", "--error-feedback"])
    )
    assert by_rank - by_node == 4 * 1000 * (4 * 6 - 6)
    assert with_errors - by_node == 4 * 1000
