"""What doctor.py's ranks gather: no section stops the others, and files and tools are read right."""

import ctypes
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from dist.probe.programs import LOCAL_RANKS, is_first, mpi_family, tool_output
from scripts.checkup import gpus, machine
from scripts.checkup.facts import gather, new_facts
from scripts.machine import gpu
from scripts.machine.checkout import source_hash


def test_no_section_stops_the_others():
    def fails():
        raise ValueError("odd\nin two lines")

    def leaves():
        raise SystemExit(3)

    facts = new_facts()
    limit = SimpleNamespace()
    gather(facts, {"fails": fails, "leaves": leaves, "works": lambda: {"answer": 42}}, limit)
    assert facts["works"] == {"answer": 42}
    assert facts["errors"] == {"fails": "ValueError: odd", "leaves": "SystemExit: 3"}
    assert limit.stage.startswith("looking at works")


def test_tool_output(tmp_path):
    """A tool that hangs is ended."""
    assert tool_output("echo", "two words") == "two words\n"
    assert tool_output("false") is None
    assert tool_output("no-such-command") is None
    program = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    assert tool_output(sys.executable, "-S", "-c", program, str(tmp_path / "pid"), limit_s=1.5) is None
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("environment", "first"),
    [
        ({}, True),
        ({"MPI_LOCALRANKID": "1", "SLURM_LOCALID": "0"}, False),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "0"}, True),
        ({"SLURM_LOCALID": "3"}, False),
    ],
)
def test_first_on_its_node(environment, first):
    assert is_first(LOCAL_RANKS, environment) is first


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("MPICH Version:      5.0.2", "MPICH"),
        ("HYDRA build details:\n    Version:  5.0.2", "MPICH"),
        ("Intel(R) MPI Library 2021.14 for Linux* OS", "MPICH"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.14 Build 20241121", "MPICH"),
        ("MPI VERSION    : CRAY MPICH version 8.1.29", "MPICH"),
        ("MVAPICH Version: 3.0", "MPICH"),
        ("mpirun (Open MPI) 5.0.11", "Open MPI"),
        ("Open MPI v4.1.4, package: Debian OpenMPI", "Open MPI"),
        ("IBM Spectrum MPI 10.4", "Open MPI"),
        ("", None),
    ],
)
def test_whose_mpirun_starts_it(text, family):
    assert mpi_family(text) == family


def test_source_hash_sees_every_source(tmp_path):
    for folder in ("gpt2", "dist"):
        (tmp_path / folder).mkdir()
    source = tmp_path / "dist" / "ring.py"
    source.write_text("a")
    (tmp_path / "gpt2" / "notes.txt").write_text("a")
    first = source_hash(tmp_path)
    (tmp_path / "gpt2" / "notes.txt").write_text("b")
    assert source_hash(tmp_path) == first
    source.write_text("b")
    second = source_hash(tmp_path)
    source.rename(source.with_name("tree.py"))
    assert len({first, second, source_hash(tmp_path)}) == 3


def test_run_folder_where_it_will_be_made(tmp_path):
    facts = machine.run_folder(tmp_path / "runs" / "later")
    assert (facts["place"], facts["problem"]) == (str(tmp_path), None)
    assert 0 < facts["free"] <= os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    assert list(tmp_path.iterdir()) == []
    assert machine.run_folder(Path("/proc/runs"))["problem"]


class FakeRuntimeError(Exception):
    pass


def fake_cupy(monkeypatch, count: int, problem: str | None = None) -> None:
    """As much of CuPy as is asked, with GPUs of 10 bytes; without NCCL and cuDNN."""

    def count_devices():
        if problem:
            raise FakeRuntimeError(problem)
        return count

    runtime = SimpleNamespace(
        runtimeGetVersion=lambda: 13000, driverGetVersion=lambda: 13010, getDeviceCount=count_devices,
        getDeviceProperties=lambda index: {"name": b"H200", "uuid": bytes([index])},
        memGetInfo=lambda: (9, 10), CUDARuntimeError=FakeRuntimeError,
    )  # fmt: skip

    class Device(nullcontext):
        compute_capability = "90"

        def __init__(self, index):
            self.pci_bus_id = f"0000:{index:02}"
            super().__init__()

    cuda = SimpleNamespace(runtime=runtime, Device=Device, nccl=SimpleNamespace(available=False))
    cupy = SimpleNamespace(cuda=cuda, __version__="14.0")
    gpu_aware = SimpleNamespace(says_gpu_aware=lambda: (False, ""))  # the real one would start MPI in this process
    modules = {"cupy": cupy, "cupy.cuda": cuda, "cupyx": ModuleType("cupyx"), "ml_dtypes": ModuleType("ml_dtypes")}
    modules |= {"dist.gpu.gpu_aware": gpu_aware}
    for name, module in (modules | {"cudnn": None}).items():
        monkeypatch.setitem(sys.modules, name, module)


def test_own_gpu(monkeypatch):
    """Local rank 3 of a node whose processes see two GPUs takes the second. Without GPUs or CuPy there is none."""
    fake_cupy(monkeypatch, 2)
    facts = gpus.own_gpu(3)
    assert facts == {
        "cupy": "14.0", "runtime_cuda": 13000, "driver_cuda": 13010, "count": 2, "problem": None, "index": 1,
        "name": "H200", "id": "0000:01/01", "free": 9, "total": 10, "cublaslt": facts["cublaslt"],
        "nccl_missing": "CuPy finds no libnccl.so.2", "mpi_is_gpu_aware": False, "cudnn": None,
    }  # fmt: skip
    fake_cupy(monkeypatch, 0, "cudaErrorNoDevice: no CUDA-capable device is detected")
    facts = gpus.own_gpu(0)
    assert (facts["count"], facts["driver_cuda"]) == (0, 13010)
    assert facts["problem"].endswith("no CUDA-capable device is detected")
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert gpus.own_gpu(0)["cupy"] is None


def test_list_of_gpus(monkeypatch):
    outputs = {"--query-gpu=name,driver_version": "NVIDIA H200, 580.95.05\nNo devices were found\n"}
    monkeypatch.setattr(gpus, "tool_output", lambda program, *flags: outputs[flags[0]])
    facts = gpus.gpus()
    assert facts["listed"] == [{"name": "NVIDIA H200", "driver": "580.95.05"}]
    assert facts["driver"] == "580.95.05"


class FakeNvml:
    """NVML of an H200 at 0000:19:00.0 whose power and clock somebody has lowered; it lacks one function."""

    nvmlInit_v2 = staticmethod(lambda: 0)
    nvmlDeviceGetEnforcedPowerLimit = staticmethod(lambda device, number: _set(number, 400_000))
    nvmlDeviceGetPowerManagementDefaultLimit = staticmethod(lambda device, number: _set(number, 700_000))
    nvmlDeviceGetApplicationsClock = staticmethod(lambda device, kind, number: _set(number, 1200, kind))
    nvmlDeviceGetMaxClockInfo = staticmethod(lambda device, kind, number: _set(number, 1980, kind))

    @staticmethod
    def nvmlDeviceGetHandleByPciBusId_v2(bus_id, device):
        return 0 if bus_id == b"0000:19:00.0" else 6


def _set(number, value, kind=0):
    number._obj.value = value
    return kind


def test_limits_of_a_gpu(monkeypatch):
    """As far as the driver says them; without a driver none."""
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeNvml())
    found = gpu.gpu_limits("0000:19:00.0")
    assert found == {"power_w": 400, "default_power_w": 700, "clock_mhz": 1200, "most_clock_mhz": 1980}
    assert gpu.limits_text({"name": "H200"} | found) == "H200, 400 W, 1980 MHz"
    assert gpu.limits_text({"name": "H200", "default_clock_mhz": 1980} | found) == "H200, 400 W, 1200 MHz"
    assert gpu.gpu_limits("0000:20:00.0") == {}

    def no_driver(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", no_driver)
    assert gpu.gpu_limits("0000:19:00.0") == {}
    assert gpu.limits_text({"name": "H200"}) == "H200"
