"""Part of make_docs.py: whole training steps beside PyTorch's on virtual hosts, as root, with a figure of both."""

import shutil
from pathlib import Path

import numpy as np

from gpt2.config import GPT2_VOCABULARY
from gpt2.data.shards import write_shard
from scripts.makers.pages.page import FIGURES, Part, fenced, measured_on, on_hosts, read
from scripts.training_bench.table import DDP, OURS, table
from traces.plots import look, training_bars

DRAWN_TOKENS = 200_000
HALVED, HALVED_OURS = "DDP, float16 hook", "ours, bfloat16 wire"


def training_steps(part: Part, folder: Path) -> dict[str, str]:
    """Return the table of each setting and README's rows; draw the figure."""
    tokens, texts, reports = tokens_of(part, folder), [], []
    for number, setting in enumerate(part.settings):
        file, flags = folder / f"{number}.json", f"--link {setting['rate']} {setting['flags']}"
        where = f"{setting['hosts']} --rate {setting['rate']}"
        own = [*flags.split(), "--out", folder / "runs", "--json", file]
        on_hosts(where, "bench_training.py", *own, "--", *setting["training"].split(), *tokens)
        reports.append(read(file))
        command = f"sudo python scripts/virtual_cluster.py run {where} -- python scripts/bench_training.py {flags} "
        texts += [fenced(f"{command}-- {setting['training']} ..."), fenced(table(reports[-1]))]
    picture, _ = look.save(training_bars.draw(reports), folder / "training-steps")
    shutil.copy(picture, FIGURES / picture.name)
    machine = measured_on(file)
    rows = [readme_row(report) for report in reports]
    return {"training_steps": "\n\n".join([*texts, machine]), "beside_ddp": part.filled(rows, measured_on=machine)}


def tokens_of(part: Part, folder: Path) -> list[object]:
    """Return train.py's flags for the data: --text as GPT-2's tokens, or random tokens with Zipf's frequencies."""
    if part.options.text:
        return ["--text", Path(part.options.text).resolve(), "--tokenizer", "gpt2"]
    drawn = np.random.default_rng(1).zipf(1.2, 10 * DRAWN_TOKENS)
    write_shard(folder / "drawn.bin", drawn[drawn < GPT2_VOCABULARY][:DRAWN_TOKENS].astype(np.uint16))
    return ["--train-data", folder / "drawn.bin"]


def readme_row(report: dict) -> dict:
    """Return README's row: seconds of a step of each contender."""
    found = {name: one["step_s"] for name, one in report["contenders"].items()}
    return {
        "title": training_bars.panel_title(report), "least": report["least_s"], "ours": found[OURS], "ddp": found[DDP],
        "ours_halved": found[HALVED_OURS], "ddp_halved": found[HALVED], "ratio": found[DDP] / found[OURS],
        "ratio_halved": found[HALVED] / found[HALVED_OURS],
    }  # fmt: skip
