"""scripts/machine/blas*.py, kept.py: which kernels multiply, which may be chosen, and that one process tries them."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from gpt2.errors import UserError
from gpt2.files import alone
from scripts.machine import blas, blas_choice, blas_trial, kept
from scripts.machine.blas import ARM, INSTRUCTIONS, TRIED, X86, blas_text, check_name, cpu_words, remark, runnable
from scripts.machine.blas_choice import asked_for, best_of, check, environment_of, is_runnable
from scripts.settings.checks import complete
from scripts.settings.training import parse_settings
from scripts.training.report import unlike_blas

pytestmark = pytest.mark.any_mpi
ROOT = Path(__file__).parents[2]
ZEN_3 = {"pni", "ssse3", "sse4_1", "sse4_2", "sse4a", "avx", "avx2", "fma"}
SKYLAKE = ZEN_3 - {"sse4a"} | {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}
ZEN_4 = SKYLAKE | {"sse4a", "avx512_bf16"}
SAPPHIRE_RAPIDS = SKYLAKE | {"avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"}
FACTS = {
    "library": "openblas", "version": "0.3.31", "kernels": "Haswell", "asked": "as-set", "variables": {},
    "processor": "EPYC", "instructions": ["AVX2"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _folders(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(blas.platform, "machine", lambda: "x86_64")


# What a CPU can run


def test_what_is_tried_is_known_and_needs_what_is_known():
    assert set(TRIED) <= X86.keys() | ARM.keys()
    assert {one for needed in (X86 | ARM).values() for one in needed.split()} <= INSTRUCTIONS.keys()


@pytest.mark.parametrize(
    ("words", "can", "cannot"),
    [
        (set(), [], ["Prescott", "Haswell"]),
        (ZEN_3 - {"fma"}, ["Sandybridge"], ["Haswell"]),
        (ZEN_3, ["Nehalem", "Sandybridge", "Haswell", "Zen"], ["SkylakeX", "Bulldozer"]),
        (SKYLAKE - {"avx512dq"}, ["Haswell"], ["SkylakeX"]),
        (SKYLAKE, ["SkylakeX"], ["Cooperlake"]),
        (ZEN_4, ["SkylakeX", "Cooperlake"], ["SapphireRapids"]),
        (SAPPHIRE_RAPIDS, ["SkylakeX", "Cooperlake", "SapphireRapids"], ["Piledriver"]),
    ],
)
def test_no_kernels_whose_instructions_are_not_there(words, can, cannot, monkeypatch):
    assert set(can) <= set(runnable(words))
    assert not set(cannot) & set(runnable(words))
    monkeypatch.setattr(blas_choice, "cpu_words", lambda: words)
    tried = set(blas_choice.environments())
    assert tried == {blas_choice.OWN} | (set(TRIED) & set(runnable(words)))
    assert all(is_runnable({"name": name}) for name in [None, *can])
    assert not any(is_runnable({"name": name}) for name in cannot)


def test_the_words_of_a_cpu(tmp_path):
    (tmp_path / "x86").write_text("processor\t: 0\nmodel name\t: EPYC\nflags\t\t: fpu avx2\n\nflags\t\t: other\n")
    (tmp_path / "arm").write_text("processor\t: 0\nFeatures\t: fp asimd sve\n")
    assert cpu_words(str(tmp_path / "x86")) == {"fpu", "avx2"}
    assert cpu_words(str(tmp_path / "arm")) == {"fp", "asimd", "sve"}
    assert cpu_words(str(tmp_path / "none")) == set()


def test_names_that_cannot_be_had(monkeypatch):
    monkeypatch.setattr(blas, "cpu_words", lambda: ZEN_3)
    monkeypatch.setattr(blas, "processor", lambda: "EPYC 7763")
    assert check_name("haswell") == "Haswell"
    with pytest.raises(UserError) as refused:
        check_name("Fastest")
    assert str(refused.value).startswith("--blas-kernels Fastest: OpenBLAS has no kernels of that name, expected as-")
    assert all(name in str(refused.value) for name in X86)
    with pytest.raises(
        UserError, match=r"--blas-kernels SapphireRapids: this CPU \(EPYC 7763\) lacks AVX-512 and AVX512"
    ):
        check_name("sapphirerapids")


# What is said of it


@pytest.mark.parametrize(
    ("changed", "text", "is_remarked"),
    [
        ({}, "OpenBLAS 0.3.31, Haswell kernels", False),
        ({"kernels": "Nehalem", "variables": {"OPENBLAS_CORETYPE": "x"}},
         "OpenBLAS 0.3.31, Nehalem kernels (forced by OPENBLAS_CORETYPE), this CPU has AVX2", True),
        ({"variables": {"OPENBLAS_CORETYPE": "Haswell", "OPENBLAS_L2_SIZE": "512"}},
         "OpenBLAS 0.3.31, Haswell kernels (forced by OPENBLAS_CORETYPE), OPENBLAS_L2_SIZE=512", False),
        ({"kernels": "Zen", "instructions": ["AVX2", "AVX-512", "AVX512_BF16"]},
         "OpenBLAS 0.3.31, Zen kernels, this CPU has AVX-512", True),
        ({"kernels": "Cooperlake", "instructions": ["AVX2", "AVX-512", "AVX512_BF16"]},
         "OpenBLAS 0.3.31, Cooperlake kernels", False),
        ({"asked": "best", "variables": {"OPENBLAS_CORETYPE": "Haswell"}},
         "OpenBLAS 0.3.31, Haswell kernels (--blas-kernels best)", True),
        ({"asked": "best", "library": "mkl", "kernels": None, "version": "2024.1"},
         "MKL 2024.1: --blas-kernels best has nothing to choose, as this is not OpenBLAS", True),
        ({"library": None, "kernels": None, "version": None}, "BLAS unknown", False),
    ],
)  # fmt: skip
def test_what_is_said_of_the_kernels(changed, text, is_remarked):
    assert blas_text(FACTS | changed) == text
    assert remark(FACTS | changed) == (f"BLAS: {text}" if is_remarked else None)


def test_unlike_ranks_are_named():
    places = [{"rank": rank, "node": rank // 2, "host": f"node{rank // 2}"} for rank in range(4)]
    other = FACTS | {"kernels": "SkylakeX", "processor": "Xeon", "instructions": ["AVX2", "AVX-512"], "ranks": [2, 3]}
    assert unlike_blas([FACTS | {"ranks": [0, 1]}, other], places) == (
        "the ranks multiply by unlike kernels, with other last bits and at other speeds: OpenBLAS 0.3.31, Haswell "
        "kernels on EPYC (AVX2): ranks 0-1 on node0; OpenBLAS 0.3.31, SkylakeX kernels on Xeon (AVX2, AVX-512): "
        "ranks 2-3 on node1"
    )


# The choice


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("--steps 3", "as-set"),
        ("--blas-kernels best --steps 3", "best"),
        ("--steps 3 --blas-kernels=Zen", "Zen"),
        ("--blas-kernels Zen --blas-kernels best", "best"),
        ("--blas-kernels", "as-set"),
    ],
)
def test_the_flag_is_found_before_the_others_are_read(words, asked):
    assert asked_for(words.split()) == asked


def outcome(program: str, *arguments: str, **environment) -> str:
    """What a new process prints, in which no BLAS has been loaded."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    environment = clean | {"PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return result.stdout.strip() or result.stderr.strip().splitlines()[-1]


CHOOSE = """
import sys
import tempfile
from scripts.machine import blas_choice
blas_choice.choose(sys.argv[1:])
assert "numpy" not in sys.modules
blas_choice.check(blas_choice.asked_for(sys.argv[1:]))
from scripts.machine.blas import loaded_blas
print(loaded_blas()["kernels"])
"""
needs_openblas = pytest.mark.skipif(
    blas.loaded_blas()["library"] != "openblas" or "Nehalem" not in runnable(cpu_words()), reason="another BLAS, or CPU"
)


@needs_openblas
def test_the_kernels_of_a_name_multiply():
    assert outcome(CHOOSE, "--blas-kernels", "nehalem") == "Nehalem"
    assert outcome(CHOOSE, OPENBLAS_CORETYPE="Nehalem") == "Nehalem", "as it is set, unless another is asked for"
    assert "OpenBLAS has no kernels of that name" in outcome(CHOOSE, "--blas-kernels", "Fast")


PROGRAM = """
import runpy, sys
try:
    runpy.run_path(sys.argv[1], run_name="__main__")
except SystemExit:
    pass
from scripts.machine.blas import loaded_blas
print("\\n" + loaded_blas()["kernels"])
"""


@needs_openblas
@pytest.mark.parametrize("name", ["train", "evaluate", "sample", "bench_step"])
def test_each_program_chooses_before_numpy_is_there(name):
    program = str(ROOT / "scripts" / f"{name}.py")
    assert outcome(PROGRAM, program, "--blas-kernels", "nehalem", "--help").splitlines()[-1] == "Nehalem"


@needs_openblas
def test_the_best_kernels_win_over_a_variable():
    """Which of those with wider vectors it is, other work beside the trial may decide."""
    found = outcome(CHOOSE, "--blas-kernels", "best", OPENBLAS_CORETYPE="Nehalem")
    assert found in {outcome(CHOOSE), *runnable(cpu_words())} - {"Nehalem"}


@needs_openblas
def test_what_comes_too_late_is_refused():
    late = f"import numpy, sys{CHOOSE}".replace('assert "numpy" not', 'assert "numpy"')
    refusal = "gpt2.errors.UserError: --blas-kernels {}: NumPy is loaded already, with Nehalem kernels: set OPENBLAS_C"
    for asked in ("best", "Prescott"):
        last = outcome(late, "--blas-kernels", asked, OPENBLAS_CORETYPE="Nehalem")
        assert last.startswith(refusal.format(asked))
    assert outcome(late, "--blas-kernels", "Nehalem", OPENBLAS_CORETYPE="Nehalem") == "Nehalem"


def test_a_training_refuses_it():
    with pytest.raises(UserError, match="--blas-kernels Fast: OpenBLAS has no kernels of that name"):
        complete(parse_settings("", ["--blas-kernels", "Fast"]), 1)
    assert complete(parse_settings("", []), 1)[0].blas_kernels == "as-set"


def test_another_blas_has_nothing_to_choose(monkeypatch):
    mkl = {"library": "mkl", "version": "2024.1", "kernels": None}
    monkeypatch.setattr(blas_choice, "loaded_blas", lambda: mkl)
    check("best")
    assert blas_choice.against_best(mkl) is None


def test_an_answer_of_another_openblas_is_forgotten(monkeypatch):
    facts = {"processor": "EPYC"}
    monkeypatch.setattr(blas_choice, "trial_facts", lambda: facts)
    monkeypatch.setattr(blas_choice, "_chosen", "best")
    monkeypatch.setattr(blas_choice, "loaded_blas", lambda: {"library": "openblas", "version": "2", "kernels": "Zen"})
    path = kept.place_of(blas_choice.KEPT, facts)
    for version, stays in (("2", True), ("1", False)):
        kept.write(path, facts, {"name": None, "version": version})
        check("best")
        assert path.exists() is stays


# The trial


@needs_openblas
def test_each_process_has_its_own_kernels_and_one_that_dies_is_left_out():
    old = environment_of("Nehalem")
    dies = environment_of(None) | {"PYTHONHOME": "/nowhere"}
    found = blas_trial.try_all({"old": old, "dies": dies, "twice": dict(old), "older": environment_of("Prescott")}, 1)
    assert {name: one["kernels"] for name, one in found.items()} == {"old": "Nehalem", "older": "Katmai"}
    assert all(one["library"] == "openblas" and one["flops"] > 1e8 for one in found.values())
    blocks = old | {"OPENBLAS_L2_SIZE": "64"}
    assert set(blas_trial.try_all({"old": old, "blocks": blocks}, 1)) == {"old", "blocks"}, "with other blocks"


def test_wrong_products_are_seen():
    class Wrong(np.ndarray):
        def __matmul__(self, other):
            product = np.asarray(self) @ np.asarray(other)
            product[-1, -1] += 0.1
            return product

    for shape in (blas_trial.ODD, (40, 300, 200)):
        for left, other in blas_trial.products(np.random.default_rng(2), *shape):
            assert blas_trial.is_right(left, other)
            assert not blas_trial.is_right(left.view(Wrong), other)


def tried(**rates):
    return {
        name: {"library": "openblas", "kernels": name.title(), "version": "1", "flops": flops}
        for name, flops in rates.items()
    }


@pytest.mark.parametrize(
    ("rates", "name", "kernels"),
    [
        ({"own": 50.0, "zen": 51.0}, None, "Own"),
        ({"own": 50.0, "zen": 60.0, "old": 10.0}, "zen", "Zen"),
        ({"zen": 1.0}, "zen", "Zen"),
        ({}, None, None),
    ],
)
def test_the_fastest_by_far_is_the_best(rates, name, kernels):
    """What is faster by little may be so by chance: then OpenBLAS's own choice, which all ranks have."""
    best = best_of(tried(**rates))
    assert (best["name"], best["kernels"]) == (name, kernels)


@pytest.mark.parametrize(("second", "name"), [(51.0, None), (60.0, "zen")])
def test_what_is_kept_has_won_twice(monkeypatch, second, name):
    trials = [tried(own=50.0, zen=60.0, old=10.0), tried(own=50.0, zen=second)]
    asked = []

    def try_all(environments, rounds=3):
        asked.append(set(environments))
        return trials[len(asked) - 1]

    monkeypatch.setattr(blas_choice, "try_all", try_all)
    monkeypatch.setattr(blas_choice, "environments", lambda: {"own": {}, "zen": {}, "old": {}})
    found = blas_choice.find_best()
    assert asked == [{"own", "zen", "old"}, {"own", "zen"}]
    assert found["name"] == name
    assert {kind: one["flops"] for kind, one in found["tried"].items()} == {"own": 50.0, "zen": second, "old": 10.0}


def test_a_loss_is_measured_beside_the_best(monkeypatch):
    rates = tried(own=50.0, zen=60.0) | {"as-set": {"library": "openblas", "kernels": "Nehalem", "flops": 20.0}}
    monkeypatch.setattr(blas_choice, "try_all", lambda environments, rounds: dict(rates))
    found = blas_choice.against_best({"library": "openblas", "kernels": "Nehalem"})
    assert (found["as_set"], found["flops"], found["name"]) == (20.0, 60.0, "zen")
    del rates["as-set"]  # it has the kernels of one before it
    assert blas_choice.against_best({"library": "openblas", "kernels": "Own"})["as_set"] == 50.0


# Kept answers


def test_of_processes_that_ask_at_once_one_finds_the_answer(tmp_path):
    program = """
import sys, time
from pathlib import Path
from scripts.machine import kept
def find():
    with open(sys.argv[1], "a") as file:
        file.write("x")
    time.sleep(0.3)
    return {"found": 1}
print(kept.once("answer", {"cpu": "a"}, find, lambda answer: True))
"""
    command = [sys.executable, "-c", program, str(tmp_path / "found")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    children = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert {child.communicate(timeout=30)[0] for child in children} == {"{'found': 1}\n"}
    assert (tmp_path / "found").read_text() == "x"


def test_an_answer_is_to_its_own_facts_and_usable(tmp_path):
    found = iter(range(9))

    def ask(cpu="a", is_usable=lambda answer: True):
        return kept.once("answer", {"cpu": cpu}, lambda: {"found": next(found)}, is_usable)["found"]

    assert [ask(), ask(), ask("b"), ask(), ask("b")] == [0, 0, 1, 0, 1]
    assert ask(is_usable=lambda answer: answer["found"] > 0) == 2
    path = kept.place_of("answer", {"cpu": "a"})
    assert path.parent == tmp_path / "cache" / "gpt2-mpi"
    for spoilt in ("", "[]", '{"facts": 1}', json.dumps({"facts": {"cpu": "b"}, "answer": {"found": 7}})):
        path.write_text(spoilt)
        assert ask() > 2


def test_without_a_cache_folder_the_temporary_one_and_else_none(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    assert kept.place_of("answer", {}).parent == tmp_path / f"gpt2-mpi-{os.getuid()}"
    monkeypatch.setattr(os, "getuid", lambda: -7)  # a folder of that name that is another's
    assert kept.place_of("answer", {}) is None
    assert kept.once("answer", {}, lambda: {"found": 3}, lambda answer: True) == {"found": 3}


def test_nobody_waits_for_ever(monkeypatch):
    monkeypatch.setattr(kept, "WAIT_S", 0.1)
    path = kept.place_of("answer", {})
    with alone(path.with_suffix(".lock"), 1.0):
        assert kept.once("answer", {}, lambda: {"found": 4}, lambda answer: True) == {"found": 4}

    def no_locks(*_):
        raise OSError(38, "no locks here")

    path.unlink()
    monkeypatch.setattr("fcntl.flock", no_locks)
    assert kept.once("answer", {}, lambda: {"found": 5}, lambda answer: True) == {"found": 5}
