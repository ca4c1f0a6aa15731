"""Part of make_docs.py: the steps of all strategies in the case that the project began with, as root.

The ports of the virtual hosts are as slow, compared with their cores, as those of that cluster.
"""

from pathlib import Path

from scripts.compare import run_folder
from scripts.makers.pages.page import fenced, measured_on, output_of, read
from traces import read_run
from traces.units import short_ms
from traces.verdict.summary import summary


def original_case(part, folder: Path) -> str:
    """Return the command, and a table of mean steps from long to short. folder: for the runs."""
    hosts = f"--nodes {part.nodes} --ranks {part.ranks} --rate {part.rate}"
    names = [part.first, *part.others]
    training = part.training.split()
    output_of("compare.py", *hosts.split(), "--out", folder, "--strategies", ",".join(names), "--", *training)
    step_ms = {name: summary(read_run(run_folder(folder, name, 1)))["step_ms"] for name in names}
    rows = ["| exchange | step | times as fast |", "| --- | ---: | ---: |"]
    for name in sorted(names, key=step_ms.get, reverse=True):
        rows.append(f"| `{name}` | {short_ms(step_ms[name], 3)} ms | {step_ms[part.first] / step_ms[name]:.1f} |")
    command = f"sudo python scripts/compare.py {hosts} --strategies {part.first},... -- {part.training}"
    facts = read(run_folder(folder, part.first, 1) / "config.json")
    return "\n\n".join([fenced(command), "\n".join(rows), measured_on(facts)])
