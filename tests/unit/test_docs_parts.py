"""The parts of make_docs.py, with stand-ins for the programs that they run: which these are, and what comes of them."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.compare import file_name, hosts_folder, seed_folder
from scripts.makers import make_docs
from scripts.makers.pages import less_traffic, outputs, page
from tests.suites import fault_suite
from tests.support.make_run import write_run
from traces.record.phases import STEP

pytestmark = pytest.mark.any_mpi

ORIGIN = {
    "machine": {"processor": "some CPU", "cores": 2, "system": "Linux"},
    "mpi_library": "MPICH 5",
    "versions": {"gpt2-mpi": "0", "numpy": "2"},
}
BLAS = {"library": "openblas", "version": "1", "kernels": "Zen", "variables": {}, "instructions": []}


class Programs:
    """In the place of subprocess.Popen: writes what the program would, and keeps its words."""

    PIPE = -1

    def __init__(self):
        self.commands = []

    def Popen(self, words, **options):
        self.commands.append(" ".join(words))
        name = next(Path(word).stem for word in reversed(words) if word.endswith(".py"))
        self.stdout = [f"{line}\n" for line in getattr(self, name)(words, lambda flag: words[words.index(flag) + 1])]
        self.returncode = 0
        return self

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        pass

    def bench_exchange(self, words, value):
        Path(value("--json")).write_text(json.dumps(ORIGIN | {"sizes": []}))
        if "--figure" in words:
            Path(value("--figure")).touch()
        return ["host", "", "the table"]

    def bench_training(self, words, value):
        steps = {"ours": 2.0, "ours, bfloat16 wire": 1.0, "DDP": 3.0, "DDP, float16 hook": 2.5}
        contenders = {
            name: {"step_s": step_s, "compute_s": 0.5, "exposed_s": step_s - 0.5, "losses": [3.0, 2.5],
                   "times_as_fast": 3.0 / step_s}
            for name, step_s in steps.items()
        }  # fmt: skip
        report = ORIGIN | {
            "contenders": contenders, "ranks": 4, "nodes": 4, "link": {"bytes_per_s": 50e6, "nominal": True},
            "parameters": 30_000_000, "tokens": 1024, "turns": 2, "steps": 3, "least_s": 0.5, "left_out": {},
        }  # fmt: skip
        Path(value("--json")).write_text(json.dumps(report))
        return ["host", "", "the table"]

    def compare(self, words, value):
        """Two validations, after steps 10 and 20; each seed's loss is lower. A step takes longer at a lower rate.
        Without --by-time, a step takes one millisecond for each letter of the name.
        """
        if "--by-time" not in words:
            for name in value("--strategies").split(","):
                spans = [(step, STEP, -1, step * 100, step * 100 + len(name)) for step in range(1, 7)]
                folder = write_run(Path(value("--out")) / file_name(name), [spans], [0])
                (folder / "config.json").write_text(
                    json.dumps(json.loads((folder / "config.json").read_text()) | ORIGIN)
                )
            return []
        rate = int(value("--rate").removesuffix("mbit").replace("gbit", "000"))
        out = hosts_folder(Path(value("--out")), 4, value("--rate"))
        for name in value("--strategies").split(","):
            for seed in map(int, value("--seeds").split(",")):
                folder = seed_folder(out, name, seed)
                folder.mkdir(parents=True)
                rows = [{"step": step, "loss": 3.0, "step_s": 0.1 + len(name) / rate} for step in range(1, 21)]
                rows[9]["val_loss"] = 3.0
                rows[19]["val_loss"] = 2.0 - seed / 10 if "int8" not in name else 2.5
                (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
                (folder / "config.json").write_text(json.dumps(ORIGIN))
        return []

    def fault_suite(self, words, value):
        rows = [{"case": "clean", "says": "nothing", "right": True, "kind": "none", "verdict": "all is well"},
                {"case": "clean", "says": "nothing", "right": False, "kind": "data", "verdict": "late"}]  # fmt: skip
        content = {"made_on": {"hosts": ORIGIN["machine"] | {"numpy": "2"}}, "summary": "1 of 2.", "rows": rows}
        Path(value("--json")).write_text(json.dumps(content))
        return []


@pytest.fixture
def make(monkeypatch, tmp_path):
    """make(part name) -> (the text of its block, the commands that it ran)."""
    programs = Programs()
    monkeypatch.setattr(page, "subprocess", programs)
    monkeypatch.setattr(outputs, "FIGURES", tmp_path)

    def call(name):
        (tmp_path / name).mkdir()
        part = SimpleNamespace(**make_docs.PARTS[name], name=name, only=None)
        return make_docs.function_of(name)(part, tmp_path / name), programs.commands

    return call


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("exchange", "```\nthe table\n```\n\nMeasured on"),
        ("training_steps", "ours, bfloat16 wire    1.000       0.500                0.500                  3.00"),
    ],
)
def test_what_is_measured_stands_in_the_block(make, tmp_path, name, expected):
    text, commands = make(name)
    assert expected in text
    assert text.endswith("Measured on some CPU, 2 cores, with MPICH 5, numpy 2.")
    assert (tmp_path / "exchange.png").exists() == (name == "exchange")
    if name == "training_steps":
        first, second = commands
        assert re.search(r"virtual_cluster\.py run --nodes 4 --ranks 4 --rate 400mbit -- \S+ \S+/bench_training\.py "
                         r"--link 400mbit --turns 2 --steps 1 --out \S+ --json \S+ --contenders ours, no exchange;.*"
                         r"hierarchical/int8;powersgd/low-rank=4;.*PowerSGD hook of rank 4;.* -- --n-layer",
                         first)  # fmt: skip
        assert "--rate 1600mbit" in second


def test_losses_at_full_speed_are_combined_with_steps_on_slow_hosts(make, monkeypatch, tmp_path):
    monkeypatch.setattr(less_traffic, "ROOT", tmp_path)
    monkeypatch.setattr(less_traffic, "FIGURES", tmp_path)
    names = ["hierarchical-sharded", "hierarchical/int8", "powersgd/low-rank=4", "diloco/local-steps=50"]
    monkeypatch.setitem(
        make_docs.PARTS, "less_traffic", make_docs.PARTS["less_traffic"] | {"seeds": [1, 2, 3], "strategies": names}
    )
    text, (losses, *slow) = make("less_traffic")
    assert "--seeds 1,2,3 --ranks 4 --nodes 4 --rate 10gbit --out" in losses
    assert [re.search(r"--rate (\S+)", command)[1] for command in slow] == ["20mbit", "100mbit", "400mbit"]
    assert all("--seeds 1 --ranks 4" in command and command.endswith("--steps 60 --eval-steps 1") for command in slow)
    # At loss 2.0 after 10 steps and 1/1.1, 1/1.2, 1/1.3 of the next 10; a step takes 0.1 s + 21 letters / 20.
    assert (
        "| `diloco/local-steps=50` | 18 (18 to 19) | 1.800 (1.700 to 1.900) | 1150 ms, 21 s | 310 ms, 5.68 s |" in text
    )
    assert "| `hierarchical/int8` | - | 2.500 (2.500 to 2.500) | 950 ms, not reached |" in text
    assert text.startswith("![First to loss 2: hierarchical-sharded and powersgd/low-rank=4 at 20 Mbit/s; ")
    assert (tmp_path / "less-traffic.png").exists()


def test_the_original_case_is_a_table_from_slow_to_fast(make):
    text, (command,) = make("original_case")
    assert "--nodes 5 --ranks 9 --rate 620mbit" in command
    assert "--strategies reduce-bcast/dedicated,reduce-bcast," in command
    rows = text.splitlines()
    assert rows[6] == "| `diloco/local-steps=20/fragments=20/bfloat16/steps=42` | 52.0 ms | 0.4 |"
    assert "| `reduce-bcast/dedicated` | 22.0 ms | 1.0 |" in rows
    assert rows[-3] == "| `none` | 4.00 ms | 5.5 |", rows
    assert text.endswith("with MPICH 5, numpy 2.")


def test_a_runs_blas_is_named():
    facts = ORIGIN | {"blas": [BLAS]}
    assert page.measured_on(facts, torch="1").endswith("with MPICH 5, OpenBLAS 1, Zen kernels, numpy 2, torch 1.")


def test_faults_are_counted_by_case(make):
    text, commands = make("faults")
    assert "| nothing | 1 of 2 | `none`: all is well |\n\n1 of 2. `sudo python" in text
    assert text.endswith("Measured on some CPU, 2 cores, numpy 2.")
    assert "fault_suite.py --out" in commands[0]
    make("model_faults")
    asked = [name for command in commands for name in command.split("--cases ")[1].split(",")]
    assert sorted(asked) == sorted(fault_suite.CASES), "each case has its line in one of the two tables"


def test_a_command_that_fails_ends_the_part():
    with pytest.raises(page.subprocess.CalledProcessError):
        page.output_of("sh", "-c", "exit 3")
    assert page.output_of("sh", "-c", "echo said") == "said\n"
