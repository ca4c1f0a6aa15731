"""Write the GPU tables and the GPU figure of README.md and docs/gpu.md from the result files in docs/gpu/.

    python scripts/makers/docs_gpu.py
    python scripts/makers/docs_gpu.py --commit 36b07cf --step gpu.json --tests runs/test-gpu.json

--step and --tests first copy new results into docs/gpu/ and add the commit at which they were measured. The GPU machine
writes them by `bench_step.py --backend cupy --json` and `make test-gpu`. This program needs no GPU.
"""

import argparse
from pathlib import Path

from matplotlib.figure import Figure

from dist.console import open_console
from gpt2.files import write_json
from scripts.makers.pages.faults import save
from scripts.makers.pages.page import FIGURES, ROOT, fenced, read, replace_block
from traces.plots import look

RESULTS = ROOT / "docs" / "gpu"
MAIN = "gpt2-124M", 64  # model and batch size of the figure
NAMES = {"ours": "gpt2-mpi", "llmc": "llm.c", "torch-compiled": "torch.compile", "torch": "PyTorch eager"}
COLOURS = {"ours": look.BLUE, "llmc": look.SKY, "torch-compiled": look.ORANGE, "torch": look.ORANGE}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, metavar="FILE", help="the file that make test-gpu wrote")
    parser.add_argument("--step", type=Path, metavar="FILE", help="the file that bench_step.py --json wrote")
    parser.add_argument("--commit", metavar="HASH", help="the commit at which these files were measured")
    arguments = parser.parse_args()
    if (arguments.tests or arguments.step) and not arguments.commit:
        parser.error("--tests and --step need --commit, the commit at which they were measured")
    for file in filter(None, (arguments.tests, arguments.step)):
        report = {"commit": arguments.commit} | read(file)
        write_json(RESULTS / file_name(report), report)
    save(draw(main_reports()), FIGURES / "gpu.png")
    for page, made in blocks().items():
        for name, text in made.items():
            replace_block(page, name, text)


def file_name(report: dict) -> str:
    """Return "h100_124M_B64.json" for a step's report, "h100_tests.json" for the tests' report."""
    name = gpu_name(report).lower()
    if "tests" in report:
        return f"{name}_tests.json"
    settings = report["settings"]
    return f"{name}_{settings['model'].removeprefix('gpt2-')}_B{settings['batch_size']}.json"


def gpu_name(report: dict) -> str:
    """Return "H100" for "NVIDIA H100 80GB HBM3"."""
    return report["machine"]["GPU"].removeprefix("NVIDIA ").split()[0]


def blocks() -> dict[str, dict[str, str]]:
    """Return {page: {block: text}} from the files in docs/gpu/."""
    tests = read(next(RESULTS.glob("*_tests.json")))
    speed = f"{speed_table(step_reports())}\n\n{measured_on(step_reports(), tests)}"
    figure = f"![{title(main_reports())}](docs/figures/gpu.png)\n\n{measured_on(main_reports(), tests)}"
    run = run_block((RESULTS / "h200_train.txt").read_text())
    return {"README.md": {"gpu_figure": figure}, "docs/gpu.md": {"gpu_speed": speed, "gpu_run": run}}


def step_reports() -> list[dict]:
    """Return the reports sorted by GPU, model size, and falling batch size."""
    reports = [read(path) for path in sorted(RESULTS.glob("*_B*.json"))]
    return sorted(reports, key=lambda one: (gpu_name(one), one["flops_per_token"], -one["settings"]["batch_size"]))


def main_reports() -> list[dict]:
    """Return each GPU's report for the model and batch size of the figure."""
    return [one for one in step_reports() if (one["settings"]["model"], one["settings"]["batch_size"]) == MAIN]


def speed_table(reports: list[dict]) -> str:
    """Return a row per report. Each column shows the contenders side by side, with a dash for a missing result."""
    upper = {"ms a step": ("step_s", 1e3, ".1f"), "thousand tokens/s": ("tokens_per_s", 1e-3, ".1f")}
    lower = {"MFU, %": ("mfu", 100, ".1f"), "memory, GB": ("memory_bytes", 1e-9, ".1f")}
    lines = []
    short_names = [
        name.removeprefix("torch.").removeprefix("PyTorch ").replace("gpt2-mpi", "ours") for name in NAMES.values()
    ]
    for half in (upper, lower):
        lines.append(f"{'':19}{''.join(f'{heading:<38}' for heading in half)}".rstrip())
        lines.append(f"{'':17}{''.join(f'{name:>9}' for _ in half for name in short_names)}")
        for report in reports:
            settings = report["settings"]
            row = f"{gpu_name(report)} {settings['model'].removeprefix('gpt2-')} B={settings['batch_size']}"
            cells = [cell(report["contenders"].get(name, {}), *how) for how in half.values() for name in NAMES]
            lines.append(f"{row:17}{''.join(f'{text:>9}' for text in cells)}")
        lines.append("")
    return "\n".join(("```", *lines[:-1], "```"))  # the first line may begin with spaces


def cell(contender: dict, key: str, factor: float, digits: str) -> str:
    return f"{contender[key] * factor:{digits}}" if key in contender else "-"


def run_block(text: str) -> str:
    """Return the printed output of a training run, without its table of settings."""
    comment, _, output = text.partition("\n")
    header, _, steps = output.split("\n\n")
    shown = fenced("\n\n".join((header, "[all settings]", steps)))
    return f"{shown}\n\nMeasured at {comment.removeprefix('# ')}."


def measured_on(reports: list[dict], tests: dict) -> str:
    """Name the reports' GPUs, commits and versions; the versions of NVIDIA's libraries come from the tests' report."""
    machine = reports[0]["machine"]
    named = {"CuPy": machine["CuPy"]}
    for name, package in (("cuBLAS", "nvidia-cublas"), ("cuDNN", "nvidia-cudnn-cu13"), ("NCCL", "nvidia-nccl-cu13")):
        named |= {name: tests["machine"][package]} if package in tests["machine"] else {}
    for report in reports:
        for one in report.get("contenders", {}).values():
            named |= {name: one["versions"][name] for name in ("torch", "llm.c") if name in one.get("versions", {})}
    gpus = " and ".join(dict.fromkeys(report["machine"]["GPU"] for report in reports))
    commits = " and ".join(dict.fromkeys(report["commit"] for report in reports))
    versions = ", ".join(f"{name} {version}" for name, version in named.items())
    return f"Measured on {gpus} at commit {commits}, with {versions}."


def draw(reports: list[dict]) -> Figure:
    """Draw a panel per report with a bar per contender. reports: one per GPU, for the same model and batch size."""
    settings = reports[0]["settings"]
    subtitle = (
        f"training {settings['model']} in {settings['dtype']}, {settings['batch_size']} sequences of "
        f"{settings['seq_len']:,} tokens, forward, backward and AdamW: thousand tokens/s, longer is faster"
    )
    notes = ["all contenders of a panel ran on the same GPU within the same hour", "docs/gpu.md"]
    longest = max(speed for report in reports for speed in speeds(report).values())
    with look.page(9, 1.75, title(reports), subtitle, notes=notes) as figure:
        for axes, report in zip(figure.subplots(1, len(reports), sharey=True), reports, strict=True):
            draw_bars(axes, speeds(report))
            axes.set_xlim(0, longest * 1.16)
            axes.set_title(report["machine"]["GPU"], loc="left", size=10, weight="bold")
    return figure


def speeds(report: dict) -> dict[str, float]:
    """Return each measured contender's speed in thousand tokens/s."""
    measured = {name: one for name, one in report["contenders"].items() if "error" not in one}
    return {name: measured[name]["tokens_per_s"] / 1e3 for name in NAMES if name in measured}


def title(reports: list[dict]) -> str:
    llmc = ratio_text(reports, "llmc")
    compiled = ratio_text(reports, "torch-compiled")
    return f"On one GPU: {llmc} llm.c's speed, {compiled} torch.compile's"


def ratio_text(reports: list[dict], other: str) -> str:
    """Return the range of the ratio of our tokens/s to another contender's tokens/s, like "1.01 to 1.03 times"."""
    ratios = sorted(speeds(report)["ours"] / speeds(report)[other] for report in reports)
    return " to ".join(dict.fromkeys((f"{ratios[0]:.2f}", f"{ratios[-1]:.2f}"))) + " times"


def draw_bars(axes, speed: dict[str, float]) -> None:
    for place, name in enumerate(NAMES):
        if name in speed:
            axes.barh(place, speed[name], 0.7, color=COLOURS[name])
        text, colour = (f"{speed[name]:.0f}", look.INK) if name in speed else ("not measured", look.FAINT)
        style = {"va": "center", "size": 9, "color": colour, "weight": "bold" if name == "ours" else "normal"}
        look.note(axes, text, (speed.get(name, 0), place), (4, 0), **style)
    axes.set_yticks(range(len(NAMES)), NAMES.values())
    axes.set_ylim(len(NAMES) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


if __name__ == "__main__":
    open_console()
    main()
