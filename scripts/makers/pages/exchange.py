"""Part of make_docs.py: one exchange by every strategy and by MPI's calls, on virtual hosts, as root."""

import shutil
from pathlib import Path

from scripts.makers.pages.page import FIGURES, Part, fenced, measured_on, on_hosts, read


def exchange(part: Part, folder: Path) -> str:
    """Return the command, its table of contenders and how far apart they are."""
    file, picture = folder / "exchange.json", folder / "exchange.png"
    flags = [*part.flags.split(), "--json", file]
    flags += ["--figure", picture] if part.name == "exchange" else []
    tables = on_hosts(part.hosts, "bench_exchange.py", *flags)
    cluster = f"sudo python scripts/virtual_cluster.py run {part.hosts}"
    if part.name == "exchange":
        shutil.copy(picture, FIGURES / picture.name)
    command = fenced(f"{cluster} -- python scripts/bench_exchange.py {part.flags}")
    contenders = tables.partition("\n\nbytes in / out")[0]
    (size,) = read(file)["sizes"]
    return "\n\n".join([command, fenced(contenders), finding(size), measured_on(file)])


def finding(size: dict) -> str:
    """Compare our fastest float32 exchange with MPI's and PyTorch's, and with the same in bfloat16."""
    contenders = {name: one for name, one in size["contenders"].items() if one["whole"]}
    seconds = {name: one["seconds"]["median"] for name, one in contenders.items()}
    own = [name for name, one in contenders.items() if one["family"] == "own" and one["wire"] == "float32"]
    name = min(own, key=seconds.get)
    parts = [f"{size['bytes'] / 1e6:.3g} MB: {name} takes {contenders[name]['times_bound']:.3f} of the bound"]
    for other, one in contenders.items():
        if one["family"] in ("mpi", "torch"):
            parts.append(f"{other} {seconds[other] / seconds[name]:.2f} times as long")
    if half := seconds.get(f"{name}/bfloat16"):
        parts.append(f"bfloat16 on the wire {half / seconds[name]:.2f} of its time")
    return f"{', '.join(parts)}."
