"""What bench_step.py --backend cupy prints: a line a contender, and our step's kernels beside their floors."""

from traces.units import mfu_text


def whole_text(report: dict, contenders: dict[str, str]) -> str:
    """All that the command printed, made again from what it wrote."""
    lines = [header(report)]
    for name, text in contenders.items():
        if entry := report["contenders"].get(name):
            lines.append(failure_line(text, entry["error"]) if "error" in entry else contender_line(text, entry))
    lines += [failure_line(f"  its {part}", error) for part, error in report.get("failed", {}).items()]
    kernels = [kernel_table(report)] if has_table(report) else []
    return "\n".join([*lines, *kernels, notes(report)])


def has_table(report: dict) -> bool:
    """Whether all is there that the table of kernels says."""
    return "kernels" in report and "rates" in report


def header(report: dict) -> str:
    s, name = report["settings"], report["machine"]["GPU"]
    return "\n".join((
        f"{s['model']}, B={s['batch_size']} T={s['seq_len']}, {s['dtype']}, {name}; "
        f"{s['turns']} turns of {s['steps_a_turn']} steps",
        "",
        f"{'':28} {'step, ms':>9} {'min':>8} {'max':>8} {'tokens/s':>10} {'MFU':>7} {'ours / it':>9} "
        f"{'memory, GB':>10} {'loss':>8}",
    ))  # fmt: skip


def contender_line(text: str, c: dict) -> str:
    underestimated = c.get("peak_underestimated", False)
    mfu = "" if c["mfu"] is None else mfu_text(c["mfu"], True) if underestimated else f"{c['mfu']:.1%}"
    return (
        f"{text:28} {c['step_s'] * 1e3:9.2f} {c['min_s'] * 1e3:8.2f} {c['max_s'] * 1e3:8.2f} "
        f"{c['tokens_per_s']:10,.0f} {mfu:>7} {c['ours_over_this']:9.3f} {c['memory_bytes'] / 1e9:10.1f} "
        f"{c['loss']:8.4f}"
    )


def failure_line(text: str, error: str) -> str:
    return f"{text:28} not measured: {error}"


def floors(report: dict) -> list[dict]:
    """Every row of our step with its floor in ms and what sets it; the longest first."""
    rates = report["rates"]
    rows = []
    for name, row in report["kernels"]["rows"].items():
        bytes_ms = row["bytes"] / rates["copy_bytes_per_s"] * 1e3
        flops_ms = row["flops"] / rates["matmul_flops"] * 1e3
        limit = "bytes" if bytes_ms >= flops_ms else "products"
        rows.append({"name": name, "floor_ms": max(bytes_ms, flops_ms), "limit": limit} | row)
    return sorted(rows, key=lambda row: -row["ms"])


def kernel_table(report: dict) -> str:
    """Kernels, groups of them, and phases: milliseconds of the GPU in one step."""
    rates, phases, rows = report["rates"], report["kernels"]["phases_ms"], floors(report)
    step_ms = sum(phases.values())
    lines = [
        "",
        "this project's kernels, in a step of its own with events around each; floors at this GPU's measured "
        f"{rates['copy_bytes_per_s'] / 1e12:.2f} TB/s of a copy and {product_text(rates)}:",
        f"    {'':44} {'launches':>8} {'ms':>8} {'of step':>7} {'floor':>8} {'ms/floor':>8}  floor set by",
    ]
    lines += [f"{_line(row['name'], [row], step_ms)}  {row['limit']}" for row in rows]
    lines.append("")
    lines += [_line(name, group, step_ms) for name, group in groups(rows).items()]
    rest_ms = step_ms - sum(row["ms"] for row in rows)
    lines.append(f"    {'between kernels: copies, fills, waits':53} {rest_ms:8.3f} {rest_ms / step_ms:7.1%}")
    lines += [f"    {f'phase {name}':53} {ms:8.3f} {ms / step_ms:7.1%}" for name, ms in phases.items()]
    lines += ["", "    by a product's epilogue or cuDNN, or by kernels of ours; the faster is taken:"]
    for entry in report["kernels"]["choices"]:
        shape, theirs_ms = " x ".join(map(str, entry["shape"])), entry["theirs_ms"]
        theirs = "not there" if theirs_ms is None else f"{theirs_ms:.3f} ms"
        lines.append(f"    {entry['work']} {shape}: theirs {theirs}, ours {entry['ours_ms']:.3f} ms")
    return "\n".join([*lines, ""])


def product_text(rates: dict) -> str:
    """Describe a product's rate, lasting and in a burst."""
    lasting, burst = rates["matmul_flops"] / 1e12, rates["matmul_burst_flops"] / 1e12
    return f"{lasting:.0f} TFLOP/s of a product that goes on ({burst:.0f} in a burst)"


def groups(rows: list[dict]) -> dict[str, list[dict]]:
    products = [row for row in rows if row["name"].startswith("product")]
    attention = [row for row in rows if row["flops"] and row not in products]
    others = [row for row in rows if not row["flops"]]
    return {"all matrix products": products, "all attention": attention, "all other kernels": others}


def _line(name: str, rows: list[dict], step_ms: float) -> str:
    """A kernel, or some together."""
    launches, ms, floor_ms = (sum(row[key] for row in rows) for key in ("launches", "ms", "floor_ms"))
    return f"    {name:44} {launches:8} {ms:8.3f} {ms / step_ms:7.1%} {floor_ms:8.3f} {ms / max(floor_ms, 1e-9):8.2f}"


def notes(report: dict) -> str:
    """What the columns mean."""
    peak = report["peak_tflops"]
    mfu = f"MFU of {peak:g} TFLOP/s" if peak else "MFU: this GPU's datasheet is not known here, give --peak-tflops"
    return "\n".join((
        "",
        f"{mfu}; {report['flops_per_token'] / 1e6:.1f} MFLOP a token, llm.c's count (6 N + 6 L C T).",
        "Memory: what the allocator took from the GPU; of llm.c all that the GPU has given.",
        "Loss: in the last of the same first steps on the same batch; llm.c has parameters and a batch of its own.",
        "PyTorch: float32 parameters, autocast, fused AdamW, scaled_dot_product_attention, vocabulary padded to a "
        "multiple of 128.",
        f"All of it took {report['seconds']:.0f} s.",
    ))  # fmt: skip
