"""The figure in README.md: tokens/s on one GPU beside llm.c and PyTorch."""

from matplotlib.figure import Figure

from traces.plots import look

NAMES = {"ours": "gpt2-mpi", "llmc": "llm.c", "torch-compiled": "torch.compile", "torch": "PyTorch eager"}
COLOURS = {"ours": look.BLUE, "llmc": look.SKY, "torch-compiled": look.ORANGE, "torch": look.ORANGE}


def draw(reports: list[dict]) -> Figure:
    """Draw a panel per report, a bar per contender. reports: of the same shape, one per GPU."""
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
    """Return the range of the ratio between our tokens/s and another contender's, like "1.01 to 1.03 times"."""
    ratios = sorted(speeds(report)["ours"] / speeds(report)[other] for report in reports)
    return " to ".join(dict.fromkeys((f"{ratios[0]:.2f}", f"{ratios[-1]:.2f}"))) + " times"


def draw_bars(axes, speed: dict[str, float]) -> None:
    for place, name in enumerate(NAMES):
        if name in speed:
            axes.barh(place, speed[name], 0.7, color=COLOURS[name])
        text, colour = (f"{speed[name]:.0f}", look.INK) if name in speed else ("not measured", look.FAINT)
        weight = "bold" if name == "ours" else "normal"
        axes.annotate(
            text, (speed.get(name, 0), place), (4, 0), textcoords="offset points", va="center", size=9, color=colour,
            weight=weight,
        )  # fmt: skip
    axes.set_yticks(range(len(NAMES)), NAMES.values())
    axes.set_ylim(len(NAMES) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
