"""Estimate the memory of a run on a node: its ranks' model shards, activations and exchange buffers.

Compare it with the memory that is available there. SLURM and containers limit it by control groups.
"""

import math
import re
from collections import Counter
from pathlib import Path

from dist.control_groups import PLACES, VERSION_2, own_groups, text_of
from dist.cost.memory import VECTOR_BYTES
from dist.host.sparse_exchange import segments_bytes
from dist.mesh import positions
from dist.sharded import LAYER_SLOTS
from gpt2.activations import activation_bytes
from gpt2.config import GPT2Config
from gpt2.errors import UserError
from gpt2.formats import llmc
from gpt2.parameters import Layout
from scripts.settings.model_parallel import is_cut, model_cut
from scripts.settings.split_embedding import most_rows, obstacle
from scripts.settings.training import Settings
from strategies import find, is_auto

MEMINFO = Path("/proc/meminfo")
# A control group's files of limit and usage; in its memory.stat cached file pages, and cached pages of shared memory.
GROUP_FILES = {
    VERSION_2: ("memory.max", "memory.current", "file", "shmem"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem"),
}


def check_memory(settings: Settings, config: GPT2Config, world) -> None:
    """Raise UserError if this node certainly lacks memory. Called before planning, which takes time per layer.

    While the strategy or backend is undecided, only a minimum is known: each parameter is stored on some rank.
    """
    count = llmc.parameter_count(config, config.padded_vocab_size)
    needed = needed_bytes(settings, config, world)
    if not has_room(needed):
        available = available_bytes()
        raise UserError(
            f"a model of {count / 1e6:,.0f}M parameters and --batch-size {settings.batch_size} take "
            f"{needed / 1e9:,.1f} GB or more on {world.host}, expected at most the {available / 1e9:.1f} GB that are "
            "available: choose a smaller model or batch, or more nodes"
        )


def has_room(needed: int) -> bool:
    """Return whether this node has `needed` free bytes; True if that is unknown."""
    available = available_bytes()
    return available is None or needed <= available


def check_parameters(path, config: GPT2Config, vectors: int = 1) -> None:
    """Raise a UserError if this many float32 vectors of all parameters do not fit into the available memory."""
    count = llmc.parameter_count(config, config.padded_vocab_size)
    needed = VECTOR_BYTES * count * vectors
    if not has_room(needed):
        raise UserError(
            f"{path}: {count / 1e6:.0f}M parameters take {needed / 1e9:.1f} GB of memory in float32, "
            f"expected at most the {available_bytes() / 1e9:.1f} GB that are available: use a larger machine or a "
            "smaller model"
        )


def available_bytes(places=PLACES, meminfo: Path = MEMINFO) -> int | None:
    """Return the host memory that this process can still allocate under Linux; None if unknown.

    This is the machine's available memory, or less if the process's control groups limit it. Cached file pages do not
    count as used, because the kernel can free them; cached pages of shared memory do.
    """
    left = [1024 * int(number) for number in re.findall(r"^MemAvailable:\s+(\d+) kB", text_of(meminfo), re.MULTILINE)]
    for controller, (limit, usage, cached, shared) in GROUP_FILES.items():
        for group in own_groups(controller, places):
            most = text_of(group / limit)
            used = text_of(group / usage)
            if most.isdecimal() and used.isdecimal():
                counts = dict(re.findall(r"^(\w+) (\d+)$", text_of(group / "memory.stat"), re.MULTILINE))
                files = int(counts.get(cached, 0)) - int(counts.get(shared, 0))
                left.append(max(0, int(most) - int(used) + max(0, files)))
    return min(left, default=None)


def needed_bytes(settings: Settings, config: GPT2Config, world) -> int:
    """Return the least host memory that this rank's node needs, in bytes."""
    count = llmc.parameter_count(config, config.padded_vocab_size)
    if settings.backend != "numpy" or is_auto(settings.strategy):
        return VECTOR_BYTES * count * world.local_size // world.size
    if is_cut(settings):
        return bytes_of_pieces(settings, config, world)
    return bytes_of_wholes(settings, config, count, world)


def bytes_of_wholes(settings: Settings, config: GPT2Config, count: int, world) -> int:
    """Return the bytes on this rank's node if each rank has a whole model of `count` parameters."""
    memory = find(settings.strategy).traits.memory
    if settings.error_feedback:
        memory = memory.with_errors()
    if settings.replica == "rank":  # then each rank holds what the ranks of a node share otherwise
        needed = memory.of_node(count, 1, world.size, world.size, bool(settings.overlap)) * world.local_size
    else:
        needed = memory.of_node(count, world.local_size, world.size, world.node_count, bool(settings.overlap))
    operand_bytes = bytes_of_operands(settings)
    activations = activation_bytes(config, settings.batch_size, settings.seq_len, operand_bytes=operand_bytes)
    needed += activations * max(1, world.local_size - (settings.server == "dedicated"))
    return needed + bytes_of_rows(settings, config, world.size) * world.local_size


def bytes_of_rows(settings: Settings, config: GPT2Config, ranks: int) -> int:
    """Return the bytes of the sparse embedding gradient on a rank, if the embedding may be split.

    They hold the rows and two lists of row ids, and for the exchange the segments and ids that are sent, received and
    merged.
    """
    if settings.split_embedding == "off" or obstacle(settings, ranks):
        return 0
    most = most_rows(settings, config)
    vocabulary = config.padded_vocab_size
    width = config.n_embd
    ids = 2 * (1 + most) + min(vocabulary, ranks * most) * 3
    return VECTOR_BYTES * (most * width + ids) + segments_bytes(vocabulary, width)


def bytes_of_operands(settings: Settings) -> int:
    """Return the bytes per element of activations that are used only as operands of products."""
    return 2 if settings.dtype == "bfloat16" else 4


def bytes_of_pieces(settings: Settings, config: GPT2Config, world) -> int:
    """Return the bytes on this rank's node if ranks share models.
    They are the strategy's memory for the model shards, plus bytes_beside of each rank."""
    cut = model_cut(settings, config)
    seats = positions(world.places, cut.tensor, cut.pipeline)
    number_of = [seat["stage"] * cut.tensor + seat["part"] for seat in seats]  # the shard's number, for each rank
    nodes = [place["node"] for place in world.places]
    members = Counter(number for number, node in zip(number_of, nodes, strict=True) if node == world.node)
    memory = find(settings.strategy).traits.memory
    needed = 0
    for number, here in members.items():
        layout = Layout(config, 1, cut.shards[number])
        on_nodes = len({node for other, node in zip(number_of, nodes, strict=True) if other == number})
        needed += memory.of_node(layout.count, here, world.size // len(cut.shards), on_nodes, bool(settings.overlap))
        held = cut.in_flight(number // cut.tensor)
        batch = settings.batch_size, settings.seq_len
        needed += here * bytes_beside(layout, held, *batch, cut.micro_steps, bytes_of_operands(settings))
    return needed + (bytes_of_slots(Layout(config)) if world.node == 0 else 0)


def bytes_of_slots(whole: Layout) -> int:
    """Return the bytes of the slots in which rank 0 gathers a model range by range, for model.bin or a sample."""
    first, *layers, last = (stop - start for start, stop in whole.ranges)
    return VECTOR_BYTES * (first + last + sum(sorted(layers)[-LAYER_SLOTS:]))


def bytes_beside(
    layout: Layout, in_flight: int, batch_size: int, length: int, micro_steps: int, operand_bytes: int = 4
) -> int:
    """Return the bytes that a rank with this model shard holds besides parameters, gradients and moments.

    It holds activations of `in_flight` microbatches, tensors owned by other ranks with their gradients, the received
    gradient of the head, buffers for exchanging activations, and a product before it is added to the gradients of
    earlier microbatches.
    """
    shard = layout.shard
    rows = batch_size * length * layout.config.n_embd
    numbers = 2 * layout.replicated_size
    if shard.tp_size > 1:
        numbers += rows + rows // shard.tp_size  # a whole buffer, and this rank's share of the sum
    if not (shard.is_first and shard.is_last):
        numbers += 4 * rows // shard.tp_size  # receives that are posted early, sends that are not complete
    if shard.is_first and not shard.is_last:
        numbers += shard.share_size(layout.config.padded_vocab_size) * layout.config.n_embd
    if micro_steps > 1:
        numbers += max((math.prod(tensor.shape) for tensor in multiplied(layout)), default=0)
    activations = activation_bytes(layout.config, batch_size, length, shard, in_flight, operand_bytes)
    return activations + VECTOR_BYTES * numbers


def multiplied(layout: Layout) -> list:
    """Return the tensors whose gradients are matrix products: matrices, and the token embedding as the head."""
    used = layout.tensors + layout.replicated
    return [tensor for tensor in used if tensor.decays and (layout.shard.is_last or tensor.name != "wte")]
