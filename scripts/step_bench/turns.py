"""What bench_step.py does alike on CPUs and on a GPU: contenders' processes, the numbers of their turns, the file."""

import json
import statistics
import sys
from pathlib import Path

from scripts.step_bench.process import ContenderError

BENCH_STEP = Path(__file__).parent.parent / "bench_step.py"
TORCH_CONTENDERS = {"torch": "PyTorch, eager", "torch-compiled": "PyTorch, torch.compile"}


def contender_command(*flags: str) -> list[str]:
    """What starts a contender's process, without its name and shape."""
    return [sys.executable, str(BENCH_STEP), *flags, "--contender"]


def chosen(settings, *names: str) -> dict:
    """The settings of these names."""
    return {name: getattr(settings, name) for name in names}


def statistics_of(seconds: list[float], ours: list[float], tokens: int) -> dict:
    """Median and spread of a contender's steps of so many tokens, beside ours of the same turns.

    The ratio is the median of the ratios turn by turn: what slows the machine down slows both sides of a turn.
    """
    return {
        "step_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "tokens_per_s": tokens / statistics.median(seconds),
        "ours_over_this": statistics.median(a / b for a, b in zip(ours, seconds, strict=True)),
    }


def write_report(settings, report: dict) -> None:
    if settings.json:
        settings.json.write_text(json.dumps(report, indent=1) + "\n")


def import_torch():
    """PyTorch and torch_gpt2.py. ContenderError where it is not installed."""
    try:
        import torch

        from scripts.step_bench import torch_gpt2
    except ImportError:
        raise ContenderError("--vs torch needs PyTorch: pip install torch (the project itself does not)") from None
    return torch, torch_gpt2
