"""Check what the machine offers each rank: cores and threads, memory, shared memory, disk space for run folders."""

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from dist.cost.memory import VECTOR_BYTES
from dist.shared_memory import FOLDER, free_bytes, left_segments
from gpt2.config import PRESETS
from scripts.checkup.facts import RankFacts, variables
from scripts.checkup.report import FAIL, NOTE, SLOW, Problem, bytes_text, plural
from scripts.machine import host

WHOLE_CORE = 0.99
SLOWER = 0.8  # of the median: chance differences are smaller
USUAL_MODEL = "gpt2-124M"
CHECKPOINT_VECTORS = 3  # parameters and both moments
CHECKPOINTS = 3  # two are kept while the third is written


def sections(out: Path) -> dict:
    return {
        "cores": lambda: host.cores() | {"variables": variables("OMP_NUM_THREADS", "SLURM_CPUS_ON_NODE")},
        "memory": host.memory,
        "shared memory": lambda: {"folder": FOLDER, "free": free_bytes(), "left": left_segments()},
        "run folder": lambda: run_folder(out),
    }


def run_folder(out: Path) -> dict:
    """Find the existing folder in or above `out`; return its free bytes, and a problem if it is not writable."""
    place = next(folder for folder in (out.absolute(), *out.absolute().parents) if os.path.exists(folder))
    facts = {"path": str(out), "place": str(place), "free": None, "problem": None}
    try:
        facts["free"] = shutil.disk_usage(place).free
        with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor-") as file:
            file.write(b"x")
    except OSError as error:
        facts["problem"] = error.strerror or str(error)
    return facts


def with_shares(ranks: RankFacts) -> RankFacts:
    """Add each rank's `share` of cores; a core that n ranks share counts 1/n. Skip nodes with unknown cores."""
    found = RankFacts()
    for members in ranks.nodes:
        own = members.values("cores/affinity")
        sharers = Counter(core for cores in own for core in cores)
        if len(own) == len(members):
            shares = (sum(1 / sharers[core] for core in cores) for cores in own)
            found += [facts | {"share": share} for facts, share in zip(members, shares, strict=True)]
    return found


def binding(ranks, model):
    """Find cores that ranks share and cores that no rank may use."""
    for members in with_shares(ranks).nodes:
        used = len(set().union(*members.values("cores/affinity")))
        # All cores of the node, or only those that SLURM has allocated to the job.
        own = min(members[0]["cores"]["count"], _number(members[0], "SLURM_CPUS_ON_NODE") or 1 << 30)
        each = own // len(members)
        if crowded := members.where("share", lambda share: share < WHOLE_CORE):
            text = f"{plural(len(members), 'rank')} share {plural(used, 'core')} of {members.hosts}"
            fix = f"start at most {plural(used, 'rank')} there"
            if used < min(own, len(members)):
                text = f"{crowded.names} are bound to the same {plural(used, 'core')}, and others are idle"
                fix = "mpirun --bind-to none (Open MPI), mpirun -bind-to none (MPICH), srun --cpu-bind=cores"
            yield Problem(SLOW, "cores", text, fix)
        elif used < own and each > 1:
            text = f"the ranks on {members.hosts} may run on {used} of {plural(own, 'core')}"
            fix = f"give each more cores: mpirun --map-by slot:PE={each} or --bind-to none, srun --cpus-per-task={each}"
            yield Problem(SLOW, "cores", text, fix)


def threads(ranks, model):
    """Find an OMP_NUM_THREADS that leaves cores idle."""

    def leaves_cores_idle(facts):
        asked = _number(facts, "OMP_NUM_THREADS")
        return asked and asked <= facts["share"] - 1

    if few := RankFacts(filter(leaves_cores_idle, with_shares(ranks))):
        share = few[0]["share"]
        text = (
            f"OMP_NUM_THREADS is {_number(few[0], 'OMP_NUM_THREADS')}, and {few.names} could use {share:.0f} cores each"
        )
        yield Problem(SLOW, "threads", text, f"export OMP_NUM_THREADS={share:.0f}, or unset it")


def _number(facts: dict, variable: str) -> int | None:
    """Return an environment variable as a number; None if it is not one."""
    text = facts["cores"]["variables"].get(variable, "")
    return int(text) if text.isdecimal() else None


def speed(ranks, model):
    """Find ranks whose matrix products are slow while all ranks compute, among ranks with a core of their own."""
    alone = with_shares(ranks).where("share", lambda share: share >= WHOLE_CORE)
    slow, usual = alone.far_from_median("speed", lambda rate, usual: rate < SLOWER * usual)
    if slow:
        worst = min(slow.values("speed"))
        rates = f"{worst / usual:.0%} of the others' rate ({worst / 1e9:.0f} of {usual / 1e9:.0f} GFLOP/s)"
        text = f"{slow.names} compute matrix products at {rates}: each step waits for the slowest"
        fix = "look there for other processes (top), a power or heat limit, a slower processor; or leave the host out"
        yield Problem(SLOW, "speed", text, fix)


def memory(ranks, model):
    """With --model: find nodes whose memory is too small for parameters, gradients and moments under any strategy."""
    for members in ranks.where("memory").nodes if model else []:
        room = min(members.values("memory/free")[:1] + members.values("memory/limit")[:1])
        places = _layout(model).count, members[0]["place"]["local_size"], len(ranks), len(ranks.nodes)
        needed = min(kind.traits.memory.of_node(*places) for kind in _exchanging().values())
        if needed > room:
            sizes = f"{bytes_text(needed)} on {members.hosts} before activations, {bytes_text(room)} are free"
            fix = "start fewer ranks per node, or ask for more memory (SLURM: --mem=0 for all memory of the node)"
            yield Problem(FAIL, "memory", f"{model} needs {sizes}", fix)


def shared_memory(ranks, model):
    """Find nodes whose shared memory is too small for shared buffers, and segments that killed jobs have left."""
    vector = _layout(model or USUAL_MODEL).size * VECTOR_BYTES

    def needed_bytes(facts):
        return (facts["place"]["local_size"] + 1) * vector

    knowing = ranks.where("shared memory/free")
    if short := RankFacts(facts for facts in knowing if facts["shared memory"]["free"] < needed_bytes(facts)):
        free = bytes_text(short[0]["shared memory"]["free"])
        needed = bytes_text(needed_bytes(short[0]))
        sharing = " and ".join(name for name, kind in _exchanging().items() if kind.traits.memory.shared_in_node)
        text = f"{FOLDER} on {short.hosts} has {free} free, and --strategy {sharing} take {needed} of it for "
        fix = "mount -o remount,size=SIZE /dev/shm, docker --shm-size=SIZE; or use another strategy"
        fix += " (ring, reduce-scatter)"
        yield Problem(FAIL if model else NOTE, "shared memory", text + (model or USUAL_MODEL), fix)
    for own in ranks.where("shared memory/left", bool).leaders:
        left = own["shared memory"]["left"]
        total = bytes_text(sum(size for _, size in left))
        text = f"{plural(len(left), 'segment')} of killed jobs in {FOLDER} on {own['place']['host']} hold {total}"
        yield Problem(NOTE, "shared memory", text, 'there: doctor.py --remove-segments (--json names all, as "left")')


def _exchanging() -> dict:
    from strategies import STRATEGIES  # needs NumPy

    return {name: kind for name, kind in STRATEGIES.items() if kind.traits.exchanges and kind.traits.same_weights}


def _layout(model: str):
    from gpt2.parameters import Layout  # needs NumPy

    return Layout(PRESETS[model])


def folder(ranks, model):
    """Find ranks for which the run folder is not writable, not the one that rank 0 sees, or too small for the model."""
    if denied := ranks.where("run folder/problem"):
        own = denied[0]["run folder"]
        text = f"{denied.names} cannot write to {own['place']}: {own['problem']}"
        yield Problem(FAIL, "run folder", text, "give a writable folder as --out, here and to train.py")
    if blind := ranks.where("sees run folder", lambda seen: not seen):
        text = f"{blind.names} do not see what rank 0 writes to {blind[0]['run folder']['path']}"
        fix = "give --out a folder on a file system that all nodes share (not /tmp), as a full path"
        yield Problem(FAIL, "run folder", text, fix)
    needed = _layout(model).count * VECTOR_BYTES * CHECKPOINT_VECTORS * CHECKPOINTS if model else 0
    if tight := ranks.where("run folder/free", lambda free: free < needed):
        free = bytes_text(tight[0]["run folder"]["free"])
        place = tight[0]["run folder"]["place"]
        text = f"{free} free in {place} on {tight.hosts}: three checkpoints of {model} take {bytes_text(needed)}"
        yield Problem(FAIL, "run folder", text, "free some space, or give --out a larger file system")


CHECKS = (binding, threads, speed, memory, shared_memory, folder)
