"""GPUs that are none, through host memory: when copies and kernels happen changes nothing, and each wait is needed."""

from itertools import cycle

import numpy as np
import pytest

from dist.buffers import host_zeros
from dist.gpu import staging
from dist.gpu.staging import Copied, HostStaging
from gpt2.kernels.cupy import cublaslt
from gpt2.kernels.cupy.device import Device
from strategies.gpu import bridge
from strategies.gpu.bridge import HostBridge
from tests.gpu.cuda_shim import fake_cupy
from tests.gpu.cuda_shim.fake_cublaslt import FakeCublasLt
from tests.gpu.gpu_trainer import DEEP

pytestmark = pytest.mark.any_mpi


LATE = (
    ["--strategy", "reduce-scatter", "--transport", "host"],
    ["--strategy", "hierarchical", "--overlap", "--wire", "bfloat16"],
    ["--strategy", "zero-2", "--transport", "host", "--overlap", *DEEP],
    ["--strategy", "zero-3", "--transport", "host", "--overlap", *DEEP],
    ["--strategy", "reduce-scatter", "--dtype", "bfloat16", "--transport", "host"],
    # Without copies there is less that can be late.
    ["--strategy", "sliced", "--dtype", "bfloat16", "--transport", "gpu-aware"],
    ["--strategy", "allreduce", "--dtype", "bfloat16", "--transport", "nccl"],
)


@pytest.mark.ranks(1, 3)
def test_when_copies_and_kernels_happen_changes_no_bit(comm, trainer, monkeypatch):
    """Late copies, late kernels, and in turns one stream ahead of another or memory that cannot be pinned."""
    monkeypatch.setattr(staging, "CHUNK", 9000)  # of 59 thousand parameters
    copies, everything = {"lag": "copies"}, {"lag": "everything"}
    in_turns = cycle([{"lag": "other streams"}, {"lag": "all but copies in"}, {"lag": "first stream"}, {"pins": False}])
    for flags in LATE if comm.size == 1 else LATE[:4]:
        some = [copies, everything, next(in_turns)] if comm.size == 1 else [copies, copies]
        (curve, checkpoint), *others = [trainer.run("--backend", "cupy", *flags, **machine) for machine in some]
        for other_curve, other_checkpoint in others:
            np.testing.assert_array_equal(other_curve, curve, err_msg=str(flags))
            assert other_checkpoint == checkpoint, flags


def test_small_buffers_are_pinned_each(monkeypatch):
    """The driver registers whole pages, and none twice: what NumPy allocates one after the other may share some."""
    monkeypatch.setattr(cublaslt, "open_library", lambda name: FakeCublasLt())
    fake_cupy.install(monkeypatch, None)
    buffers, copies, before = [host_zeros(5) for _ in range(20)], HostStaging(Device()), fake_cupy.Host.registered
    for buffer in buffers:
        copies.pin(buffer)
    assert fake_cupy.Host.registered == before + len(buffers)
    copies.close()


def broken_waits():
    """Each wait of the way through host memory: what takes it out, flags of a run it is for, and which work lags."""
    into, computed = HostStaging.into, HostStaging.computed

    def never(self):
        mark = computed(self)
        mark.event.stream = None
        return mark

    def at_once(self, host, target, after=None):
        return into(self, host, target)

    def gradients_final(bridge, start, stop):
        copy = bridge.staging.out(bridge.model.gradients[start:stop], bridge.exchanged.gradients[start:stop])
        bridge.on_the_way.append((start, stop, copy))

    host = ["--strategy", "reduce-scatter", "--transport", "host"]
    zero = ["--strategy", "zero-3", "--transport", "host", "--overlap", *DEEP]
    return {
        "copies out are not waited for": (Copied, "Test", lambda self: True, host, "copies"),
        "compute does not wait for copies in": (HostStaging, "before_compute", lambda self, copy: None, host, "copies"),
        "copies out do not wait for compute": (HostStaging, "computed", never, host, "first stream"),
        "gradients go where AdamW still reads": (HostStaging, "into", at_once, host, "all but copies in"),
        "parameters go where kernels still read": (HostStaging, "into", at_once, zero, "all but copies in"),
        "parameters come where copies still read": (bridge, "wait", lambda copied: None, zero, "everything"),
        "two ranges are in one place": (HostBridge, "gradients_final", gradients_final, zero, "copies"),
    }  # fmt: skip


@pytest.mark.ranks(1)
def test_without_any_of_the_waits_the_numbers_are_wrong(comm, trainer, monkeypatch):
    monkeypatch.setattr(staging, "CHUNK", 9000)
    for what, (kind, name, broken, flags, lag) in broken_waits().items():
        right, _ = trainer.run("--backend", "cupy", *flags, lag=lag)
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, broken)
            try:
                wrong, _ = trainer.run("--backend", "cupy", *flags, lag=lag)
            except SystemExit:  # the loss was not a number
                continue
        assert not np.allclose(wrong, right, rtol=1e-4), what
