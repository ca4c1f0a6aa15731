"""scripts/train.py on GPUs that are none: every strategy over every transport."""

import re

import numpy as np
import pytest

from scripts.backends import gpus
from scripts.backends.backends import form_on_gpus
from strategies import STRATEGIES
from tests.gpu.gpu_trainer import on_nodes
from tests.support.in_process import alone, log


def cases(ranks):
    """(flags, transport in the end) of every strategy over every transport, after backward and during it.

    Over GPU-aware MPI, through host memory, and on one rank, which exchanges nothing, one of those that are alike
    there: what they exchange by has tests of its own, and through host memory a strategy is the one of CPUs behind the
    bridge.
    """
    device, tried = "alone" if ranks == 1 else "nccl", set()
    for name, kind in STRATEGIES.items():
        if not (kind.traits.exchanges and kind.traits.same_weights):
            continue
        form = form_on_gpus(kind, overlap=False)
        if kind.traits.buffers not in tried:
            yield ["--strategy", name, "--transport", "host"], "host"
        if ranks > 1 or form not in tried:
            yield ["--strategy", name], device
        if ranks > 1 and form not in tried:
            yield ["--strategy", name, "--transport", "gpu-aware"], "gpu-aware"
        if kind.traits.on_gpus.exchanges and (ranks > 1 or form not in tried):
            yield ["--strategy", name, "--overlap"], device
        tried |= {kind.traits.buffers, form}
    if ranks > 1:
        yield ["--strategy", "reduce-bcast", "--server", "dedicated"], "nccl"
        yield ["--strategy", "reduce-bcast", "--server", "dedicated", "--transport", "host"], "host"


@pytest.mark.any_mpi
@pytest.mark.ranks(1, 3)
def test_every_transport_gives_numpys_curve(comm, trainer):
    """One step: the validation loss is that of the new parameters. The tests below go on to a second.

    Strategies that know nodes have two, of two ranks and one.
    """
    steps = ["--steps", 1, "--eval-every", 1]
    reference = {}
    for server in ([], ["--server", "dedicated"]) if comm.size > 1 else ([],):
        reference[bool(server)], _ = trainer.run(*steps, "--backend", "numpy", "--strategy", "reduce-bcast", *server)
    nodes = on_nodes(comm, 2)
    for flags, transport in cases(comm.size):
        world = nodes if transport != "host" and "hierarchical" in flags[1] else None
        curve, checkpoints = trainer.run(*steps, "--backend", "cupy", *flags, world=world)
        assert trainer.config["settings"]["transport"] == transport
        np.testing.assert_allclose(curve, reference["--server" in flags], rtol=1e-4, err_msg=str(flags))
        assert len(checkpoints) == 1


@pytest.mark.ranks(2)
def test_strategies_with_weights_of_their_own_have_numpys(comm, trainer):
    for name in (name for name, kind in STRATEGIES.items() if kind.traits.exchanges and not kind.traits.same_weights):
        expected, _ = trainer.run("--backend", "numpy", "--strategy", name)
        found, _ = trainer.run("--backend", "cupy", "--strategy", name, "--transport", "host")
        np.testing.assert_allclose(found, expected, rtol=1e-4, err_msg=name)


@pytest.mark.any_mpi
@pytest.mark.ranks(2)
def test_the_header_names_gpus_limits_and_kernels(comm, trainer, capsys):
    trainer.monkeypatch.setattr(gpus, "gpu_limits", lambda bus_id: {"power_w": 700, "most_clock_mhz": 1980})
    trainer.run("--backend", "cupy", "--dtype", "bfloat16")
    printed = capsys.readouterr().out
    if comm.rank == 0:
        assert "\nGPUs          2: shim, 700 W, 1980 MHz\n" in printed
        _, steps = printed.split("\nstep 1/2 ")
        assert "\nGPU kernels: attention by our own, attention backward by our own; in products" in steps
        assert [gpu["power_w"] for gpu in trainer.config["gpus"]] == [700, 700]


@pytest.mark.any_mpi
@pytest.mark.ranks(3)
def test_bfloat16_is_a_serial_bfloat16_run(comm, trainer):
    """The same global batch on one rank; and NumPy's float32, further off."""
    serial, _ = trainer.run("--backend", "cupy", "--dtype", "bfloat16", "--batch-size", comm.size, world=alone())
    exact, _ = trainer.run("--backend", "numpy")
    assert 1e-5 < np.abs(serial / exact - 1).max() < 2e-2
    for name, transport in (
        ("reduce-scatter", "nccl"), ("reduce-bcast", "gpu-aware"), ("reduce-bcast", "host"), ("tree", "host"),
        ("zero-3", "host"),
    ):  # fmt: skip
        flags = ["--dtype", "bfloat16", "--strategy", name, "--transport", transport]
        curve, _ = trainer.run("--backend", "cupy", *flags)
        np.testing.assert_allclose(curve, serial, rtol=5e-3, err_msg=str(flags))


@pytest.mark.any_mpi
@pytest.mark.ranks(2)
def test_a_checkpoint_goes_from_gpu_to_gpu_and_to_numpy(comm, trainer):
    _, (before,) = trainer.run("--backend", "cupy", "--strategy", "sliced")
    init = trainer.folder / "model.bin"
    if comm.rank == 0:
        init.write_bytes(before)
    comm.Barrier()
    losses = []
    for flags in (["numpy"], ["cupy"], ["cupy", "--strategy", "hierarchical"], ["cupy", "--strategy", "zero-3"]):
        curve, (after,) = trainer.run("--backend", *flags, "--init", init, "--lr", 0, "--seed", 5)
        losses.append(curve[-1])
        assert after == before, flags
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


@pytest.mark.any_mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "flags",
    [["--transport", "nccl"], ["--dtype", "bfloat16", "--stochastic-rounding"], ["--strategy", "zero-3"],
     ["--strategy", "reduce-bcast", "--server", "dedicated", "--transport", "host"]],
    ids=str,
)  # fmt: skip
def test_samples_are_the_models_and_change_no_bit(comm, trainer, capsys, flags):
    """The text is NumPy's, in float32. The GPU's kernels write it, unless no rank holds all parameters at once."""
    launched, launch = [], trainer.shim.launch
    trainer.monkeypatch.setattr(trainer.shim, "launch", lambda *given: launched.append(given[2]) or launch(*given))

    def run(*backend_and_more):
        capsys.readouterr()
        launched.clear()
        found = trainer.run(*flags, "--vocab-size", 256, "--backend", *backend_and_more)
        _, *texts = capsys.readouterr().out.split("sample after ")
        return *found, [re.split(r"\n(?:step|peak memory) ", text)[0] for text in texts]

    curve, checkpoints, _ = run("cupy")
    sampled, same_checkpoints, texts = run("cupy", "--sample-every", 1)
    attentions = launched.count("attention_forward_64")
    *_, expected = run("numpy", "--sample-every", 1, "--transport", "auto") if "bfloat16" not in flags else [texts]
    np.testing.assert_array_equal(sampled, curve)
    assert same_checkpoints == checkpoints
    if comm.rank == 0:
        assert (attentions >= 200) == ("zero-3" not in flags)
        assert [text[:8] for text in texts] == ["step 1: ", "step 2: "]
    assert comm.bcast(texts == expected), "all ranks fail, as those that do not would wait for rank 0 until a limit"


ROUNDED = (
    ["--strategy", "hierarchical-sharded", "--transport", "gpu-aware"],
    ["--strategy", "hierarchical-sharded", "--overlap", "--dtype", "bfloat16"],
    ["--strategy", "zero-2", "--overlap"],
)


@pytest.mark.any_mpi
@pytest.mark.ranks(3)
def test_bfloat16_on_the_wire_stays_close(comm, trainer):
    """After each step all ranks hold the same parameters, and a second run has the bits of the first."""
    exact, _ = trainer.run("--backend", "numpy")
    nodes = on_nodes(comm, 2)
    for flags in ROUNDED:
        flags = ["--backend", "cupy", "--wire", "bfloat16", "--check-replicas", 1, *flags]
        curve, (checkpoint,) = trainer.run(*flags, world=nodes)
        assert trainer.config["settings"]["transport"] == ("gpu-aware" if "gpu-aware" in flags else "nccl")
        assert 1e-6 < np.abs(curve / exact - 1).max() < 2e-2, flags
        again, (checkpoint_again,) = trainer.run(*flags, world=nodes)
        np.testing.assert_array_equal(again, curve, err_msg=str(flags))
        assert checkpoint_again == checkpoint, flags


@pytest.mark.any_mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("more", [[], ["--fragments", 2], ["--dtype", "bfloat16"]], ids=str)
def test_replicas_that_train_alone(comm, trainer, more):
    """Validation uses the global parameters, and the next step the replica's own, as with NumPy."""
    flags = ["--strategy", "diloco", "--replica", "rank", "--local-steps", 2, "--steps", 5, "--eval-every", 1]
    curves = []
    for backend in (["numpy"], ["cupy", "--transport", "host"]):
        curve, _ = trainer.run(*flags, *more, "--backend", *backend)
        curves.append([*curve, *(line["val_loss"] for line in log(trainer.out))])
    np.testing.assert_allclose(*curves, rtol=6e-3 if "bfloat16" in more else 1e-5)
