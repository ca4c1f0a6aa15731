"""--stochastic-rounding on GPUs that are none: every rank's bfloat16 parameters are one function of float32."""

import numpy as np
import pytest

from gpt2.kernels.cupy import launch
from gpt2.rounding import step_seed
from tests.gpu.cuda_shim.memory import to_bfloat16

pytestmark = pytest.mark.any_mpi
SEED, STEPS = 5, 2
CASES = (
    ["--strategy", "reduce-bcast"],  # over NCCL; of all ranks but one the server does the update
    ["--strategy", "sliced", "--transport", "gpu-aware"],
    ["--strategy", "hierarchical-sharded", "--overlap"],
    ["--strategy", "zero-2", "--transport", "host", "--overlap"],
    ["--strategy", "zero-3", "--overlap"],
    ["--strategy", "ring", "--wire", "bfloat16"],
)


@pytest.mark.ranks(2, 3)
def test_all_ranks_hold_the_same_rounded_parameters(comm, trainer, monkeypatch):
    """Whoever updated a range and however it came: what the kernel that only rounds makes of the float32 parameters."""
    from scripts import train

    assemble, held = train.assemble, []

    def with_a_look_at_the_end(*arguments):
        parts = assemble(*arguments)
        leave_last, model, rounded = parts.checkpoints.leave_last, parts.model, parts.worker.model.parameters.flat

        def look(step, whole):
            pieces = [(rounded[a:b].get(), model.parameters.flat[a:b].copy()) for a, b in model.ranges()]
            held[:] = map(np.concatenate, zip(*pieces, strict=True))
            leave_last(step, whole)

        parts.checkpoints.leave_last = look
        return parts

    monkeypatch.setattr(train, "assemble", with_a_look_at_the_end)
    for flags in CASES if comm.size == 3 else CASES[1::2]:
        flags = ["--backend", "cupy", "--dtype", "bfloat16", "--stochastic-rounding", "--seed", SEED, *flags]
        trainer.run(*flags, "--steps", STEPS, "--eval-every", STEPS, lag="everything")
        rounded, values = held[0].view(np.uint16), held[1]
        expected = np.zeros_like(rounded)
        launch.round_parameters(trainer.shim, expected, values, step_seed(SEED, STEPS))
        np.testing.assert_array_equal(rounded, expected, err_msg=str(flags))
        assert 0.2 < (rounded != to_bfloat16(values)).mean() < 0.3, "a quarter goes away from the nearest"
        assert len(set(comm.allgather(rounded.tobytes()))) == 1, flags
