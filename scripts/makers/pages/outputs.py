"""Parts of make_docs.py that show the output of programs, on this machine or, as root, on virtual hosts."""

import shutil
from pathlib import Path

import numpy as np

from gpt2.config import GPT2_VOCABULARY
from gpt2.data.shards import write_shard
from scripts.compare import run_folder
from scripts.makers.pages.page import FIGURES, SCRIPTS, fenced, measured_on, on_hosts, output_of, read, shown
from scripts.training_bench.training_table import table
from traces import read_run
from traces.units import short_ms
from traces.verdict.summary import summary

DRAWN_TOKENS = 200_000


def first_run(part, folder: Path) -> dict[str, str]:
    """Run the commands of docs/first-run.md in order. Of the second training run, show only the end."""
    (folder / "scripts").symlink_to(SCRIPTS)
    blocks = {}
    for name, commands in part.commands.items():
        texts = [shown(command, folder) for command in commands]
        if name == "train":  # its second paragraph is a table of all settings
            head, settings, steps = texts[0].split("\n\n")
            texts[0] = f"{head}\n\n[all {len(settings.split()) // 2} settings]\n\n{steps}"
        if name == "compare":
            command, *lines = texts[0].splitlines()
            texts[0] = "\n".join([command, "...", *lines[-4:]])
        facts = read(folder / "runs/first/config.json")
        where = f"\n\n{measured_on(facts)}" if name in ("train", "compare") else ""
        blocks[f"first_run_{name}"] = fenced("\n\n".join(texts)) + where
    output_of("plot.py", folder / "runs/first")
    shutil.copy(folder / "runs/first/plots/timeline.png", FIGURES / "first-run.png")
    return blocks


def choice(part, folder: Path) -> dict[str, str]:
    """Show the advice of advise.py for a cluster, and for a model that ranks share."""
    return {"choice_advice": fenced(shown(part.advise)), "choice_cut": fenced(shown(part.cut))}


def step(part, folder: Path) -> str:
    """Return the table of one step on one rank, compared with PyTorch."""
    file = folder / "step.json"
    flags = "--seq-len", part.length, "--dtype", part.dtype, "--vs", "torch", "--json", file
    printed = fenced(output_of("bench_step.py", *flags).partition("\n\nthis project, where")[0])
    report = read(file)
    versions = {name: report["machine"][name] for name in ("python", "numpy", "numba")}
    versions |= report["contenders"]["torch"]["versions"]
    return f"{printed}\n\n{measured_on({'machine': report['machine']}, **versions)}"


def exchange(part, folder: Path) -> str:
    """Return the command and its table of contenders; draw the figure."""
    file = folder / "exchange.json"
    picture = folder / "exchange.png"
    figure = ["--figure", picture] if part.name == "exchange" else []
    printed = on_hosts(part.hosts, "bench_exchange.py", *part.flags.split(), "--json", file, *figure)
    if figure:
        shutil.copy(picture, FIGURES / picture.name)
    command = f"sudo python scripts/virtual_cluster.py run {part.hosts} -- python scripts/bench_exchange.py"
    return "\n\n".join([fenced(f"{command} {part.flags}"), fenced(printed), measured_on(read(file))])


def training_steps(part, folder: Path) -> str:
    """Return the command and the table of each setting."""
    tokens = folder / "drawn.bin"
    drawn = np.random.default_rng(1).zipf(1.2, 10 * DRAWN_TOKENS)  # with frequencies like those of words in a text
    write_shard(tokens, drawn[drawn < GPT2_VOCABULARY][:DRAWN_TOKENS].astype(np.uint16))
    file = folder / "steps.json"
    texts = []
    for setting in part.settings:
        flags = f"--link {setting['rate']} {setting['flags']}"
        hosts = f"{setting['hosts']} --rate {setting['rate']}"
        own = [*flags.split(), "--out", folder / "runs", "--json", file]
        if "contenders" in setting:
            own += ["--contenders", ";".join(setting["contenders"])]
            flags += " --contenders ..."
        on_hosts(hosts, "bench_training.py", *own, "--", *setting["training"].split(), "--train-data", tokens)
        command = f"sudo python scripts/virtual_cluster.py run {hosts} -- python scripts/bench_training.py {flags} "
        texts += [fenced(f"{command}-- {setting['training']} ..."), fenced(table(read(file)))]
    return "\n\n".join([*texts, measured_on(read(file))])


def original_case(part, folder: Path) -> str:
    """Return the command, and a table of all strategies' mean steps, from long to short, in the first cluster's case.

    The ports of the virtual hosts are as slow, compared with their cores, as those of the cluster that the project
    began with.
    """
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
