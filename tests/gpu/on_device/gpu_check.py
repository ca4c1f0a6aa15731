"""First contact with a GPU: what is installed, whether everything compiles, what its parts reach. Some minutes.

    python -m tests.gpu.on_device.gpu_check --json gpu.json
    python -m tests.gpu.on_device.gpu_check --items environment,compile

Products and attention are compared with NumPy before they are timed. Each item is a process of its own with a time
limit: one that fails, hangs or spoils its GPU is reported, and the rest goes on. Every kernel's and the whole model's
numbers are `make test-gpu`, which also runs the items that compare; a whole step's speed is
`bench_step.py --backend cupy`.
"""

import argparse
import json
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from gpt2.config import PRESETS, GPT2Config
from gpt2.errors import UserError

ROOT = Path(__file__).parents[3]
RESULT = "gpu_check result: "  # begins the line on which an item's process hands over what it found


@dataclass(frozen=True)
class Sizes:
    """How large the items' problems are: the defaults are for a GPU, tests use smaller ones."""

    model: GPT2Config = PRESETS["gpt2-124M"]
    batch_size: int = 16
    sequence_length: int = 1024
    copy_bytes: int = 256 << 20


# Item and its time limit in seconds: together some minutes where nothing hangs.
ITEMS = {
    "environment": 90,  # a cold machine reads CuPy and cuBLASLt from its disk
    "compile": 90,
    "products": 120,  # a cold machine reads 540 MB of cuBLASLt
    "attention": 45,
    "cudnn": 60,
    "copies": 30,
    "launches": 30,
}


def main():
    settings = parse()
    if settings.run_item:
        return run_item(settings.run_item, Sizes())
    start, report = time.perf_counter(), {}
    for item in settings.items:
        report[item] = run_process(item)
        print("\n".join(text_of(item, report[item])), flush=True)
    failed = [item for item, result in report.items() if not result["passed"]]
    seconds = time.perf_counter() - start
    print(f"\n{len(report) - len(failed)} of {len(report)} items passed in {seconds:.0f} s")
    if failed:
        print(f"failed: {', '.join(failed)}")
    if settings.json:
        settings.json.write_text(json.dumps(report, indent=1) + "\n")
    raise SystemExit(1 if failed else 0)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=known_items, default=list(ITEMS), help=f"some of {','.join(ITEMS)} (all)")
    parser.add_argument("--json", type=Path, help="write everything found to this file")
    parser.add_argument("--run-item", choices=ITEMS, help=argparse.SUPPRESS)  # what each item's process is given
    return parser.parse_args()


def known_items(text: str) -> list[str]:
    items = text.split(",")
    unknown = sorted(set(items) - set(ITEMS))
    if unknown:
        raise argparse.ArgumentTypeError(f"{','.join(unknown)}: expected some of {','.join(ITEMS)}")
    return items


def run_process(item: str) -> dict:
    """The item's result from a process of its own; a failure, also of the process, is a result."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "tests.gpu.on_device.gpu_check", "--run-item", item]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=ITEMS[item], cwd=ROOT)
        lines = [line for line in process.stdout.splitlines() if line.startswith(RESULT)]
        error = f"exit code {process.returncode}: {process.stderr[-2000:]}"
        result = json.loads(lines[-1].removeprefix(RESULT)) if lines else failure(error)
    except subprocess.TimeoutExpired:
        result = failure(f"not done after {ITEMS[item]} s")
    return result | {"seconds": round(time.perf_counter() - start, 1)}


def run_item(item: str, sizes: Sizes) -> dict:
    """Run one item here, print its result for run_process, and return it."""
    from tests.gpu.on_device import gpu_checks, gpu_products

    functions = gpu_checks.ITEMS | gpu_products.ITEMS
    try:
        result = {"passed": True} | functions[item](sizes)
    except UserError as error:
        result = failure(str(error))
    except Exception as error:  # whatever it is: the other items go on
        first_line = (str(error).strip() or repr(error)).splitlines()[0]
        result = failure(f"{type(error).__name__}: {first_line}") | {"traceback": traceback.format_exc()}
    print(RESULT + json.dumps(result))
    return result


def failure(error: str) -> dict:
    return {"passed": False, "error": error, "lines": []}


def text_of(item: str, result: dict) -> list[str]:
    """The item's part of the report."""
    verdict = "passed" if result["passed"] else "FAILED"
    lines = [f"\n== {item}: {verdict} ({result['seconds']} s)", *(f"  {line}" for line in result["lines"])]
    if result.get("error"):
        lines.append(f"  {result['error']}")
    return lines


if __name__ == "__main__":
    main()
