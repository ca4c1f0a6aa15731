"""What a run says and leaves behind: how far its log goes, and how far its newest complete checkpoint."""

import json
from pathlib import Path

from gpt2.formats.checkpoints import newest_first

MARK = "fault at"  # what failure_train.py prints, and when it was
LINE_BYTES = 4096  # a line of log.jsonl is shorter


def last_step(run: Path) -> int:
    """The last step of log.jsonl; 0 where there is none yet."""
    try:
        with open(run / "log.jsonl", "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - LINE_BYTES))
            lines = file.read().split(b"\n")[:-1]  # without one that is still being written
    except OSError:
        return 0
    return json.loads(lines[-1])["step"] if lines and lines[-1] else 0


def curve(run: Path) -> list[tuple]:
    """(step, loss, gradients' norm, learning rate) of each line of log.jsonl: what must be the same bits again."""
    lines = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in lines]


def skipped_steps(run: Path) -> list[int]:
    """Those whose update --skip-outliers left out."""
    try:
        lines = map(json.loads, (run / "log.jsonl").read_text().splitlines())
        return [line["step"] for line in lines if line.get("skipped")]
    except (OSError, ValueError):
        return []  # removed, or cut


def newest_step(run: Path) -> int:
    """The step of the newest complete checkpoint; 0 where there is none."""
    return next((int(path.name.removeprefix("step-")) for path in newest_first(run / "checkpoints")), 0)
