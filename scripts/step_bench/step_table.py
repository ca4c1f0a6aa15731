"""The text that bench_step.py prints: a line per contender, notes, the parts of our step and of its floor."""

from scripts.machine.blas import blas_text
from traces.units import mfu_text

LABELS = {
    "peak": "multiply-add",
    "ours": "this project",
    "floor": "matrix products alone",
    "ours-float32": "this project, float32",
    "torch": "PyTorch, eager",
    "torch-compiled": "PyTorch, torch.compile",
    "llmc": "llm.c",
}
HEAD = f"{'':23} step, ms      min      max  tokens/s     MFU   relative  memory, GB     loss"


def header(report: dict) -> str:
    """Return the shape, NumPy's BLAS if it multiplies, and the columns' titles."""
    s = report["settings"]
    on_cpu = s["backend"] == "numpy"
    threads = f", {s['threads']} threads" if on_cpu else ""
    turns = f"{s['turns']} turns of {s['steps_a_turn']} step{'s' * (s['steps_a_turn'] > 1)}"
    shape = f"{s['model']}, B={s['batch_size']} T={s['seq_len']}, {s['dtype']}{threads}, {turns}"
    return "\n".join([shape, *([blas_text(report["blas"])] if on_cpu else []), "", HEAD])


def row(name: str, c: dict) -> str:
    """Return the line of a contender below HEAD."""
    times = f"{c['step_s'] * 1e3:8.2f} {c['min_s'] * 1e3:8.2f} {c['max_s'] * 1e3:8.2f} {c['tokens_per_s']:9,.0f}"
    memory = f"{c['memory_bytes'] / 1e9:11.2f}"
    loss = "-" if c["loss"] is None else f"{c['loss']:.4f}"
    return f"{LABELS[name]:23} {times} {mfu_cell(c):>7} {c['ours_over_this']:10.3f} {memory} {loss:>8}"


def mfu_cell(c: dict) -> str:
    if c["mfu"] is None:
        return "-"
    return mfu_text(c["mfu"], True) if c.get("peak_underestimated") else f"{c['mfu']:.1%}"


def failure_line(name: str, error: str) -> str:
    return f"{LABELS[name]:23} not measured: {error}"


def notes(report: dict) -> str:
    """Name the machine, and explain the columns."""
    machine = report["machine"]
    peak = report["peak_tflops"]
    source = "datasheet" if "GPU" in machine else "multiply-add rate, measured"
    of = f"of {peak:.3g} TFLOP/s ({source})" if peak else "unknown, because the GPU's datasheet is not known here"
    return "\n".join((
        "",
        f"On {machine.get('GPU', machine['processor'])}.",
        f"MFU: {of}, counting {report['flops_per_token'] / 1e6:.1f} MFLOP per token as llm.c does (6 N + 6 L C T).",
        "relative: our time divided by the contender's.",
        "memory: the process's peak; on a GPU what the allocator reserved, for llm.c all memory in use.",
        "loss: after the same first steps on one batch; llm.c has its own parameters and batch.",
    ))  # fmt: skip


def parts_text(contenders: dict[str, dict]) -> list[str]:
    """Return a paragraph for each contender that times the parts of its step, the longest part first."""
    texts = []
    for name, c in contenders.items():
        parts = c.get("parts_s", {})
        lines = [
            f"    {part:28} {parts[part] * 1e3:9.1f} ms {parts[part] / c['step_s']:6.1%}"
            for part in sorted(parts, key=parts.get, reverse=True)
        ]
        if lines:
            texts.append("\n".join([f"{LABELS[name]}, where the step goes:", *lines]))
    return texts
