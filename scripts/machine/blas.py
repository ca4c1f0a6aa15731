"""Find out which BLAS library multiplies NumPy's matrices, and with which kernels.

OpenBLAS has kernels for each generation of CPUs and picks a set when NumPy is imported. The environment variable
OPENBLAS_CORETYPE forces another set, and a CPU that is newer than OpenBLAS gets kernels for an older CPU. Nothing fails
then, but matrix products are slow.
Source: driver/others/dynamic.c of OpenBLAS 0.3.31.
"""

from scripts.machine.host import cpu_info, processor

FORCED = "OPENBLAS_CORETYPE"
VARIABLES = FORCED, "OPENBLAS_L2_SIZE", "MKL_ENABLE_INSTRUCTIONS", "BLIS_ARCH_TYPE"  # read at import to choose kernels
LIBRARIES = {"openblas": "OpenBLAS", "mkl": "MKL", "blis": "BLIS", "flexiblas": "FlexiBLAS"}
# Instruction sets, widest first, and their flags in /proc/cpuinfo.
INSTRUCTIONS = {"AVX-512": {"avx512f", "avx512bw", "avx512vl"}, "AVX2": {"avx2", "fma"}, "AVX": {"avx"}}
# OpenBLAS's x86 kernels by the widest set that they use. Once loaded, the oldest ones are called Katmai.
KERNELS = {
    "AVX-512": {"SkylakeX", "Cooperlake", "SapphireRapids"},
    "AVX2": {"Haswell", "Zen"},
    "AVX": {"Sandybridge", "Bulldozer", "Piledriver", "Steamroller", "Excavator"},
    "SSE": {"Katmai", "Prescott", "Core2", "Penryn", "Dunnington", "Nehalem", "Atom", "Barcelona", "Bobcat"},
}


def cpu_instructions(path: str = "/proc/cpuinfo") -> list[str]:
    """Return the names of INSTRUCTIONS that Linux reports for this CPU, widest first; empty if it reports none."""
    words = cpu_info("flags", path).split()
    return [name for name, needed in INSTRUCTIONS.items() if needed.issubset(words)]


def loaded_blas() -> dict:
    """Return {"library", "version", "kernels"} of NumPy's BLAS in this process; unknown values are None."""
    import numpy  # noqa: F401 - loads its BLAS
    from threadpoolctl import threadpool_info

    found = [library for library in threadpool_info() if library["user_api"] == "blas"]
    # SciPy or PyTorch may have loaded libraries of their own.
    numpy_blas = next((library for library in found if "numpy" in library["filepath"]), (found or [{}])[0])
    names = {"library": "internal_api", "version": "version", "kernels": "architecture"}
    return {name: numpy_blas.get(key) for name, key in names.items()}


def blas_facts(environment) -> dict:
    """Return the facts about a rank's BLAS and CPU for config.json."""
    variables = {name: environment[name] for name in VARIABLES if name in environment}
    return loaded_blas() | {"variables": variables, "processor": processor(), "instructions": cpu_instructions()}


def unused_instructions(facts: dict) -> str | None:
    """Return the CPU's widest instruction set if the kernels in use are known to be narrower, else None."""
    used = next((name for name, kernels in KERNELS.items() if facts["kernels"] in kernels), None)
    widest = next(iter(facts["instructions"]), None)
    return widest if used and widest and used != widest else None


def blas_text(facts: dict) -> str:
    """Describe a BLAS, like "OpenBLAS 0.3.31, Nehalem kernels (forced by OPENBLAS_CORETYPE), this CPU has AVX2"."""
    library = LIBRARIES.get(facts["library"], facts["library"] or "BLAS unknown")
    text = " ".join(filter(None, (library, facts["version"])))
    if facts["kernels"]:
        text += f", {facts['kernels']} kernels"
        if FORCED in facts["variables"]:
            text += f" (forced by {FORCED})"
    if unused := unused_instructions(facts):
        text += f", this CPU has {unused}"
    return text
