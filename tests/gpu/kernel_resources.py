"""What compiled kernels take of a GPU, from the compiler's log."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Resources:
    """Registers and spilled bytes of a thread, static shared memory of a block in bytes."""

    registers: int
    spill_bytes: int
    shared_bytes: int


def parse_log(log: str) -> dict[str, Resources]:
    """Return {kernel: its resources} from the lines that ptxas prints with -v."""
    resources = {}
    for part in log.split("Compiling entry function '")[1:]:
        registers = int(re.search(r"Used (\d+) registers", part)[1])
        spilled = sum(int(count) for count in re.findall(r"(\d+) bytes spill", part))
        shared = re.search(r"(\d+) bytes smem", part)
        resources[part.split("'")[0]] = Resources(registers, spilled, int(shared[1]) if shared else 0)
    return resources
