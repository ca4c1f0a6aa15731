"""How many threads a rank may run, so that the ranks of a node share its cores without crowding."""

import os
from collections import Counter

from dist.world import World


def threads_per_rank(world: World) -> int:
    """Cores this rank may run on, each counted as a share if several local ranks may.

    With ranks bound to cores by the launcher or SLURM it is the number bound; without, the node's cores divided.
    OMP_NUM_THREADS and SLURM_CPUS_PER_TASK, where set, cap it.
    """
    own = os.sched_getaffinity(0)
    sharers = Counter(core for cores in world.local_comm.allgather(own) for core in cores)
    threads = max(1, int(sum(1 / sharers[core] for core in own) + 1e-9))
    limits = [os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK")]
    return min([threads, *(int(limit) for limit in limits if limit.isdigit() and int(limit) > 0)])
