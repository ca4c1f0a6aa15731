"""Parts of make_docs.py that run on virtual hosts, as root: exchanges, and whole steps beside PyTorch."""

import shutil
from pathlib import Path

import numpy as np

from gpt2.config import GPT2_VOCABULARY
from gpt2.data.shards import write_shard
from scripts.makers.pages.page import FIGURES, Part, fenced, measured_on, on_hosts, read
from scripts.training_bench.training_table import table
from traces.plots import look, training_bars

DRAWN_TOKENS = 200_000


def exchange(part: Part, folder: Path) -> str:
    """Return the command, its table of contenders and the ratios between them."""
    file = folder / "exchange.json"
    picture = folder / "exchange.png"
    flags = [*part.flags.split(), "--json", file]
    if part.name == "exchange":
        flags += ["--figure", picture]
    tables = on_hosts(part.hosts, "bench_exchange.py", *flags)
    if part.name == "exchange":
        shutil.copy(picture, FIGURES / picture.name)
    command = (
        f"sudo python scripts/virtual_cluster.py run {part.hosts} -- python scripts/bench_exchange.py {part.flags}"
    )
    contenders = tables.partition("\n\nbytes in / out")[0]
    (size,) = read(file)["sizes"]
    return "\n\n".join([fenced(command), fenced(contenders), exchange_ratios(size), measured_on(file)])


def exchange_ratios(size: dict) -> str:
    """Compare our fastest float32 exchange with MPI's and PyTorch's, and with its bfloat16 form."""
    contenders = {name: one for name, one in size["contenders"].items() if one["whole"]}
    seconds = {name: one["seconds"]["median"] for name, one in contenders.items()}
    own = [name for name, one in contenders.items() if one["family"] == "own" and one["wire"] == "float32"]
    fastest = min(own, key=seconds.get)
    parts = [f"{size['bytes'] / 1e6:.3g} MB: {fastest} takes {contenders[fastest]['times_bound']:.3f} of the bound"]
    for other, one in contenders.items():
        if one["family"] in ("mpi", "torch"):
            parts.append(f"{other} {seconds[other] / seconds[fastest]:.2f} times as long")
    if half := seconds.get(f"{fastest}/bfloat16"):
        parts.append(f"bfloat16 on the wire {half / seconds[fastest]:.2f} of its time")
    return f"{', '.join(parts)}."


def training_steps(part: Part, folder: Path) -> str:
    """Return the command and the table of each setting; draw the figure."""
    tokens = folder / "drawn.bin"
    drawn = np.random.default_rng(1).zipf(1.2, 10 * DRAWN_TOKENS)  # frequencies like those of a text
    write_shard(tokens, drawn[drawn < GPT2_VOCABULARY][:DRAWN_TOKENS].astype(np.uint16))
    texts = []
    reports = []
    for number, setting in enumerate(part.settings):
        file = folder / f"{number}.json"
        flags = f"--link {setting['rate']} {setting['flags']}"
        hosts = f"{setting['hosts']} --rate {setting['rate']}"
        own = [*flags.split(), "--out", folder / "runs", "--json", file]
        on_hosts(hosts, "bench_training.py", *own, "--", *setting["training"].split(), "--train-data", tokens)
        reports.append(read(file))
        command = f"sudo python scripts/virtual_cluster.py run {hosts} -- python scripts/bench_training.py {flags} "
        texts += [fenced(f"{command}-- {setting['training']} ..."), fenced(table(reports[-1]))]
    picture, _ = look.save(training_bars.draw(reports), folder / "training-steps")
    shutil.copy(picture, FIGURES / picture.name)
    return "\n\n".join([*texts, measured_on(file)])
