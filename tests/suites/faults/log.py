"""What a run says and leaves behind: how far its log goes, and how far its newest complete checkpoint."""

import json
import re
from pathlib import Path

from gpt2.formats.checkpoints import newest_first

MARK = "fault at"  # what failure_train.py prints, and when it was
LINE_BYTES = 4096  # a line of log.jsonl is shorter
# Lines that say who, where, what: the job's own, which are looked for first, and those of the launchers.
OF_THE_JOB = (
    r"^(\w+\.py: )?(error|warning): |rank \d+ (?:of \d+ )?on |^all \d+ ranks wait|^a signal ended|they start again in"
)
# What a job says of where its ranks are, before anything happens to them.
AT_THE_START = "warning: parts of --tensor-parallel lie on several nodes"
OF_A_LAUNCHER = r"RUNNING AT|Peer host:|srun: error: \w+: task|noticed that"


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


def starts_of(run: Path) -> int:
    """How often --restarts has started the ranks of a run that has ended."""
    return len((run / "restarts.jsonl").read_text().splitlines())


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


def message(output: Path) -> str:
    """The first line of the job that names a rank or an error; else the launcher's that names a host; else "".

    The run folder is RUN in it.
    """
    text = output.read_text(errors="replace").replace(str(output.parent / output.name.split(".")[0]), "RUN")
    lines = [line.strip(" =") for line in text.splitlines() if not line.startswith(AT_THE_START)]
    return next((line for wanted in (OF_THE_JOB, OF_A_LAUNCHER) for line in lines if re.search(wanted, line)), "")
