"""Part of make_docs.py: each picture of docs/diagnosis.md, of a healthy run and of a sick one. As root."""

from dataclasses import replace
from pathlib import Path

from PIL import Image

from scripts.makers.pages.page import FIGURES, machine, replace_block
from scripts.reports import figures
from scripts.reports.verdict import diagnose
from tests.suites.fault_suite import CASES, MODEL, run
from traces import read_run
from traces.plots import look
from traces.verdict.summary import TimedRun, measure_runs

PICTURES = FIGURES / "pictures"
DPI, COLOURS = 90, 48

# Runs by name; most are fault_suite.py's, on five virtual hosts with ports of 400 Mbit/s.
ALONE = replace(CASES["clean"], says="nothing, one rank", ranks=1)
PAIR = replace(CASES["clean"], says="nothing, two ranks, ports of 10 Gbit/s", ranks=2, rate="10gbit")
RING = replace(CASES["clean"], says="nothing, another strategy", train=("--strategy", "ring", *MODEL))
SLOW_PAIR = replace(CASES["all-ports-slow"], says="all ports at a tenth of the rate, two ranks", ranks=2)
SERVER = replace(CASES["server"], says="reduce-bcast, nine ranks, ports of half the rate", rate="200mbit")
DIVERGING = replace(
    CASES["clean"], says="--lr 0.3, three hundred times too much", train=(*CASES["clean"].train, "--lr", 0.3)
)
FROM_THE_SUITE = ("clean", "slow-rank", "stalling-rank", "all-ports-slow", "small-messages")
RUNS = {name: CASES[name] for name in FROM_THE_SUITE} | {
    "server": SERVER, "ring": RING, "one-rank": ALONE, "two-ranks": PAIR, "two-ranks-slow": SLOW_PAIR,
    "high-lr": DIVERGING,
}  # fmt: skip
# Of one run: picture -> the healthy one's and the sick one's run.
OF_ONE = {
    "timeline": ("clean", "slow-rank"),
    "ranks": ("clean", "stalling-rank"),
    "waits": ("clean", "slow-rank"),
    "ports": ("clean", "server"),
    "messages": ("clean", "server"),
    "phases": ("clean", "all-ports-slow"),
    "loss": ("clean", "high-lr"),
}
OF_SEVERAL = {
    "comparison": (("clean", "ring"), ("clean", "server", "all-ports-slow")),
    "model": (("clean", "server"), ("server", "small-messages")),
    "scaling": (("one-rank", "two-ranks"), ("one-rank", "two-ranks-slow")),
}


def pictures(folder: Path, _) -> None:
    PICTURES.mkdir(exist_ok=True)
    for name, case in RUNS.items():
        run(case, folder / name)
    drawn = {name: figures.of_one(measured_of(folder, name)[0]) for pair in OF_ONE.values() for name in pair}
    for picture, pair in OF_ONE.items():
        for health, name in zip(("healthy", "sick"), pair, strict=True):
            save(drawn[name][picture], f"{picture}-{health}")
    for picture, pair in OF_SEVERAL.items():
        for health, names in zip(("healthy", "sick"), pair, strict=True):
            save(figures.of_several(measured_of(folder, *names))[picture], f"{picture}-{health}")
    rows = ["| run | what was done to it | verdict |", "|---|---|---|"]
    for name, case in RUNS.items():
        rows.append(f"| {name} | {case.says} | {diagnose(read_run(folder / name))['verdict']} |")
    flags = " ".join(map(str, MODEL))
    rows += ["", f"Five virtual hosts, ports of 400 Mbit/s, `{flags}`. {machine(folder / 'clean')}"]
    replace_block("docs/diagnosis.md", "pictures", "\n".join(rows))


def measured_of(folder: Path, *names: str) -> list[TimedRun]:
    return measure_runs([read_run(folder / name) for name in names])


def save(figure, name: str) -> None:
    """A small PNG: few colours are enough for bars and lines."""
    path = PICTURES / f"{name}.png"
    with look.styled():
        figure.savefig(path, dpi=DPI, facecolor="white")
    Image.open(path).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
