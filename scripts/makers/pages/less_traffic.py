"""Part of make_docs.py: how long strategies that send less train to a loss, at several rates of the network, as root.

Losses over steps do not depend on the network. So they are measured on virtual hosts with fast ports, with several
seeds, and the mean step in short runs at each rate. Finished runs in `part.runs` are not repeated.
"""

from pathlib import Path

import numpy as np

from scripts.compare import hosts_folder, seed_folder
from scripts.makers.pages.page import FIGURES, ROOT, measured_on, output_of, read
from scripts.reports.by_time import curves_of
from traces.plots import look, loss_over_time
from traces.units import seconds_text, short_ms
from traces.verdict.time_to_loss import Curve, Reached, cells, reach


def less_traffic(part, folder: Path) -> str:
    """Return the figure and the table of all strategies at all rates. folder: for the figure's files."""
    curves = train(part, part.fast, part.seeds, part.training)
    panels = {}
    for rate in part.rates:
        steps = train(part, f"{rate}mbit", part.seeds[:1], f"{part.training} {part.short}")
        panels[f"{rate} Mbit/s"] = {
            label: [one.with_steps_of(steps[label][0].step_s) for one in curves[label]] for label in curves
        }
    figure = loss_over_time.draw(panels, part.loss, [f"{part.ranks} ranks, each on a virtual host"])
    look.save(figure, folder / "less-traffic")
    (folder / "less-traffic.png").replace(FIGURES / "less-traffic.png")
    title = figure.texts[0].get_text()
    found = {name: reach(groups, part.loss) for name, groups in panels.items()}
    facts = read(run_folder(part, part.fast, part.strategies[0], part.seeds[0]) / "config.json")
    picture = f"![{title}](figures/less-traffic.png)"
    return "\n\n".join([picture, table(found, part.loss), measured_on(facts)])


def train(part, rate: str, seeds: list[int], training: str) -> dict[str, list[Curve]]:
    """Make the runs that are missing, on virtual hosts with ports of this rate. Return each strategy's curves."""
    flags = ["--by-time", part.loss, "--strategies", ",".join(part.strategies), "--seeds", ",".join(map(str, seeds))]
    hosts = ["--ranks", part.ranks, "--nodes", part.ranks, "--rate", rate]
    output_of("compare.py", *flags, *hosts, "--out", ROOT / part.runs, "--", *training.split())
    return curves_of({name: [run_folder(part, rate, name, seed) for seed in seeds] for name in part.strategies})


def run_folder(part, rate: str, name: str, seed: int) -> Path:
    return seed_folder(hosts_folder(ROOT / part.runs, part.ranks, rate), name, seed)


def table(found: dict[str, list[Reached]], target: float) -> str:
    """Return a Markdown table: steps and last loss with their spread over seeds; mean step and seconds at each rate."""
    rates = [f"at {name}: step, seconds" for name in found]
    lines = [["exchange", f"steps to loss {target:g}", "last validation loss", *rates]]
    lines.append(["---"] * len(lines[0]))
    for same in zip(*found.values(), strict=True):
        ((label, _, steps, _, last),) = cells(same[:1])
        lines.append([f"`{label}`", steps, last, *map(times, same)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def times(one: Reached) -> str:
    seconds = seconds_text(one.median_s) if one.median_s < np.inf else "not reached"
    return f"{short_ms(1e3 * one.curves[0].step_s, 3)} ms, {seconds}"
