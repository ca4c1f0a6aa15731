"""Findings about memory, shared memory, the place for run folders, and what ulimit allows."""

from dist.cost.rank_memory import FORMULAS, VECTOR_BYTES, rank_memory
from gpt2.config import PRESETS
from gpt2.parameters import Layout
from scripts.checkup.findings import FAIL, NOTE, Finding, first_of_nodes, known, nodes, on_hosts, on_ranks, plural
from traces.units import bytes_text

SHARING = ("hierarchical", "hierarchical-sharded")  # a node's ranks hold parameters once, in shared memory
DEFAULT = "reduce-scatter"  # of --strategy
USUAL_MODEL = "gpt2-124M"
CHECKPOINT_VECTORS, CHECKPOINTS = 3, 3  # parameters and both moments; two that are kept, one being written
SMALL_BYTES = 1e9
DESCRIPTORS_PER_RANK, DESCRIPTORS = 2, 256


def node_bytes(strategy: str, parameters: int, members: int, ranks: int, node_count: int) -> int:
    """What `members` ranks of a node hold together at most, by dist.cost.rank_memory: activations come on top."""
    held = rank_memory(strategy, parameters, ranks, node_count)
    once = strategy in SHARING
    optimizers = 1 if strategy == "reduce-bcast" else members  # the server's
    return held.parameters * (1 if once else members) + held.gradients * members + held.optimizer * optimizers


def too_little_memory(ranks, model):
    """With --model: strategies whose parameters, gradients and moments do not fit on some node."""
    if model is None:
        return
    parameters, groups = Layout(PRESETS[model]).count, nodes(ranks)
    short = {}
    for members in (group for group in groups.values() if "memory" in group[0]):
        room = min(size for size in (members[0]["memory"]["free"], members[0]["memory"]["limit"]) if size is not None)
        for strategy in FORMULAS:
            needed = node_bytes(strategy, parameters, len(members), len(ranks), len(groups))
            if needed > room:
                short.setdefault(strategy, (needed, room, members[0]))
    if not short:
        return
    needed, room, facts = min(short.values(), key=lambda found: found[0])
    fitting = [strategy for strategy in FORMULAS if strategy not in short]
    strategies = ", ".join(short) if fitting else "any strategy"
    text = (
        f"{model} does not fit on {on_hosts([facts])} with {strategies}: {bytes_text(needed)} or more of "
        f"{bytes_text(room)}, before activations"
    )
    other = f"use --strategy {' or '.join(fitting)}, or " if fitting else ""
    fix = f"{other}start fewer ranks a node, or ask for more memory (SLURM: --mem=0 for all of the node's)"
    yield Finding(FAIL if DEFAULT in short else NOTE, "memory", text, fix)


def little_shared_memory(ranks, model):
    """The buffers that a node's ranks share; without --model, those of the smallest GPT-2."""
    parameters = Layout(PRESETS[model or USUAL_MODEL]).size
    short = []
    for members in nodes(ranks).values():
        needed = (len(members) + 1) * parameters * VECTOR_BYTES
        free = members[0].get("shared memory", {}).get("free")
        if free is not None and free < needed:
            short.append((members[0], free, needed))
    if not short:
        return
    facts, free, needed = short[0]
    text = (
        f"{facts['shared memory']['folder']} on {on_hosts([found[0] for found in short])} has {bytes_text(free)} free, "
        f"and --strategy {' and '.join(SHARING)} take {bytes_text(needed)} of it for {model or USUAL_MODEL}"
    )
    fix = "mount -o remount,size=SIZE /dev/shm, docker --shm-size=SIZE; or use another strategy (ring, reduce-scatter)"
    yield Finding(FAIL if model else NOTE, "shared memory", text, fix)


def run_folder(ranks, model):
    """A place that cannot be written, that not all nodes share, or that is nearly full."""
    denied = known(ranks, "run folder", "problem")
    if denied:
        folder = denied[0][0]["run folder"]
        text = f"{on_ranks([facts for facts, _ in denied])} cannot write to {folder['place']}: {denied[0][1]}"
        fix = "give --out, here and to train.py, a folder that can be written"
        yield Finding(FAIL, "run folder", text, fix)
    blind = [facts for facts, seen in known(ranks, "sees run folder") if not seen]
    if blind:
        text = f"{on_ranks(blind)} do not see what rank 0 writes to {blind[0]['run folder']['path']}"
        fix = "give --out a folder on a file system that all nodes share (not /tmp), as a full path"
        yield Finding(FAIL, "run folder", text, fix)
    needed = Layout(PRESETS[model]).count * VECTOR_BYTES * CHECKPOINT_VECTORS * CHECKPOINTS if model else SMALL_BYTES
    tight = [facts for facts, free in known(first_of_nodes(ranks), "run folder", "free") if free < needed]
    if tight:
        free, place = (tight[0]["run folder"][key] for key in ("free", "place"))
        what = f"three checkpoints of {model} take {bytes_text(needed)}" if model else "checkpoints may not fit"
        text = f"{bytes_text(free)} free in {place} on {on_hosts(tight)}: {what}"
        fix = "free some space, or give --out a larger file system"
        yield Finding(FAIL if model else NOTE, "run folder", text, fix)


def locked_memory(ranks, model):
    """InfiniBand registers memory, which counts as locked."""
    with_cards = [facts for facts in first_of_nodes(ranks) if any(_is_infiniband(facts))]
    short = [facts for facts, _ in known(with_cards, "limits", "locked_memory")]
    if not short:
        return
    limit = short[0]["limits"]["locked_memory"]
    text = f"ulimit -l is {bytes_text(limit)} on {on_hosts(short)}, and InfiniBand locks what it sends"
    fix = "ulimit -l unlimited (limits.conf; SLURM: LimitMEMLOCK=infinity for slurmd), or MPI falls back to TCP or ends"
    yield Finding(FAIL, "ulimit", text, fix)


def open_files(ranks, model):
    needed = DESCRIPTORS_PER_RANK * len(ranks) + DESCRIPTORS
    short = [facts for facts, limit in known(first_of_nodes(ranks), "limits", "open_files") if limit < needed]
    if not short:
        return
    limit = short[0]["limits"]["open_files"]
    text = (
        f"ulimit -n is {limit} on {on_hosts(short)}: a socket to each of {plural(len(ranks), 'rank')} may take {needed}"
    )
    yield Finding(FAIL, "ulimit", text, f"ulimit -n {max(4096, needed)} before the launcher")


def _is_infiniband(facts):
    return (port["kind"] == "infiniband" for port in facts.get("interfaces", []))


CHECKS = (too_little_memory, little_shared_memory, run_folder, locked_memory, open_files)
