"""Parts of make_docs.py: training on virtual hosts whose ports are limited, and the cost model there. As root."""

import shutil
import sys
from pathlib import Path
from statistics import median

import numpy as np

from scripts.makers.pages.page import (
    FIGURES,
    Part,
    comparison_table,
    library_name,
    log_of,
    measured_on,
    measured_with,
    on_hosts,
    output_of,
    read,
)  # fmt: skip
from traces.read.analysis import measure
from traces.read.runs import read_run
from traces.record.phases import INDEX


def cluster(part: Part, folder: Path) -> str:
    """Train with each strategy on nine ranks and five hosts, one of them for the server alone."""
    runs = [folder / strategy.replace(" ", "") for strategy in part.strategies]
    for run, strategy in zip(runs, part.strategies, strict=True):
        before = part.tree_and_chain.split() if "dedicated" in strategy else []
        train = ["train.py", "--strategy", *strategy.split(), *part.training.split(), "--out", run]
        on_hosts(part.hosts, *before, *train)
    table = comparison_table(output_of("plot.py", *runs, "--out", folder / "plots"))
    shutil.copy(folder / "plots" / "comparison.png", FIGURES / "cluster.png")
    dedicated, *_, best = (median(line["step_s"] for line in log_of(run)[2:]) for run in runs)
    shares = server_shares(runs[0])
    return part.filled(table=table, shares=shares, faster=dedicated / best, measured_on=measured_on(runs[-1]))


def server_shares(run: Path) -> list[float]:
    """Return the shares of a server's step, scaled to 500 for Reduce: Reduce from the arrival of the last rank, Bcast
    until the last rank has all parameters, the others' computing."""
    times = measure(read_run(run))
    names = ("forward", "backward", "reduce", "bcast", "wait")
    seconds = {name: times.seconds[:, :, INDEX[name]] for name in names}
    compute = np.median(seconds["forward"][:, 1:] + seconds["backward"][:, 1:])
    # The server's part of Bcast ends when all has left it; then it waits until all has arrived.
    bcast = np.median(seconds["bcast"][:, 0] + seconds["wait"][:, 0])
    reduced = np.median(seconds["reduce"][:, 0] - times.waiting[:, 0, INDEX["reduce"]])
    return [500 * share / reduced for share in (reduced, bcast, compute)]


def overlap(part: Part, folder: Path) -> str:
    """Measure a step without exchange, with an exchange after computing, and during it, with a core for each rank."""
    lines = {name: [] for name in part.strategies}
    for number, (name, strategy) in enumerate([*part.strategies.items()] * 3):  # in turns, as the machine drifts
        run = folder / str(number)
        on_hosts(part.hosts, "train.py", "--strategy", *strategy.split(), *part.training.split(), "--out", run)
        lines[name] += log_of(run)[2:]
    keys = ("step_s", "exposed_exchange_s")
    alone, after, during = rows = [
        {"name": name} | {key: median(line[key] for line in found) for key in keys} for name, found in lines.items()
    ]
    hidden_step = (after["step_s"] - during["step_s"]) / (after["step_s"] - alone["step_s"])
    hidden_exchange = 1 - during["exposed_exchange_s"] / after["exposed_exchange_s"]
    return part.filled(rows, hidden_step=hidden_step, hidden_exchange=hidden_exchange, measured_on=measured_on(run))


def model(part: Part, folder: Path) -> str:
    """Compare predicted and measured exchanges, with the MPI of each Python of --pythons."""
    found, reports, file = {}, [], folder / "model.json"
    for python in part.options.pythons or [sys.executable]:
        for layout, hosts in part.layouts.items():
            flags = [*part.flags.split(), "--link", part.rate, "--json", file]
            on_hosts(f"{hosts} --rate {part.rate}", "check_model.py", *flags, python=python)
            reports.append(read(file))
            library = library_name(reports[-1]["mpi_library"])
            for size in reports[-1]["sizes"]:
                found[library, layout, round(size["bytes"] / 1e6)] = size["strategies"]
    names = [*next(iter(found.values()))]
    lines = [f"| MPI library | hosts | MB | {' | '.join(f'`{name}`' for name in names)} |"]
    lines.append("|" + "---|" * (3 + len(names)))
    for place, one in found.items():
        lines.append(f"| {' | '.join([*map(str, place), *(model_cell(one[name]) for name in names)])} |")
    libraries = dict.fromkeys(report["mpi_library"] for report in reports)
    return part.filled(
        **deviations(found, part.far_off),
        table="\n".join(lines),
        measured_on=measured_with(reports[0]["machine"], *libraries),
    )


def model_cell(one: dict) -> str:
    deviation = "not modelled" if one["deviation"] is None else f"{one['deviation']:+.0%}"
    return f"{one['measured_s'] * 1e3:.0f} ms, {deviation}"


def deviations(found: dict[tuple, dict], far_off: float) -> dict:
    """Return how many predictions are far off, the worst one, and the deviation of bytes."""
    known = [(one, name, place) for place, by_name in found.items() for name, one in by_name.items()]
    known = [item for item in known if item[0]["deviation"] is not None]
    worst, name, place = max(known, key=lambda item: abs(item[0]["deviation"]))
    far = sum(abs(one["deviation"]) > far_off for one, *_ in known)
    bytes_off = max(one["bytes_deviation"] for one, *_ in known)
    facts = {"count": len(known), "far": far, "bytes_off": bytes_off}
    return facts | {"worst": worst["deviation"], "name": name, "place": place}
