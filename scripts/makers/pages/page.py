"""What the parts of make_docs.py share: runs to measure, where they were made, and the marks of the pages."""

import json
import subprocess
import sys
from pathlib import Path

from scripts.compare import strategy_flags

SCRIPTS = Path(__file__).parents[2]
ROOT = SCRIPTS.parent
SUITES = ROOT / "tests" / "suites"
FIGURES = ROOT / "docs" / "figures"


def compare(folder: Path, ranks: int, strategies: str, training: list[str] | None = None) -> str:
    """Run scripts/compare.py into `folder`; returns what it printed."""
    command = [sys.executable, str(SCRIPTS / "compare.py"), "--ranks", str(ranks), "--strategies", strategies]
    command += ["--out", str(folder), *(["--", *training] if training else [])]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    print(result.stdout)
    return result.stdout


def train_on(hosts: str, strategy: str, training: str, out: Path, environment: tuple[str, ...] = ()) -> Path:
    """Train on virtual hosts, into `out`, which is returned. environment: "NAME=TEXT" for this run's ranks."""
    train = [sys.executable, str(SCRIPTS / "train.py"), *strategy_flags(strategy), *training.split()]
    command = [*(["env", *environment] if environment else []), *train, "--out", str(out)]
    subprocess.run(on_hosts(hosts, command), check=True, cwd=ROOT)
    return out


def on_hosts(hosts: str, command: list[str]) -> list[str]:
    """The command line that runs `command` on virtual hosts."""
    return [sys.executable, str(SCRIPTS / "virtual_cluster.py"), "run", *hosts.split(), "--", *command]


def log_of(run: Path) -> list[dict]:
    """The run's steps, one dict each."""
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def comparison_table(output: str) -> str:
    """Of what plot.py or compare.py printed."""
    return output[output.index("median ms") :].split("\n\n")[0]


def machine(source: Path) -> str:
    """Where the numbers come from, in one line: of a run folder, or of what a bench wrote."""
    config = json.loads((source / "config.json" if source.is_dir() else source).read_text())
    named = ", ".join(f"{name} {version}" for name, version in config["versions"].items() if name != "gpt2-mpi")
    return (
        f"Measured on {config['machine']['processor']}, {config['machine']['cores']} cores, with "
        f"{config['mpi_library']}, {named}."
    )


def replace_block(page: str, name: str, text: str) -> None:
    """Put `text` between the page's two marks of this name."""
    path = ROOT / page
    begin, end = f"<!-- begin generated: {name} -->", f"<!-- end generated: {name} -->"
    before, rest = path.read_text().split(begin)
    path.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")
