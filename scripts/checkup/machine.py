"""A process's share of its machine: cores and threads, memory, a place for run folders; whether they suffice."""

import math
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from dist.cost.memory import VECTOR_BYTES
from dist.shared_memory import FOLDER, free_bytes, left_segments
from gpt2.config import PRESETS
from scripts.checkup.facts import variables
from scripts.checkup.findings import FAIL, NOTE, SLOW, Finding, Ranks, bytes_text, plural
from scripts.checkup.network import infiniband_cards
from scripts.machine import host

THREAD_VARIABLES = ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "SRUN_CPUS_PER_TASK")
WHOLE_CORE = 0.99
SLOWER = 0.8  # of the median: clearly more than two measurements differ
USUAL_MODEL = "gpt2-124M"
CHECKPOINT_VECTORS, CHECKPOINTS = 3, 3  # parameters and both moments; two that are kept, one being written
SMALL_BYTES = 1e9
DESCRIPTORS_PER_RANK, DESCRIPTORS = 2, 256


def sections(out: Path) -> dict:
    return {
        "cores": lambda: host.cores() | {"variables": variables(*THREAD_VARIABLES)},
        "memory": host.memory,
        "shared memory": shared_memory,
        "limits": host.ulimits,
        "run folder": lambda: run_folder(out),
    }


def shared_memory() -> dict:
    """Bytes free in the folder that a node's ranks share memory in, and what killed jobs have left there."""
    return {"folder": FOLDER, "free": free_bytes(), "left": left_segments()}


def run_folder(out: Path) -> dict:
    """Whether a file can be written where `out` is, or will be made, and how many bytes are free there."""
    place = next(folder for folder in (out.absolute(), *out.absolute().parents) if os.path.exists(folder))
    facts = {"path": str(out), "place": str(place), "free": None, "problem": None}
    try:
        facts["free"] = shutil.disk_usage(place).free
        with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor-") as file:
            file.write(b"x")
    except OSError as error:
        facts["problem"] = error.strerror or str(error)
    return facts


def with_shares(ranks: Ranks) -> Ranks:
    """The ranks of nodes on which all know their cores, with their `share`: a core of several counts in parts."""
    found = Ranks()
    for members in ranks.nodes:
        own = members.values("cores/affinity")
        sharers = Counter(core for cores in own for core in cores)
        if len(own) == len(members):
            shares = (sum(1 / sharers[core] for core in cores) for cores in own)
            found += [facts | {"share": share} for facts, share in zip(members, shares, strict=True)]
    return found


def binding(ranks, model):
    """Cores that ranks share, cores that no rank may run on, and cores whose time a cgroup limits."""
    for members in with_shares(ranks).nodes:
        used, quota = len(set().union(*members.values("cores/affinity"))), members[0]["cores"]["quota"]
        # All of the node, or what SLURM has given the job there.
        own = min(members[0]["cores"]["count"], _number(members[0], "SLURM_CPUS_ON_NODE") or math.inf)
        if crowded := members.where("share", lambda share: share < WHOLE_CORE):
            text = f"{plural(len(members), 'rank')} share {plural(used, 'core')} of {members.hosts}"
            fix = f"start at most {plural(used, 'rank')} there"
            if used < min(own, len(members)):
                text = f"{crowded.names} are bound to the same {plural(used, 'core')}, and others are idle"
                fix = "mpirun --bind-to none (Open MPI), mpirun -bind-to none (MPICH), srun --cpu-bind=cores"
            yield Finding(SLOW, "cores", text, fix)
        # Of ranks that have less than they asked for, threads() says why.
        asked = _number(members[0], "SLURM_CPUS_PER_TASK") or 0
        if len(members) <= used < own and asked <= min(members.values("share")):
            text, each = f"the ranks on {members.hosts} may run on {used} of {plural(own, 'core')}", own // len(members)
            fix = f"give each more: mpirun --map-by slot:PE={each} or --bind-to none, srun --cpus-per-task={each}"
            yield Finding(SLOW if each > 1 else NOTE, "cores", text, fix)
        if quota is not None and quota < used - 0.01:
            text = f"the cgroup on {members.hosts} gives {quota:g} cores' time to {plural(used, 'core')}"
            fix = f"raise the container's limit (--cpus), or export OMP_NUM_THREADS={max(1, int(quota / len(members)))}"
            yield Finding(SLOW, "cores", text, fix)


def threads(ranks, model):
    """What variables ask for, beside the cores that a rank has."""
    for some, asked, share in _asked(ranks, "SLURM_CPUS_PER_TASK", lambda asked, share: share < asked - 0.01):
        # srun does not take over sbatch's number since 22.05.
        text = f"SLURM_CPUS_PER_TASK is {asked}, and {some.names} may run on {share:.2g} cores each"
        fix = "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK before srun, or srun --cpus-per-task"
        yield Finding(SLOW, "cores", text, fix)
    for some, asked, share in _asked(ranks, "OMP_NUM_THREADS", lambda asked, share: asked <= share - 1):
        text = f"OMP_NUM_THREADS is {asked}, and {some.names} could use {share:.0f} cores each"
        yield Finding(SLOW, "threads", text, f"export OMP_NUM_THREADS={share:.0f}, or unset it")
    for some, asked, share in _asked(ranks, "OMP_NUM_THREADS", lambda asked, share: asked > max(1, share + 0.01)):
        text = f"OMP_NUM_THREADS is {asked}, more than {some.names} can use: {share:.2g} cores each"
        fix = f"export OMP_NUM_THREADS={max(1, int(share))}; this project starts no more, other libraries would"
        yield Finding(NOTE, "threads", text, fix)


def _asked(ranks: Ranks, variable: str, is_wrong):
    """Once, if ever: the ranks where is_wrong(number of the variable, share of cores), and both of the first."""
    asking = (facts for facts in with_shares(ranks) if _number(facts, variable))
    if wrong := Ranks(facts for facts in asking if is_wrong(_number(facts, variable), facts["share"])):
        yield wrong, _number(wrong[0], variable), wrong[0]["share"]


def _number(facts: dict, variable: str) -> int | None:
    """Of an environment variable; None where it has none."""
    text = facts["cores"]["variables"].get(variable, "")
    return int(text) if text.isdecimal() else None


def placement(ranks, model):
    """Node-aware strategies go at the pace of the fullest node, and share optimizer state by the emptiest."""
    first, *others = counts = [len(members) for members in ranks.nodes]
    if first == 1 and len(set(others)) == 1 and others[0] > 1:
        text = f"one rank alone on {ranks.nodes[0].hosts}, {others[0]} on each other node: made for --server dedicated"
        yield Finding(NOTE, "placement", text, "for all other strategies start as many ranks on every node")
    elif len(set(counts)) > 1:
        text = f"{min(counts)} to {max(counts)} ranks a node: the fullest node's port and cores hold the others up"
        fix = "srun --ntasks-per-node=K, mpirun -ppn K (MPICH) or --map-by ppr:K:node"
        yield Finding(SLOW, "placement", text, fix)


def speed(ranks, model):
    """Matrix products at the same time on all ranks, said only where each has a core to itself; unlike processors."""
    alone = with_shares(ranks).where("share", lambda share: share >= WHOLE_CORE)
    slow, usual = alone.far_from_median("speed", lambda rate, usual: rate < SLOWER * usual)
    if slow:
        worst = min(slow.values("speed"))
        text = (
            f"{slow.names} make matrix products at {worst / usual:.0%} of the others' rate "
            f"({worst / 1e9:.0f} of {usual / 1e9:.0f} GFLOP/s): each step waits for the slowest"
        )
        fix = "look there for other processes (top), a power or heat limit, another processor; or leave the host out"
        yield Finding(SLOW, "speed", text, fix)
    names = [f"{name} ({plural(len(some), 'rank')})" for name, some in ranks.holders("software/processor").items()]
    if len(names) > 1:
        fix = "ask for one kind of node (SLURM: --constraint)"
        yield Finding(NOTE, "speed", f"different processors: {', '.join(names)}", fix)


def memory(ranks, model):
    """With --model: strategies whose parameters, gradients and moments do not fit on some node."""
    from strategies import AUTO, candidates  # needs NumPy

    short, nodes = {}, ranks.nodes if model else []
    parameters = _layout(model).count if model else 0
    for members in (members for members in nodes if "memory" in members[0]):
        room = min(members.values("memory/free")[:1] + members.values("memory/limit")[:1])
        for name, kind in _exchanging().items():
            needed = kind.memory.of_node(parameters, len(members), len(ranks), len(nodes))
            if needed > room:
                short.setdefault(name, (needed, room, members))
    if short:
        needed, room, members = min(short.values(), key=lambda found: found[0])
        fitting = [name for name in _exchanging() if name not in short]
        text = (
            f"{model} does not fit on {members.hosts} with {', '.join(short) if fitting else 'any strategy'}: "
            f"{bytes_text(needed)} or more of {bytes_text(room)}, before activations"
        )
        other = f"use --strategy {' or '.join(fitting)}, or " if fitting else ""
        fix = f"{other}start fewer ranks a node, or ask for more memory (SLURM: --mem=0 for all of the node's)"
        has_none = short.keys() >= candidates(AUTO, "host").keys()
        yield Finding(FAIL if has_none else NOTE, "memory", text, fix)


def buffers(ranks, model):
    """The buffers that a node's ranks share; without --model, those of the smallest GPT-2."""
    asked = model or USUAL_MODEL
    vector = _layout(asked).size * VECTOR_BYTES

    def needed(facts):
        return (facts["place"]["local_size"] + 1) * vector

    having = ranks.where("shared memory/free")
    if short := Ranks(facts for facts in having if facts["shared memory"]["free"] < needed(facts)):
        folder, free = (short[0]["shared memory"][name] for name in ("folder", "free"))
        sharing = [name for name, kind in _exchanging().items() if kind.memory.shared_in_node]
        text = (
            f"{folder} on {short.hosts} has {bytes_text(free)} free, and --strategy {' and '.join(sharing)} take "
            f"{bytes_text(needed(short[0]))} of it for {asked}"
        )
        fix = "mount -o remount,size=SIZE /dev/shm, docker --shm-size=SIZE; "
        fix += "or use another strategy (ring, reduce-scatter)"
        yield Finding(FAIL if model else NOTE, "shared memory", text, fix)


def left_over(ranks, model):
    """Segments of shared memory that no process maps: their jobs were killed. They take memory until they are gone."""
    for own in ranks.where("shared memory/left", bool).leaders:
        left, host = own["shared memory"]["left"], own["place"]["host"]
        total = bytes_text(sum(size for _, size in left))
        text = (
            f"{plural(len(left), 'segment')} of killed jobs in {own['shared memory']['folder']} on {host} hold {total}"
        )
        yield Finding(NOTE, "shared memory", text, 'there: doctor.py --remove-segments (--json names all, as "left")')


def _exchanging() -> dict:
    from strategies import STRATEGIES  # needs NumPy

    return {name: kind for name, kind in STRATEGIES.items() if kind.exchanges}


def _layout(model: str):
    from gpt2.parameters import Layout

    return Layout(PRESETS[model])


def folder(ranks, model):
    """A place for runs that cannot be written, that not all nodes share, or that is nearly full."""
    if denied := ranks.where("run folder/problem"):
        own = denied[0]["run folder"]
        text = f"{denied.names} cannot write to {own['place']}: {own['problem']}"
        yield Finding(FAIL, "run folder", text, "give --out, here and to train.py, a folder that can be written")
    if blind := ranks.where("sees run folder", lambda seen: not seen):
        text = f"{blind.names} do not see what rank 0 writes to {blind[0]['run folder']['path']}"
        fix = "give --out a folder on a file system that all nodes share (not /tmp), as a full path"
        yield Finding(FAIL, "run folder", text, fix)
    needed = _layout(model).count * VECTOR_BYTES * CHECKPOINT_VECTORS * CHECKPOINTS if model else SMALL_BYTES
    if tight := ranks.where("run folder/free", lambda free: free < needed):
        what = f"three checkpoints of {model} take {bytes_text(needed)}" if model else "checkpoints may not fit"
        own = tight[0]["run folder"]
        text = f"{bytes_text(own['free'])} free in {own['place']} on {tight.hosts}: {what}"
        fix = "free some space, or give --out a larger file system"
        yield Finding(FAIL if model else NOTE, "run folder", text, fix)


def limits(ranks, model):
    """Memory that InfiniBand registers counts as locked; a connection counts as an open file."""
    if short := ranks.where("interfaces", infiniband_cards).where("limits/locked_memory"):
        limit = bytes_text(short[0]["limits"]["locked_memory"])
        text = f"ulimit -l is {limit} on {short.hosts}, and InfiniBand locks what it sends"
        fix = "ulimit -l unlimited (limits.conf; SLURM: LimitMEMLOCK=infinity for slurmd), "
        fix += "or MPI falls back to TCP or ends"
        yield Finding(FAIL, "ulimit", text, fix)
    needed = DESCRIPTORS_PER_RANK * len(ranks) + DESCRIPTORS
    if short := ranks.where("limits/open_files", lambda limit: limit < needed):
        limit, sockets = short[0]["limits"]["open_files"], f"a socket to each of {plural(len(ranks), 'rank')}"
        text = f"ulimit -n is {limit} on {short.hosts}: {sockets} may take {needed}"
        yield Finding(FAIL, "ulimit", text, f"ulimit -n {max(4096, needed)} before the launcher")


CHECKS = (binding, threads, placement, speed, memory, buffers, left_over, folder, limits)
