"""Run what README.md and docs/benchmarks.md show, and write their figures, tables and numbers from the runs.

    python scripts/make_docs.py comparison              a minute: every strategy on 4 ranks
    python scripts/make_docs.py learning --text FILE    five minutes: nanoGPT's CPU recipe on 2 ranks
    python scripts/make_docs.py memory                  some minutes: GPT-2 124M with every strategy on 2 ranks
    python scripts/make_docs.py sharding                ten minutes, 20 GB: what a rank holds, GPT-2 124M and 350M
    python scripts/make_docs.py ranks                   two minutes: GPT-2 124M on 1, 2 and 4 ranks
    python scripts/make_docs.py cluster                 a minute, as root: 9 ranks on 5 virtual hosts
    python scripts/make_docs.py exchange                two minutes, as root: one exchange on 5 hosts, PyTorch (needed)
    python scripts/make_docs.py overlap                 a minute, as root: an exchange during backward, on 2 hosts
    python scripts/make_docs.py start                   seconds: what compiled loops cost a process at its start
    python scripts/make_docs.py step                    ten minutes: one step, its floor, PyTorch (which it needs)

Each part replaces the text between its own two marks, and its figures in docs/figures.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from compare import strategy_flags
from machine import machine as measured_on
from machine import versions

from gpt2.config import PRESETS
from gpt2.parameters import Layout
from traces.analysis import measure
from traces.phases import INDEX
from traces.runs import read_run

SCRIPTS = Path(__file__).parent
ROOT = SCRIPTS.parent
FIGURES = ROOT / "docs" / "figures"
STRATEGIES = "reduce-bcast,reduce-bcast/dedicated,sliced,reduce-scatter,allreduce"
# nanoGPT's README, "I only have a macbook": its settings for a CPU, with its other defaults.
NANOGPT_CPU_RECIPE = (
    "--model baby --batch-size 6 --seq-len 64 --steps 2000 --lr 1e-3 --min-lr 1e-4 --warmup 100 --beta2 0.99 "
    "--weight-decay 0.1 --grad-clip 1.0 --eval-every 250 --eval-steps 0"
)
CLUSTER = "--nodes 5 --ranks 9 --ranks-per-node 2 --first-node 1 --rate 400mbit"
EXCHANGE_CLUSTER = "--nodes 5 --ranks 9 --ranks-per-node 2 --rate 400mbit"
EXCHANGE = "--bytes 8MB --link 400mbit --vs torch"
CLUSTER_STRATEGIES = (
    "reduce-bcast/dedicated", "sliced", "reduce-scatter", "hierarchical", "hierarchical/bfloat16/overlap",
)  # fmt: skip
CLUSTER_TRAINING = "--n-layer 4 --n-head 4 --n-embd 256 --batch-size 2 --steps 12 --eval-every 0"
OVERLAP_CLUSTER = "--nodes 2 --ranks 2 --rate 240mbit"
OVERLAP_TRAINING = "--n-layer 12 --n-head 4 --n-embd 256 --context 128 --batch-size 12 --steps 7 --eval-every 0"
RANKS_STEP = "--model gpt2-124M --seq-len 64 --steps 7 --eval-every 0"
SHARDED = "reduce-scatter,hierarchical-sharded,zero-2,zero-3"
SHARDING_RUNS = (("gpt2-124M", 1), ("gpt2-124M", 2), ("gpt2-124M", 4), ("gpt2-350M", 2), ("gpt2-350M", 4))
SHARDING_STEP = "--batch-size 1 --seq-len 64 --steps 2 --eval-every 0"
MEMORY_STEP = "--model gpt2-124M --batch-size 4 --seq-len 256 --steps 3 --eval-every 0"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--text", type=Path, help="learning: tinyshakespeare.txt (1,115,394 bytes)")
    arguments = parser.parse_args()
    if arguments.part == "learning" and not arguments.text:
        parser.error("learning needs --text, the path of tinyshakespeare.txt")
    FIGURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        PARTS[arguments.part](Path(folder), arguments.text)


def comparison(folder: Path, _) -> None:
    output = compare(folder, 4, STRATEGIES)
    shutil.copy(folder / "plots" / "comparison.png", FIGURES / "comparison.png")
    table = output[output.index("median ms") :].split("\n\n")[0]
    replace_block("README.md", "comparison", f"```\n{table}\n```\n\n{machine(folder / 'sliced')}")


def learning(folder: Path, text: Path) -> None:
    flags = [*NANOGPT_CPU_RECIPE.split(), "--text", str(text), "--tokenizer", "bytes"]
    compare(folder, 2, "reduce-scatter", flags)
    run = folder / "reduce-scatter"
    shutil.copy(folder / "plots" / "loss.png", FIGURES / "learning.png")
    last = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    train_loss = sum(line["loss"] for line in last[-200:]) / 200
    command = f"mpirun -n 2 python scripts/train.py --text tinyshakespeare.txt {NANOGPT_CPU_RECIPE}"
    replace_block(
        "README.md",
        "learning",
        f"```\n{command}\n```\n\nValidation loss {last[-1]['val_loss']:.3f} over the whole validation set, training "
        f"loss {train_loss:.3f} over the last 200 steps, in {sum(line['step_s'] for line in last) / 60:.1f} minutes. "
        f"{machine(run)}",
    )


def memory(folder: Path, _) -> None:
    compare(folder, 2, STRATEGIES, MEMORY_STEP.split())
    rows = ["| strategy | rank 0, GB | rank 1, GB | one step, s |", "|---|---|---|---|"]
    for name in STRATEGIES.split(","):
        run = folder / name.replace("/", "-")
        peak = json.loads((run / "summary.json").read_text())["peak_memory_bytes"]
        last = json.loads((run / "log.jsonl").read_text().splitlines()[-1])
        rows.append(f"| `{name}` | {peak[0] / 1e9:.2f} | {peak[1] / 1e9:.2f} | {last['step_s']:.1f} |")
    rows.append(f"\n`{MEMORY_STEP}` on 2 ranks; peak resident memory. {machine(run)}")
    replace_block("README.md", "memory", "\n".join(rows))


def sharding(folder: Path, _) -> None:
    rows = ["| model | ranks | strategy | ZeRO's formula, GB | with its buffers, GB | measured, GB |"]
    rows += ["|---|---|---|---|---|---|"]
    for model, count in SHARDING_RUNS:
        out = folder / f"{model}-{count}"
        compare(out, count, SHARDED, ["--model", model, *SHARDING_STEP.split()])
        layout = Layout(PRESETS[model])
        for name in SHARDED.split(","):
            formula, buffers = (4e-9 * elements for elements in held(name, layout, count))
            peak = max(json.loads((out / name / "summary.json").read_text())["peak_memory_bytes"]) / 1e9
            rows.append(f"| {model} | {count} | `{name}` | {formula:.2f} | {formula + buffers:.2f} | {peak:.2f} |")
    rows.append(f"\n`{SHARDING_STEP}`; peak resident memory of the largest rank. {machine(out / name)}")
    replace_block("docs/benchmarks.md", "sharding", "\n".join(rows))


def held(strategy: str, layout: Layout, ranks: int) -> tuple[float, float]:
    """float32 values a rank of one node holds: parameters, gradients and moments, and what it works in besides."""
    embeddings, layer, *_, last = (stop - start for start, stop in layout.ranges)
    whole, part, room = layout.size, layout.size / ranks, embeddings + 2 * layer + last
    return {
        "reduce-scatter": (2 * whole + 2 * part, part),  # the sum of its block
        "hierarchical-sharded": (2 * whole + 2 * part, whole - part),  # what it adds of its neighbours' gradients
        "zero-2": (whole + 3 * part, room),
        "zero-3": (4 * part, 2 * room),
    }[strategy]


def ranks(folder: Path, _) -> None:
    rows = ["| ranks | sequences a rank | threads a rank | tokens/s |", "|---|---|---|---|"]
    for count, threads in ((1, 0), (2, 0), (4, 0), (4, 2)):
        flags = [*RANKS_STEP.split(), "--batch-size", str(4 // count), "--threads", str(threads)]
        run = folder / f"{count}-{threads}"
        compare(run, count, "reduce-scatter", flags)
        config = json.loads((run / "reduce-scatter" / "config.json").read_text())
        log = [json.loads(line) for line in (run / "reduce-scatter" / "log.jsonl").read_text().splitlines()]
        speed = statistics.median(line["tokens_per_s"] for line in log[2:])
        chosen = "" if threads == 0 else " (forced by `--threads`)"
        rows.append(f"| {count} | {4 // count} | {config['threads_per_rank']}{chosen} | {speed:.0f} |")
    rows.append(f"\n`--strategy reduce-scatter {RANKS_STEP}`, median of 5 steps. {machine(run / 'reduce-scatter')}")
    replace_block("docs/benchmarks.md", "ranks", "\n".join(rows))


def step(folder: Path, _) -> None:
    tables = []
    for length in (256, 64):
        file = folder / f"{length}.json"
        command = [sys.executable, str(SCRIPTS / "bench_step.py"), "--seq-len", str(length), "--vs", "torch"]
        output = subprocess.run([*command, "--json", file], stdout=subprocess.PIPE, text=True, check=True).stdout
        print(output)
        tables.append(f"```\n{output.rstrip()}\n```")
    report = json.loads(file.read_text())
    where, torch = report["machine"], report["contenders"]["torch"]["versions"]["torch"]
    tables.append(
        f"Measured on {where['processor']}, {where['cores']} cores, with python {where['python']}, "
        f"numpy {where['numpy']}, numba {where['numba']}, torch {torch}."
    )
    replace_block("docs/benchmarks.md", "step", "\n\n".join(tables))


def start(folder: Path, _) -> None:
    """A process's first step with an empty cache of compiled loops, and with what that left."""
    rows = ["| cache of compiled loops | import of the kernels, s | first step, s |", "|---|---|---|"]
    for cache in ("empty", "filled"):
        command = [sys.executable, str(SCRIPTS / "first_step.py")]
        environment = os.environ | {"NUMBA_CACHE_DIR": str(folder)}
        output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
        seconds = json.loads(output)
        rows.append(f"| {cache} | {seconds['import_s']:.2f} | {seconds['first_step_s']:.2f} |")
    where, packages = measured_on(), versions("numpy", "numba")
    named = ", ".join(f"{name} {version}" for name, version in packages.items())
    rows += ["", f"Measured on {where['processor']}, {where['cores']} cores, with {named}."]
    replace_block("docs/benchmarks.md", "start", "\n".join(rows))


def cluster(folder: Path, _) -> None:
    """Nine ranks on five hosts, the server alone on its own, each host's port limited."""
    runs = [train_on(CLUSTER, name, CLUSTER_TRAINING, folder / name.replace("/", "-")) for name in CLUSTER_STRATEGIES]
    plot = [sys.executable, str(SCRIPTS / "plot.py"), *map(str, runs), "--out", str(folder / "plots")]
    output = subprocess.run(plot, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(output)
    shutil.copy(folder / "plots" / "comparison.png", FIGURES / "cluster.png")
    table = output[output.index("median ms") :].split("\n\n")[0]
    command = f"sudo python scripts/virtual_cluster.py run {CLUSTER} -- python scripts/train.py {CLUSTER_TRAINING}"
    text = f"```\n{command} ...\n\n{table}\n```\n\n{server_shares(runs[0])} {machine(runs[-1])}"
    replace_block("README.md", "cluster", text)


def server_shares(run: Path) -> str:
    """How a step divides where rank 0 serves: it begins with Reduce, while the others compute."""
    times = measure(read_run(run))
    seconds = {name: times.seconds[:, :, INDEX[name]] for name in ("forward", "backward", "reduce", "bcast")}
    compute = np.median(seconds["forward"][:, 1:] + seconds["backward"][:, 1:])
    bcast = np.median(seconds["bcast"][:, 0])
    reduced = np.median(seconds["reduce"][:, 0]) - compute
    unit = reduced / 500
    return (
        f"Reduce : Bcast : compute of the dedicated server's step are 500 : {bcast / unit:.0f} : {compute / unit:.0f}."
    )


def overlap(folder: Path, _) -> None:
    """A step without exchange, with it after computing, and during it: a core a rank, so that both can go on."""
    names = ("none", "hierarchical-sharded", "hierarchical-sharded/overlap")
    lines = {name: [] for name in names}
    for number, name in enumerate(names * 3):  # in turns, as the machine drifts
        run = train_on(OVERLAP_CLUSTER, name, OVERLAP_TRAINING, folder / str(number))
        lines[name] += [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()][2:]
    keys = ("step_s", "exposed_exchange_s")
    seconds = {name: [statistics.median(line[key] for line in lines[name]) for key in keys] for name in names}
    rows = ["| strategy | step, s | exchange exposed, s |", "|---|---|---|"]
    rows += [f"| `{name}` | {step_s:.3f} | {exposed_s:.3f} |" for name, (step_s, exposed_s) in seconds.items()]
    (alone, _), (after, exchange_s), (during, exposed_s) = seconds.values()
    rows += [
        "",
        f"Of what the exchange adds to a step overlap hides {(after - during) / (after - alone):.0%}, of the time that "
        f"ranks spend in the exchange and nothing else, {1 - exposed_s / exchange_s:.0%}.",
        "",
        f"`virtual_cluster.py run {OVERLAP_CLUSTER} -- train.py {OVERLAP_TRAINING}`. {machine(run)}",
    ]
    replace_block("docs/benchmarks.md", "overlap", "\n".join(rows))


def train_on(hosts: str, strategy: str, training: str, out: Path) -> Path:
    """Train on virtual hosts, into `out`, which is returned."""
    train = [sys.executable, str(SCRIPTS / "train.py"), *strategy_flags(strategy), *training.split()]
    command = [sys.executable, str(SCRIPTS / "virtual_cluster.py"), "run", *hosts.split(), "--", *train]
    subprocess.run([*command, "--out", str(out)], check=True, cwd=ROOT)
    return out


def exchange(folder: Path, _) -> None:
    """One exchange by every strategy and collective, nine ranks on five hosts."""
    files = ["--json", str(folder / "exchange.json"), "--figure", str(FIGURES / "exchange.png")]
    bench = [sys.executable, str(SCRIPTS / "bench_exchange.py"), *EXCHANGE.split(), *files]
    command = [sys.executable, str(SCRIPTS / "virtual_cluster.py"), "run", *EXCHANGE_CLUSTER.split(), "--", *bench]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout
    print(output)
    (FIGURES / "exchange.svg").unlink()
    table = output.partition("\n\n")[2].strip()  # below the cluster's own
    shown = f"python scripts/virtual_cluster.py run {EXCHANGE_CLUSTER} -- python scripts/bench_exchange.py {EXCHANGE}"
    text = f"```\nsudo {shown}\n```\n\n```\n{table}\n```\n\n{machine(folder / 'exchange.json')}"
    replace_block("docs/benchmarks.md", "exchange", text)


def compare(folder: Path, ranks: int, strategies: str, training: list[str] | None = None) -> str:
    """Run scripts/compare.py into `folder`; returns what it printed."""
    command = [sys.executable, str(SCRIPTS / "compare.py"), "--ranks", str(ranks), "--strategies", strategies]
    command += ["--out", str(folder), *(["--", *training] if training else [])]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    print(result.stdout)
    return result.stdout


def machine(source: Path) -> str:
    """Where the numbers come from, in one line: of a run folder, or of what a bench wrote."""
    config = json.loads((source / "config.json" if source.is_dir() else source).read_text())
    named = ", ".join(f"{name} {version}" for name, version in config["versions"].items() if name != "gpt2-mpi")
    return (
        f"Measured on {config['machine']['processor']}, {config['machine']['cores']} cores, with "
        f"{config['mpi_library']}, {named}."
    )


def replace_block(page: str, name: str, text: str) -> None:
    """Put `text` between the page's two marks of this name."""
    path = ROOT / page
    begin, end = f"<!-- begin generated: {name} -->", f"<!-- end generated: {name} -->"
    before, rest = path.read_text().split(begin)
    path.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")


PARTS = {
    "comparison": comparison,
    "cluster": cluster,
    "exchange": exchange,
    "learning": learning,
    "memory": memory,
    "overlap": overlap,
    "ranks": ranks,
    "sharding": sharding,
    "start": start,
    "step": step,
}


if __name__ == "__main__":
    main()
