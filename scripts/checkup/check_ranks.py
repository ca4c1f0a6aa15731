"""Findings about how ranks share nodes and cores, and about ranks that compute slower than others."""

from collections import Counter
from statistics import median

from scripts.checkup.findings import NOTE, SLOW, Finding, known, nodes, on_hosts, on_ranks, plural

SLOWER = 0.8  # of the median: clearly more than two measurements differ


def core_shares(members: list[dict]) -> list[float]:
    """How many cores each rank of a node has, a core that several may run on counted in parts."""
    sharers = Counter(core for facts in members for core in facts["cores"]["affinity"])
    return [sum(1 / sharers[core] for core in facts["cores"]["affinity"]) for facts in members]


def own_cores(members: list[dict]) -> int:
    """How many cores of the node are the job's: all, or what SLURM has given it there."""
    counts = [facts["cores"]["variables"].get("SLURM_CPUS_ON_NODE", "") for facts in members]
    count = members[0]["cores"]["count"]
    return min(count, int(counts[0])) if counts[0].isdigit() else count


def crowded(ranks, model):
    """More ranks than cores, or ranks bound to the same cores beside idle ones."""
    for members in _with_cores(ranks):
        shares, cores = core_shares(members), own_cores(members)
        some = [facts for facts, share in zip(members, shares, strict=True) if share < 0.99]
        used = {core for facts in members for core in facts["cores"]["affinity"]}
        if some and len(used) < min(cores, len(members)):
            text = f"{on_ranks(some)} are bound to the same {plural(len(used), 'core')}, and others are idle"
            fix = "mpirun --bind-to none (Open MPI), mpirun -bind-to none (MPICH), srun --cpu-bind=cores"
            yield Finding(SLOW, "cores", text, fix)
        elif some:
            text = f"{plural(len(members), 'rank')} share {plural(len(used), 'core')} of {on_hosts(members)}"
            fix = f"start at most {plural(len(used), 'rank')} there"
            yield Finding(SLOW, "cores", text, fix)


def idle_cores(ranks, model):
    """Cores that no rank may run on, by binding."""
    for members in _with_cores(ranks):
        used, cores = {core for facts in members for core in facts["cores"]["affinity"]}, own_cores(members)
        asked = members[0]["cores"]["variables"].get("SLURM_CPUS_PER_TASK", "")
        if len(used) >= cores or (asked.isdigit() and int(asked) > min(core_shares(members))):
            continue  # not_inherited says why
        if len(used) < len(members):
            continue  # crowded says it
        text = f"the ranks on {on_hosts(members)} may run on {len(used)} of {plural(cores, 'core')}"
        fix = (
            f"give each more: mpirun --map-by slot:PE={cores // len(members)} or --bind-to none, "
            f"srun --cpus-per-task={cores // len(members)}"
        )
        yield Finding(SLOW if cores // len(members) > 1 else NOTE, "cores", text, fix)


def not_inherited(ranks, model):
    """sbatch's --cpus-per-task, which srun does not take over since 22.05."""
    some = [found for found in _asked(ranks, "SLURM_CPUS_PER_TASK") if found[2] < found[1] - 0.01]
    if not some:
        return
    _, asked, share = some[0]
    text = f"SLURM_CPUS_PER_TASK is {asked}, and {_ranks_of(some)} may run on {share:.2g} cores each"
    fix = "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK before srun, or srun --cpus-per-task"
    yield Finding(SLOW, "cores", text, fix)


def few_threads(ranks, model):
    """OMP_NUM_THREADS below the cores of a rank."""
    some = [found for found in _asked(ranks, "OMP_NUM_THREADS") if found[1] <= found[2] - 1]
    if not some:
        return
    _, asked, share = some[0]
    text = f"OMP_NUM_THREADS is {asked}, and {_ranks_of(some)} could use {share:.0f} cores each"
    yield Finding(SLOW, "threads", text, f"export OMP_NUM_THREADS={share:.0f}, or unset it")


def many_threads(ranks, model):
    """OMP_NUM_THREADS above the cores of a rank: this project does not follow, other libraries do."""
    some = [found for found in _asked(ranks, "OMP_NUM_THREADS") if found[1] > max(1, found[2] + 0.01)]
    if not some:
        return
    _, asked, share = some[0]
    text = f"OMP_NUM_THREADS is {asked}, more than {_ranks_of(some)} can use: {share:.2g} cores each"
    fix = f"export OMP_NUM_THREADS={max(1, int(share))}; this project starts no more, other libraries would"
    yield Finding(NOTE, "threads", text, fix)


def quota(ranks, model):
    for members in _with_cores(ranks):
        allowed = members[0]["cores"]["quota"]
        used = {core for facts in members for core in facts["cores"]["affinity"]}
        if allowed is not None and allowed < len(used) - 0.01:
            text = f"the cgroup on {on_hosts(members)} gives {allowed:g} cores' time to {plural(len(used), 'core')}"
            fix = (
                f"raise the container's limit (--cpus), or export OMP_NUM_THREADS={max(1, int(allowed / len(members)))}"
            )
            yield Finding(SLOW, "cores", text, fix)


def uneven(ranks, model):
    """Node-aware strategies go at the pace of the fullest node, and share optimizer state by the emptiest."""
    first, *others = counts = [len(members) for members in nodes(ranks).values()]
    if first == 1 and len(set(others)) == 1 and others[0] > 1:
        text = f"one rank alone on {on_hosts(ranks[:1])}, {others[0]} on each other node: made for --server dedicated"
        yield Finding(NOTE, "placement", text, "for all other strategies start as many ranks on every node")
    elif len(set(counts)) > 1:
        text = f"{min(counts)} to {max(counts)} ranks a node: the fullest node's port and cores hold the others up"
        fix = "srun --ntasks-per-node=K, mpirun -ppn K (MPICH) or --map-by ppr:K:node"
        yield Finding(SLOW, "placement", text, fix)


def slow_ranks(ranks, model):
    """Matrix products at the same time on all ranks; said only where each has a core to itself."""
    alone = {
        facts["place"]["rank"]
        for members in _with_cores(ranks)
        for facts, share in zip(members, core_shares(members), strict=True)
        if share >= 0.99
    }
    rates = [(facts, rate) for facts, rate in known(ranks, "speed") if facts["place"]["rank"] in alone]
    if len(rates) < 3:
        return
    usual = median(rate for _, rate in rates)
    slow = [(facts, rate) for facts, rate in rates if rate < SLOWER * usual]
    if not slow:
        return
    worst = min(rate for _, rate in slow)
    text = (
        f"{on_ranks([facts for facts, _ in slow])} make matrix products at {worst / usual:.0%} of the others' rate "
        f"({worst / 1e9:.0f} of {usual / 1e9:.0f} GFLOP/s): each step waits for the slowest"
    )
    fix = "look there for other processes (top), a power or heat limit, another processor; or leave the host out"
    yield Finding(SLOW, "speed", text, fix)


def different_processors(ranks, model):
    models = Counter(name for _, name in known(ranks, "software", "processor"))
    if len(models) < 2:
        return
    names = [f"{name} ({plural(count, 'rank')})" for name, count in models.items()]
    text = f"different processors: {', '.join(names)}"
    yield Finding(NOTE, "speed", text, "ask for one kind of node (SLURM: --constraint)")


def _asked(ranks, variable: str) -> list[tuple[dict, int, float]]:
    """(facts, the variable's number, the rank's share of cores) of the ranks that have it."""
    return [
        (facts, int(text), share)
        for members in _with_cores(ranks)
        for facts, share in zip(members, core_shares(members), strict=True)
        if (text := facts["cores"]["variables"].get(variable, "")).isdigit() and int(text) > 0
    ]


def _ranks_of(some: list[tuple]) -> str:
    return on_ranks([facts for facts, *_ in some])


def _with_cores(ranks):
    """The ranks of each node on which all know their cores."""
    return [members for members in nodes(ranks).values() if all("cores" in facts for facts in members)]


CHECKS = (
    crowded, idle_cores, not_inherited, few_threads, many_threads, quota, uneven, slow_ranks, different_processors,
)  # fmt: skip
