"""What compiled kernels take of a GPU, from the compiler's log."""

import re


def parse_log(log: str) -> dict[str, tuple[int, int]]:
    """Return {kernel: (registers of a thread, spilled bytes)} from the lines that ptxas prints with -v."""
    resources = {}
    for part in log.split("Compiling entry function '")[1:]:
        spilled = sum(int(count) for count in re.findall(r"(\d+) bytes spill", part))
        resources[part.split("'")[0]] = int(re.search(r"Used (\d+) registers", part)[1]), spilled
    return resources
