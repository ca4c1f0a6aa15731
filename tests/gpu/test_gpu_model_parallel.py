"""scripts/train.py on GPUs that are none, several of which share a model: parts of tensors, stages of layers."""

import numpy as np
import pytest

from gpt2.kernels.cupy import classifier
from tests.support.in_process import alone

pytestmark = pytest.mark.any_mpi
# 3 heads over 2 parts, 128 rows of which the second part's last 27 are pads: nothing divides. With this eps, rounding
# noise where the true gradient is 0 (the key bias) stays noise.
UNEVEN = ["--n-layer", 2, "--n-head", 3, "--n-embd", 192, "--vocab-size", 101, "--context", 5, "--eps", 1e-4]
GLOBAL_BATCH = 4
CUTS = {  # ranks: (copies, parts, stages, flags)
    2: [
        (1, 2, 1, ["--transport", "nccl"]),
        (1, 2, 1, ["--transport", "host", "--strategy", "zero-3"]),
        (1, 1, 2, ["--transport", "host", "--pipeline-schedule", "gpipe"]),
    ],
    4: [
        (1, 2, 2, ["--transport", "nccl", "--pipeline-schedule", "gpipe"]),
        (1, 2, 2, ["--transport", "host"]),
        (2, 1, 2, ["--transport", "nccl", "--strategy", "zero-2"]),
        (2, 1, 2, ["--transport", "host", "--strategy", "ring", "--overlap", "--pipeline-schedule", "gpipe"]),
    ],
}


def flags_of(copies, parts, stages):
    micro_steps = GLOBAL_BATCH // copies  # of one sequence each, in training and validation
    return ["--tensor-parallel", parts, "--pipeline-parallel", stages, "--batch-size", 1, "--grad-accum", micro_steps,
            "--eval-steps", micro_steps]  # fmt: skip


@pytest.mark.ranks(2, 4)
def test_every_cut_has_the_serial_losses(comm, trainer):
    """And the same bits where all that is queued is done as late as can be."""
    serial, _ = trainer.run("--backend", "numpy", *UNEVEN, "--batch-size", GLOBAL_BATCH, world=alone())
    for *shape, flags in CUTS[comm.size]:
        flags = ["--backend", "cupy", *UNEVEN, *flags_of(*shape), *flags]
        curve, checkpoint = trainer.run(*flags)
        assert trainer.config["settings"]["backend"] == "cupy"
        np.testing.assert_allclose(curve, serial, rtol=1e-5, err_msg=str(flags))
        again, checkpoint_again = trainer.run(*flags, lag="everything")
        np.testing.assert_array_equal(again, curve, err_msg=str(flags))
        assert checkpoint_again == checkpoint, flags


@pytest.mark.ranks(2)
def test_bfloat16_is_a_serial_bfloat16_run(comm, trainer, monkeypatch):
    """The losses of few rows at a time, too, where no gradient is wanted: parts need not see as many."""
    monkeypatch.setattr(classifier, "LOGITS_BYTES", 2 * 64 * (2 + comm.rank))
    bfloat16 = ["--backend", "cupy", "--dtype", "bfloat16", *UNEVEN]
    serial, _ = trainer.run(*bfloat16, "--batch-size", GLOBAL_BATCH, world=alone())
    for *shape, flags in ((1, 2, 1, ["--transport", "nccl"]), (1, 1, 2, ["--transport", "host"])):
        curve, _ = trainer.run(*bfloat16, *flags_of(*shape), *flags)
        np.testing.assert_allclose(curve, serial, rtol=5e-3, err_msg=str(flags))
