"""What a run on GPUs that are none is to go over: what auto takes and says, and mistakes in one line."""

from types import SimpleNamespace

import pytest

from dist.gpu.gpu_aware import says_gpu_aware
from gpt2.config import GPT2Config
from gpt2.errors import UserError
from gpt2.model_shards import model_shards
from gpt2.parameters import Layout
from scripts.backends import gpus, transports
from scripts.backends.gpus import assert_aligned, shared_gpus
from scripts.backends.transports import Obstacles, choose_transport
from scripts.machine import gpu as gpu_machine
from strategies import STRATEGIES
from strategies.tree import Tree
from tests.gpu.gpu_trainer import on_nodes

TWO_HEADS = ["--n-head", 2, "--n-embd", 128]
MISTAKES = {
    "no driver": ([], {"gpus": None}, "no GPU (cudaErrorInsufficientDriver"),
    "an old GPU": ([], {"capability": "75"}, "compute capability 7.5, expected 8.0"),
    "heads": (["--n-head", 2], {}, "heads of 32 channels, expected 64 or 128"),
    "one GPU": ([], {"gpus": 1}, "ranks 0, 1 share one GPU on {host}, expected one each"),
    "no NCCL": (["--transport", "nccl"], {"nccl": False}, "--transport nccl: CuPy finds no libnccl.so.2: pip install"),
    "NCCL on one GPU": (["--transport", "nccl", "--share-gpus"], {"gpus": 1}, "start a rank for each GPU"),
    "not GPU-aware": (["--transport", "gpu-aware"], {"aware": False}, "--transport gpu-aware: this MPI says it is not"),
    "GPU-aware, it says": (["--transport", "gpu-aware"], {"proven": False}, "comes out wrong"),
    "overlap without NCCL": (["--overlap"], {"nccl": False}, "--strategy reduce-scatter (CuPy finds no libnccl.so.2):"),
    "overlap through the host": (["--overlap", "--transport", "host"], {}, "with --transport host: its calls overlap"),
    "overlap by calls that block": (["--overlap", "--transport", "gpu-aware"], {}, "whose calls return when all is"),
    "overlap on cores": (["--overlap", "--backend", "numpy"], {}, "--strategy reduce-scatter with --backend numpy:"),
    "overlap by auto": (["--overlap", "--backend", "auto"], {"gpus": None}, "numpy (--backend cupy: no GPU"),
    "overlap of rooted calls": (
        ["--overlap", "--strategy", "sliced-in-turn"], {}, "or over NCCL reduce-scatter, allreduce",
    ),
    "bfloat16 over NCCL's own sums": (
        ["--transport", "nccl", "--wire", "bfloat16"], {},
        "--wire bfloat16 and --strategy reduce-scatter, which adds that in host memory: use",
    ),
    "overlap by auto over calls that block": (
        ["--strategy", "auto", "--overlap", "--transport", "gpu-aware"], {},
        "--transport gpu-aware with --overlap, whose calls",
    ),
    "auto without NCCL": (
        ["--strategy", "auto", "--transport", "nccl"], {"nccl": False}, "--transport nccl: CuPy finds",
    ),
    "memory for the buffers": (["--n-layer", 12], {"free": 36 << 20}, "out of GPU memory: 0.00 GB asked for"),
    "memory for copies": (["--transport", "host"], {"free": 60 << 20}, "out of GPU memory: 0.02 GB asked for"),
    "memory for AdamW": (
        ["--strategy", "ring", "--transport", "host", "--n-layer", 12], {"free": 103 << 20}, "out of GPU memory",
    ),
    "memory for the model": (["--batch-size", 512], {"free": 50 << 20}, "lower --batch-size"),
    "a model's ranks on one GPU": (["--tensor-parallel", 2, *TWO_HEADS], {"gpus": 1}, "ranks 0, 1 share one GPU on"),
    "overlap of a model's ranks over NCCL": (
        ["--tensor-parallel", 2, *TWO_HEADS, "--overlap", "--strategy", "ring", "--transport", "nccl"], {},
        "--overlap with --strategy ring over NCCL, where ranks share a model: sums",
    ),
    "overlap of a model's ranks over NCCL alone": (
        ["--pipeline-parallel", 2, "--overlap"], {},
        "--overlap with --strategy reduce-scatter over NCCL, where ranks share a model: sums",
    ),
    "NCCL on cores": (
        ["--backend", "numpy", "--transport", "nccl"], {}, "arrays are in host memory: use --backend cupy",
    ),
    "TF32 on cores": (["--backend", "numpy", "--tf32"], {}, "--tf32 with --backend numpy, whose products are float32"),
    "TF32 of bfloat16": (["--tf32", "--dtype", "bfloat16"], {}, "--tf32 with --dtype bfloat16, whose products are"),
    "random rounding of float32": (["--stochastic-rounding"], {}, "--stochastic-rounding with --dtype float32, whose"),
    "random rounding after the wire's": (
        ["--strategy", "zero-2", "--stochastic-rounding", "--dtype", "bfloat16", "--wire", "bfloat16"], {},
        "--wire bfloat16 and --strategy zero-2, which gathers parameters rounded to nearest: leave",
    ),
    "random rounding on cores": (
        ["--backend", "numpy", "--dtype", "bfloat16", "--stochastic-rounding"], {},
        "--stochastic-rounding with --backend numpy, whose parameters stay float32: use --backend cupy",
    ),
    "random rounding by auto": (
        ["--backend", "auto", "--dtype", "bfloat16", "--stochastic-rounding"], {"gpus": None},
        "numpy (--backend cupy: no GPU",
    ),
}  # fmt: skip


@pytest.mark.any_mpi
@pytest.mark.ranks(2)
def test_a_mistake_ends_all_ranks_with_one_line(comm, trainer, monkeypatch, capsys):
    for what, (flags, machine, says) in MISTAKES.items():
        aware, proven = machine.pop("aware", True), machine.pop("proven", True)
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(transports, "says_gpu_aware", lambda aware=aware: (aware, "this test"))
            patch.setattr(transports, "is_proven", lambda *arguments, proven=proven: proven)
            with pytest.raises(SystemExit) as ended:
                trainer.run("--backend", "cupy", *flags, **machine)
        assert ended.value.code == 2, what
        text = capsys.readouterr().err
        expected = f"error: {says.format(host=trainer.world.host)}" if says.startswith("ranks") else says
        assert comm.rank or (text.count("error: ") == 1 and expected in text), f"{what}: {text}"
        assert comm.rank == 0 or not text, what


@pytest.mark.any_mpi
@pytest.mark.ranks(2)
def test_what_auto_takes(comm, trainer, monkeypatch, capsys):
    """Backend and transport, and the reasons that are recorded; and what MFU is of."""
    trainer.run(gpus=None)
    assert trainer.config["settings"]["backend"] == "numpy"
    assert "--backend auto takes numpy: --backend cupy: no GPU" in capsys.readouterr().out or comm.rank
    trainer.run("--n-head", 2)
    assert trainer.config["settings"]["backend"] == "numpy"
    trainer.run(peak=())
    assert trainer.config["settings"]["backend"] == "cupy"
    assert trainer.config["settings"]["transport"] == "nccl"
    assert len({gpu["id"] for gpu in trainer.config["gpus"]}) == 2
    printed = capsys.readouterr().out
    assert "GPUs          2: shim" in printed or comm.rank
    assert trainer.config["peak"]["tflops"] is None
    assert printed.count("no MFU: the datasheet of shim is none of those known here; give --peak-tflops") == (
        comm.rank == 0
    )
    trainer.run("--tensor-parallel", 2, *TWO_HEADS, "--steps", 1)
    assert [trainer.config["settings"][name] for name in ("backend", "transport")] == ["cupy", "nccl"]
    assert len({gpu["id"] for gpu in trainer.config["gpus"]}) == 2, "each rank of the job has its own"
    monkeypatch.setitem(gpu_machine.PEAK_TFLOPS, "shim", 8)
    trainer.run("--share-gpus", peak=(), gpus=1)
    assert trainer.config["peak"] == {"tflops": [4, 4], "source": "datasheet of shim, dense bfloat16"}
    assert trainer.config["settings"]["transport"] == "gpu-aware"
    assert "NCCL needs a GPU for each rank" in trainer.config["transport_why"]
    monkeypatch.setattr(transports, "says_gpu_aware", lambda: (False, "this test"))
    trainer.run(nccl=False)
    assert trainer.config["settings"]["transport"] == "host"
    assert "no libnccl.so.2; this MPI says it is not GPU-aware (this test)" in trainer.config["transport_why"]


@pytest.mark.any_mpi
@pytest.mark.ranks(3)
def test_auto_tries_strategies_between_gpus(comm, trainer, capsys):
    """Those that the transport, the wire and the nodes leave; through host memory where nothing else is there."""
    every = ("reduce-scatter", "allreduce", "ring", "hierarchical", "hierarchical-sharded")
    auto = ["--backend", "cupy", "--strategy", "auto"]
    one_node, two_nodes = on_nodes(comm, 3), on_nodes(comm, 2)
    for flags, world, machine, transport, tried in (
        ([], two_nodes, {}, "nccl", every),
        (["--transport", "gpu-aware"], one_node, {}, "gpu-aware", every[:3]),
        (["--wire", "bfloat16", "--overlap"], two_nodes, {}, "nccl", every[2:]),
        (["--overlap"], one_node, {"nccl": False}, "host", None),
    ):
        trainer.run(*auto, *flags, world=world, **machine)
        settings, printed = trainer.config["settings"], capsys.readouterr().out
        assert settings["transport"] == transport, flags
        takes = f"--strategy auto chose {settings['strategy']}{' with overlap' * settings['overlap']}: "
        assert comm.rank or takes in printed, printed
        between = "in a trial between GPUs, which the cost model does not cover: "
        assert comm.rank or (between in printed) == (transport != "host")
        if tried and comm.rank == 0:
            (text,) = (line.split(between)[1] for line in printed.splitlines() if between in line)
            assert [part.split()[0] for part in text.split(", ")] == list(tried)
            assert settings["strategy"] in tried


def transport_of(kind, transport="auto", overlap=False, op=None):
    """What two ranks choose where all transports are there."""
    flags = {"transport": transport, "wire": "float32", "overlap": overlap, "op": op}
    settings = SimpleNamespace(**flags, tensor_parallel=1, pipeline_parallel=1)
    return choose_transport([kind], settings, 2, Obstacles(None, None, []))


def test_a_strategy_that_declares_nothing_of_gpus_goes_through_host_memory():
    class OnHosts(Tree):
        traits = Tree.traits.changed(on_gpus=None)

    why = "tree does not declare how it exchanges between GPUs"
    assert transport_of(OnHosts, overlap=True) == ("host", why)
    with pytest.raises(UserError, match="--transport nccl with --strategy tree, which declares no `on_gpus`: use"):
        transport_of(OnHosts, overlap=True, transport="nccl")


def test_the_own_operation_goes_through_host_memory():
    kind = STRATEGIES["reduce-scatter"]
    assert transport_of(kind, op="own") == ("host", "--op own adds in host memory")
    assert transport_of(kind)[0] == "nccl"


@pytest.mark.ranks(2)
def test_this_mpi_is_asked_whether_it_is_gpu_aware(comm):
    """The libraries of Python's registry are not; what counts is that asking finds their function and does no harm."""
    aware, source = says_gpu_aware()
    assert source in ("MPIX_Query_cuda_support", "MPIX_GPU_query_support")
    assert len(set(comm.allgather(aware))) == 1


def test_parts_that_no_kernel_can_read_are_refused():
    """1024 columns over 3 parts; the tensor after their bias begins where 16 bytes do not."""
    config = GPT2Config(n_layer=1, n_head=4, n_embd=256, context=8, vocab_size=101)
    for parts in (1, 2, 4):
        for shard in model_shards((1,), parts):
            assert_aligned(Layout(config, 1, shard))
    with pytest.raises(UserError, match=r"--tensor-parallel 3 splits 1024 .* columns so that layer\.0\.fcproj_weight"):
        assert_aligned(Layout(config, 1, model_shards((1,), 3)[0]))


def test_where_there_is_no_gpu_nothing_of_the_model_is_blamed(monkeypatch):
    def no_driver():
        raise OSError("cudaErrorInsufficientDriver")

    runtime = SimpleNamespace(getDeviceCount=no_driver, CUDARuntimeError=OSError)
    monkeypatch.setattr(gpus, "import_cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    layout = Layout(GPT2Config(n_layer=1, n_head=2, n_embd=64, context=8, vocab_size=101))
    with pytest.raises(UserError, match=r"no GPU \(cudaErrorInsufficientDriver\), expected an NVIDIA GPU"):
        gpus.gpu_kernels(layout, 0, 1)


def test_who_shares_a_gpu():
    places = [{"rank": rank, "host": host} for rank, host in enumerate("aaabb")]
    identities = [{"id": name} for name in ("x", "y", "x", "x", "y")]
    assert shared_gpus(places, identities) == [("a", [0, 2])]
