"""Loss against the clock, for compare.py --by-time: the table, the figure, and who trains other weights."""

from pathlib import Path

from traces.plots import look, loss_over_time
from traces.read.run_files import read_config, read_log
from traces.units import count_text
from traces.verdict.summary import aligned
from traces.verdict.time_to_loss import HEADER, Curve, cells, curve_of, headline, reach


def curves_of(runs: dict[str, list[Path]]) -> dict[str, list[Curve]]:
    """Return the curve of each run. runs: {name: the run folder of each seed}. Raise RunError if a log is bad."""
    return {name: [curve_of(read_log(path)) for path in paths] for name, paths in runs.items()}


def report(runs: dict[str, list[Path]], target: float, stem: Path) -> str:
    """Draw the curves into stem.png and stem.svg, and return the text to print. runs: as for `curves_of`."""
    groups = curves_of(runs)
    configs = {name: read_config(paths[0]) for name, paths in runs.items()}
    first, *_ = configs.values()
    notes = [f"{count_text(len(first['ranks']), 'rank')}, {look.short_library(first['mpi_library'])}"]
    figure, _ = look.save(loss_over_time.draw({"": groups}, target, notes), stem)
    seeds = max(map(len, runs.values()))
    found = reach(groups, target)
    lines = [
        f"training to validation loss {target:g}, without validation and checkpoints; {count_text(seeds, 'seed')}",
        "",
        aligned([list(HEADER), *cells(found)]),
        "",
        headline(found, target),
        *inexact(configs),
        f"picture: {figure}",
    ]
    return "\n".join(lines)


def inexact(configs: dict[str, dict]) -> list[str]:
    """Return a line that names the runs whose weights are not those of the other strategies. configs: by name."""
    names = [name for name, config in configs.items() if not config["same_weights"]]
    return [f"approximate, so compare the losses too: {', '.join(names)}"] if names else []
