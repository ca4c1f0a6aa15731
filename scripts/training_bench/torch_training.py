"""PyTorch's contenders of bench_training.py: our model, windows, clipping and AdamW, over gloo. torch is optional.

The initial parameters are ours. PyTorch chooses the messages and their times: DistributedDataParallel all-reduces
buckets during backward (a hook sends them as float16 or bfloat16, or sends low-rank factors); ZeroRedundancyOptimizer
shards AdamW's state and broadcasts the updated parameters; fully_shard gathers a layer's parameters before use and
reduce-scatters its gradients. Between GPUs PyTorch would use NCCL, which is not measured here.
"""

import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy, layer_norm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from dist.waiting import sum_everywhere
from gpt2.config import GPT2Config
from gpt2.parameters import Layout, Parameters, initialize
from scripts.settings.derived import global_batch, learning_rate
from scripts.step_bench.torch_gpt2 import block_of, decay_groups, new_adamw


class Block(nn.Module):
    """One layer, the unit of fully_shard. p: its tensors by our names."""

    def __init__(self, p: dict, heads: int):
        super().__init__()
        self.heads = heads
        for name, value in p.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x):
        return block_of({name: getattr(self, name) for name in self._parameters}, x, self.heads)


class TorchModel(nn.Module):
    """GPT-2 as in torch_gpt2.py, with our initial parameters. Its head is the token embedding, without pad rows."""

    def __init__(self, config: GPT2Config, seed: int):
        super().__init__()
        layout = Layout(config)
        first = Parameters(layout, np.zeros(layout.size, np.float32))
        initialize(first, seed)
        p = {tensor.name: torch.tensor(first.view(tensor.name)) for tensor in layout.tensors}
        self.wte = nn.Parameter(p["wte"][: config.vocab_size].clone())
        self.wpe = nn.Parameter(p["wpe"])
        layers = [f"layer.{number}." for number in range(config.n_layer)]
        self.blocks = nn.ModuleList(
            Block({name.removeprefix(layer): p[name] for name in p if name.startswith(layer)}, config.n_head)
            for layer in layers
        )
        self.lnf_weight = nn.Parameter(p["lnf_weight"])
        self.lnf_bias = nn.Parameter(p["lnf_bias"])

    def forward(self, tokens, targets):
        """Return the mean loss of tokens (B, T) against targets (B, T)."""
        x = self.wte[tokens] + self.wpe[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = layer_norm(x, (x.shape[2],), self.lnf_weight, self.lnf_bias) @ self.wte.T
        return cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def replicated(model: TorchModel, hook=None) -> nn.Module:
    """Wrap the model in DistributedDataParallel. hook: compresses the gradients before they are sent."""
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if hook:
        parallel.register_comm_hook(None, hook)
    return parallel


def low_rank(model: TorchModel, rank: int) -> nn.Module:
    """Wrap the model in DistributedDataParallel, which sends factors of this rank: PowerSGD, Vogels et al. 2019.

    The hook starts its second and third all-reduce in gloo's threads. With several buckets the ranks start them in
    different orders, and crash or hang, so one bucket holds all gradients.
    """
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=ONE_BUCKET_MB)
    state = PowerSGDState(None, rank, start_powerSGD_iter=2)
    state.iter = 1  # one step without PowerSGD: the warm-up. DDP rebuilds its buckets after that step
    parallel.register_comm_hook(state, powerSGD_hook)
    return parallel


def sharded(model: TorchModel) -> nn.Module:
    """Apply fully_shard to each layer and to the model."""
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


ONE_BUCKET_MB = 1 << 20

# Contender: the function that wraps the model. The first exchanges nothing, so its step is pure compute time.
FORMS = {
    "PyTorch, no exchange": lambda model: model,
    "DDP": replicated,
    "DDP, float16 hook": partial(replicated, hook=fp16_compress_hook),
    "DDP, bfloat16 hook": partial(replicated, hook=bf16_compress_hook),
    "DDP, PowerSGD hook of rank 1": partial(low_rank, rank=1),
    "DDP, PowerSGD hook of rank 4": partial(low_rank, rank=4),
    "DDP, ZeRO optimizer": replicated,
    "FSDP": sharded,
}
SHARDS_STATE = "DDP, ZeRO optimizer"


def new_optimizer(name: str, model: nn.Module, s):
    """Return a fused AdamW that decays matrices and embeddings only."""
    p = dict(model.named_parameters())
    options = {"betas": (s.beta1, s.beta2), "eps": s.eps, "fused": True}
    if name != SHARDS_STATE:
        return new_adamw(p, s.weight_decay, lr=s.lr, **options)
    return ZeroRedundancyOptimizer(decay_groups(p, s.weight_decay), torch.optim.AdamW, lr=s.lr, **options)


def train(world, name: str, s, config: GPT2Config, windows, threads: int) -> Iterator[tuple[float, float]]:
    """Train from the beginning; yield seconds and mean loss of each step. Collective.

    s: complete settings of train.py. windows: of the training data.
    """
    torch.set_num_threads(threads)
    model = FORMS[name](TorchModel(config, s.seed))
    optimizer = new_optimizer(name, model, s)
    rate = learning_rate(s)
    batches = Batches(world, s, windows)
    for step in range(1, s.steps + 1):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate.at(step)
        own = gradients(model, optimizer, batches, step, s.grad_accum)
        if s.grad_clip:
            clip_grad_norm_(model.parameters(), s.grad_clip)
        optimizer.step()
        (loss,) = sum_everywhere(world.comm, own / world.size)
        yield time.perf_counter() - start, float(loss)


def gradients(model: nn.Module, optimizer, batches: "Batches", step: int, microbatches: int) -> float:
    """Compute a step's gradients, and exchange them in the last microbatch. Return the mean loss of this rank."""
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for microbatch in range(microbatches):
        is_last = microbatch == microbatches - 1
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(is_last)
        waits = nullcontext() if is_last or not hasattr(model, "no_sync") else model.no_sync()
        with waits:
            loss = model(*batches.read(step, microbatch)) / microbatches
            loss.backward()
        total += loss.item()
    return total


class Batches:
    """Reads a rank's windows in the order of scripts/training/worker.py."""

    def __init__(self, world, s, windows):
        self._windows = windows
        self._batch = s.batch_size
        self._microbatches = s.grad_accum
        self._global_batch = global_batch(s, world.size)
        self._rank = world.rank
        self._arrays = [np.empty((s.batch_size, s.seq_len), np.int32) for _ in range(2)]

    def read(self, step: int, microbatch: int):
        """Return (tokens, targets), (B, T) int64."""
        first = (step - 1) * self._global_batch + (self._rank * self._microbatches + microbatch) * self._batch
        self._windows.read(first, *self._arrays)
        return [torch.from_numpy(array).long() for array in self._arrays]
