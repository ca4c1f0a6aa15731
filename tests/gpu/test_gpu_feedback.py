"""--error-feedback between GPUs that are none: strategies have the bits of those in host memory, step after step."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from dist.buffers import OwnBuffers
from dist.gpu.buffers import device_zeros
from dist.gpu.nccl import NcclComm
from dist.wire import WireFormat
from gpt2.kernels.cupy import cublaslt
from gpt2.kernels.cupy.device import Device
from gpt2.optimizer import Clipping
from scripts.backends.backends import exchange_on_gpus, form_on_gpus
from strategies import STRATEGIES, Job
from tests.gpu.cuda_shim import fake_cupy
from tests.gpu.cuda_shim.fake_cublaslt import FakeCublasLt
from tests.gpu.gpu_trainer import on_nodes
from traces import Tracer

SIZE, STEPS = 203, 4
RANGES = (120, SIZE), (50, 120), (0, 50)  # as backward finishes them
BUCKETS = {"after backward": None, "during it": 4 * 60}
ROUNDED = WireFormat("bfloat16", segment_bytes=64, error_feedback=True)
NAMES = ("ring", "tree", "hierarchical", "hierarchical-sharded")


class Copying:
    """An optimizer whose parameters become the gradients."""

    def update(self, parameters, gradients, lr, gradient_scale):
        parameters[:] = gradients


def job_of(world, buffers, bucket_bytes, new_exchange):
    return Job(
        world, buffers, lambda start, stop: Copying(), lambda flat: 0.0, Clipping(0.0), Tracer(),
        new_exchange=new_exchange, final_ranges=RANGES, bucket_bytes=bucket_bytes,
    )  # fmt: skip


def in_host_memory(world, name, bucket_bytes):
    """(the strategy, what sets its gradients, what reads an array of its)."""
    kind = STRATEGIES[name]
    buffers = kind.traits.buffers(world, SIZE)
    exchange = partial(kind.traits.host_exchange, wire_format=ROUNDED)
    return kind(job_of(world, buffers, bucket_bytes, exchange)), partial(np.copyto, buffers.gradients), np.array


def between_gpus(world, name, bucket_bytes):
    device, kind = Device(), STRATEGIES[name]
    stream = device.cupy.cuda.Stream(non_blocking=True) if bucket_bytes else device.stream
    comm = NcclComm(world.comm, device, stream, world.local_comm)
    buffers = OwnBuffers(world, SIZE, zeros=partial(device_zeros, device))
    exchange = exchange_on_gpus(kind, ROUNDED)
    job = job_of(replace(world, comm=comm), buffers, bucket_bytes, exchange)
    return form_on_gpus(kind, overlap=bool(bucket_bytes))(job), buffers.gradients.set, device.download


def trained(made, rank):
    """By step: the parameters, and what rounding has taken of this rank's gradients so far."""
    strategy, set_gradients, read = made
    for step in range(STEPS):
        set_gradients(np.random.default_rng([rank, step]).standard_normal(SIZE).astype(np.float32))
        for part in RANGES:
            strategy.gradients_final(*part)
        strategy.update(1.0)
        strategy.before_use(0, SIZE)
        yield read(strategy.parameters), read(strategy.errors())


@pytest.mark.any_mpi
@pytest.mark.ranks(3, 4)
def test_what_rounding_takes_is_added_to_the_next_step(comm, monkeypatch):
    """On nodes of one rank, and of two with a rail each."""
    monkeypatch.setattr(cublaslt, "open_library", lambda name: FakeCublasLt())
    for per_node in (1, 2):
        world = on_nodes(comm, per_node)
        for name in NAMES:
            for when, bucket_bytes in BUCKETS.items():
                if name == "hierarchical-sharded" and bucket_bytes:
                    continue  # in host memory it all-reduces a part, so other ranks round
                case = f"{name}, {per_node} a node, {when}"
                fake_cupy.install(monkeypatch, None, nccl=True, lag="everything")
                on_host = trained(in_host_memory(world, name, bucket_bytes), comm.rank)
                on_gpus = trained(between_gpus(world, name, bucket_bytes), comm.rank)
                for (expected, expected_errors), (found, errors) in zip(on_host, on_gpus, strict=True):
                    np.testing.assert_array_equal(found, expected, err_msg=case)
                    np.testing.assert_array_equal(errors, expected_errors, err_msg=case)
                    assert comm.rank or errors.any(), case
