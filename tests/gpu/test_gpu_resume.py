"""Checkpoints of runs on GPUs that are none: state that lies on the device is saved and comes back."""

import shutil

import numpy as np
import pytest

from tests.gpu.gpu_trainer import on_nodes

pytestmark = pytest.mark.any_mpi


def cases():
    """A strategy's state in each place: on the GPU, or beside parameters in host memory; in parts, also apart."""
    yield ["--strategy", "reduce-scatter", "--transport", "nccl"]
    yield ["--strategy", "hierarchical-sharded", "--transport", "host", "--overlap", "--wire", "bfloat16"]
    sharded = ["--strategy", "hierarchical-sharded", "--transport", "nccl", "--overlap", "--wire", "bfloat16"]
    yield [*sharded, "--error-feedback"]
    yield ["--strategy", "zero-3", "--overlap", "--dtype", "bfloat16", "--stochastic-rounding"]


@pytest.mark.ranks(2)
def test_runs_on_gpus_go_on_bit_for_bit(comm, trainer):
    """On two nodes."""
    nodes = on_nodes(comm, 1)
    for flags in cases():
        flags = ["--backend", "cupy", *flags]
        steps = ["--steps", 2, "--eval-every", 2]
        curve, (model,) = trainer.run(*flags, *steps, "--checkpoint-every", 1, world=nodes)
        whole, again = (trainer.folder / f"{number}-0" for number in (trainer.count, trainer.count + 1))
        if comm.rank == 0:
            shutil.copytree(whole, again)
            shutil.rmtree(again / "checkpoints" / "step-00000002")
        comm.Barrier()
        curve_again, (model_again,) = trainer.run(*flags, *steps, "--resume", world=nodes)
        np.testing.assert_array_equal(curve_again, curve, err_msg=str(flags))
        assert model_again == model, flags


@pytest.mark.ranks(2)
def test_a_run_moves_from_gpus_to_cores(comm, trainer):
    steps = ["--steps", 3, "--checkpoint-every", 1, "--eval-every", 3, "--eps", 1e-4]
    curve, _ = trainer.run("--backend", "cupy", *steps)
    whole, again = (trainer.folder / f"{number}-0" for number in (1, 2))
    if comm.rank == 0:
        shutil.copytree(whole, again)
        shutil.rmtree(again / "checkpoints" / "step-00000003")
    comm.Barrier()
    curve_again, _ = trainer.run("--backend", "numpy", "--strategy", "ring", *steps, "--resume")
    np.testing.assert_allclose(curve_again, curve, rtol=1e-4)
