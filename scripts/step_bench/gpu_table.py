"""Tables of bench_step.py --backend cupy: a line per contender; the times and floors of our kernels."""

from traces.units import mfu_text


def mfu_cell(entry: dict) -> str:
    if entry["mfu"] is None:
        return ""
    return mfu_text(entry["mfu"], True) if entry.get("peak_underestimated") else f"{entry['mfu']:.1%}"


HEAD = f"{'':28}  step, ms      min      max   tokens/s     MFU ours / it memory, GB     loss"


def row(label: str, c: dict) -> str:
    """Return the line of a contender below HEAD."""
    times = f"{c['step_s'] * 1e3:9.2f} {c['min_s'] * 1e3:8.2f} {c['max_s'] * 1e3:8.2f} {c['tokens_per_s']:10,.0f}"
    memory = f"{c['memory_bytes'] / 1e9:10.1f}"
    return f"{label:28} {times} {mfu_cell(c):>7} {c['ours_over_this']:9.3f} {memory} {c['loss']:8.4f}"


def header(report: dict) -> str:
    s = report["settings"]
    shape = f"{s['model']}, B={s['batch_size']} T={s['seq_len']}, {s['dtype']}, {report['machine']['GPU']}"
    return f"{shape}; {s['turns']} turns of {s['steps_a_turn']} steps\n\n{HEAD}"


def failure_line(label: str, error: str) -> str:
    return f"{label:28} not measured: {error}"


def floors(report: dict) -> list[dict]:
    """Return our step's rows, longest first, each with its floor in ms and the limit that sets the floor."""
    rates = report["rates"]
    rows = []
    for name, row in report["kernels"]["rows"].items():
        bytes_ms = row["bytes"] / rates["copy_bytes_per_s"] * 1e3
        flops_ms = row["flops"] / rates["matmul_flops"] * 1e3
        limit = "bytes" if bytes_ms >= flops_ms else "products"
        rows.append({"name": name, "floor_ms": max(bytes_ms, flops_ms), "limit": limit} | row)
    return sorted(rows, key=lambda row: -row["ms"])


def kernel_table(report: dict) -> str:
    """Return the milliseconds of kernels, groups of kernels and phases in one step."""
    rates = report["rates"]
    phases = report["kernels"]["phases_ms"]
    rows = floors(report)
    step_ms = sum(phases.values())
    copy, product, burst = (rates[key] / 1e12 for key in ("copy_bytes_per_s", "matmul_flops", "matmul_burst_flops"))
    lines = [
        "",
        "this project's kernels, in a step of its own with events around each; floors at this GPU's measured "
        f"{copy:.2f} TB/s of a copy and {product:.0f} TFLOP/s of a product that goes on ({burst:.0f} in a burst):",
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
        shape = " x ".join(map(str, entry["shape"]))
        theirs_ms = entry["theirs_ms"]
        theirs = "not there" if theirs_ms is None else f"{theirs_ms:.3f} ms"
        lines.append(f"    {entry['work']} {shape}: theirs {theirs}, ours {entry['ours_ms']:.3f} ms")
    return "\n".join([*lines, ""])


def groups(rows: list[dict]) -> dict[str, list[dict]]:
    """Group the rows into products, attention and the others."""
    products = [row for row in rows if row["name"].startswith("product")]
    attention = [row for row in rows if row["flops"] and row not in products]
    others = [row for row in rows if not row["flops"]]
    return {"all matrix products": products, "all attention": attention, "all other kernels": others}


def _line(name: str, rows: list[dict], step_ms: float) -> str:
    """Return the table's line for a kernel or a group of kernels."""
    launches, ms, floor_ms = (sum(row[key] for row in rows) for key in ("launches", "ms", "floor_ms"))
    return f"    {name:44} {launches:8} {ms:8.3f} {ms / step_ms:7.1%} {floor_ms:8.3f} {ms / max(floor_ms, 1e-9):8.2f}"


def notes(report: dict) -> str:
    """Explain the columns."""
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
