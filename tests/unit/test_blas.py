"""scripts/machine/blas.py: which kernels multiply, what the CPU has, and the line that says both."""

import os
import subprocess
import sys

import pytest

from scripts.machine.blas import blas_facts, blas_text, cpu_instructions, unused_instructions

ZEN3 = "flags\t: fpu avx avx2 fma sse4_2\n"
SKYLAKE = "flags\t: fpu avx avx2 fma avx512f avx512bw avx512vl avx512dq\n"


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        (ZEN3, ["AVX2", "AVX"]),
        (SKYLAKE, ["AVX-512", "AVX2", "AVX"]),
        ("flags\t: fpu avx avx2\n", ["AVX"]),
        ("Features\t: fp asimd sve\n", []),
    ],
)
def test_what_the_cpu_has(tmp_path, cpuinfo, expected):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\n" + cpuinfo + cpuinfo)
    assert cpu_instructions(path) == expected
    assert cpu_instructions(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("kernels", "instructions", "unused"),
    [
        ("Nehalem", ["AVX2", "AVX"], "AVX2"),
        ("Zen", ["AVX-512", "AVX2", "AVX"], "AVX-512"),
        ("SkylakeX", ["AVX-512", "AVX2", "AVX"], None),
        ("Haswell", ["AVX2", "AVX"], None),
        ("Zen9", ["AVX-512", "AVX2", "AVX"], None),  # unknown kernels are not accused
        ("NeoverseV1", [], None),
        (None, ["AVX2", "AVX"], None),
    ],
)
def test_kernels_narrower_than_the_cpu(kernels, instructions, unused):
    facts = {"library": "openblas", "version": "0.3.31", "kernels": kernels, "variables": {}}
    facts |= {"instructions": instructions}
    assert unused_instructions(facts) == unused
    assert blas_text(facts).endswith(f", this CPU has {unused}") == bool(unused)


def test_kernels_forced_by_the_environment():
    """In a process of its own, as OpenBLAS looks at the variable when NumPy is imported."""
    program = "import os; from scripts.machine.blas import *; print(blas_text(blas_facts(os.environ)))"
    environment = os.environ | {"OPENBLAS_CORETYPE": "Nehalem"}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert result.stdout.startswith("OpenBLAS 0."), result.stderr
    assert ", Nehalem kernels (forced by OPENBLAS_CORETYPE)" in result.stdout
    assert blas_facts({"OPENBLAS_L2_SIZE": "1", "HOME": "/"})["variables"] == {"OPENBLAS_L2_SIZE": "1"}
