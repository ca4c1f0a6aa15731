"""Which BLAS multiplies NumPy's matrices here, with which kernels, and what the CPU has instructions for.

OpenBLAS has kernels for each generation of CPUs, by the names below. It takes those of the CPU that it sees; one that
is newer than this OpenBLAS is taken for an older one. The variable OPENBLAS_CORETYPE forces others, and
OPENBLAS_L2_SIZE other block sizes. OpenBLAS does not look whether the CPU has the instructions, and a name that it does
not know gives its oldest kernels. Source: driver/others/dynamic.c and dynamic_arm64.c of OpenBLAS 0.3.31.
"""

import platform
from pathlib import Path

from gpt2.errors import UserError
from scripts.machine.host import processor

CORE_TYPE, L2_SIZE = "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"
VARIABLES = CORE_TYPE, L2_SIZE, "MKL_ENABLE_INSTRUCTIONS", "BLIS_ARCH_TYPE"  # choose kernels when NumPy is loaded
AS_SET, BEST = "as-set", "best"  # what --blas-kernels takes beside a name
LIBRARIES = {"openblas": "OpenBLAS", "mkl": "MKL", "blis": "BLIS", "flexiblas": "FlexiBLAS"}

# Sets of instructions, and the words of /proc/cpuinfo that stand for them. Those of WIDTHS hold each other.
INSTRUCTIONS = {
    "SSE3": "pni", "SSSE3": "ssse3", "SSE4": "sse4_1 sse4_2", "3DNow": "3dnow", "SSE4A": "sse4a", "FMA4": "fma4 xop",
    "AVX": "avx", "AVX2": "avx avx2 fma", "AVX-512": "avx avx2 fma avx512f avx512cd avx512bw avx512dq avx512vl",
    "AVX512_BF16": "avx512_bf16", "AMX": "amx_tile amx_bf16", "NEON": "asimd", "SVE": "sve", "BF16": "bf16",
}  # fmt: skip
TOLD = "AVX2", "AVX-512", "AVX512_BF16", "AMX", "SVE", "BF16"
WIDTHS = "AVX", "AVX2", "AVX-512"
X86 = {
    "Katmai": "SSE3",  # what OpenBLAS calls its oldest kernels, Prescott's, once they are loaded
    "Prescott": "SSE3", "Core2": "SSSE3", "Penryn": "SSE4", "Dunnington": "SSE4", "Nehalem": "SSE4",
    "Opteron": "3DNow", "Opteron_SSE3": "3DNow", "Barcelona": "SSE4A", "Bobcat": "SSE4A", "Atom": "SSSE3",
    "Nano": "SSSE3", "Sandybridge": "AVX", "Bulldozer": "AVX FMA4", "Piledriver": "AVX FMA4",
    "Steamroller": "AVX FMA4", "Excavator": "AVX FMA4", "Haswell": "AVX2", "Zen": "AVX2", "SkylakeX": "AVX-512",
    "Cooperlake": "AVX-512 AVX512_BF16", "SapphireRapids": "AVX-512 AVX512_BF16 AMX",
}  # fmt: skip
ARM = {
    **dict.fromkeys(
        ("ARMV8", "CortexA53", "CortexA55", "CortexA57", "CortexA72", "CortexA73", "CortexX1", "Falkor", "ThunderX",
         "ThunderX2T99", "ThunderX3T110", "TSV110", "EMAG8180", "NeoverseN1"), "NEON"
    ),
    "ARMV8SVE": "SVE", "A64FX": "SVE", "NeoverseV1": "SVE", "NeoverseN2": "SVE BF16",
}  # fmt: skip
# Worth a trial: each generation since the widest registers became wider. What is older is slower, or the same.
TRIED = (
    "Sandybridge", "Piledriver", "Haswell", "Zen", "SkylakeX", "Cooperlake", "SapphireRapids",
    "ARMV8", "NeoverseN1", "ARMV8SVE", "NeoverseV1", "NeoverseN2",
)  # fmt: skip


def kernel_names() -> dict[str, str]:
    """OpenBLAS's names of kernels for this kind of CPU, and the sets of instructions that each needs."""
    return ARM if platform.machine() in ("aarch64", "arm64") else X86


def cpu_words(path: str = "/proc/cpuinfo") -> set[str]:
    """What Linux says that the CPU has; nothing where it does not say it."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return set()
    words = (line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features")))
    return set(next(words, []))


def instructions(words: set[str]) -> list[str]:
    """The sets of instructions of a CPU with these words."""
    return [name for name, needed in INSTRUCTIONS.items() if words.issuperset(needed.split())]


def runnable(words: set[str]) -> list[str]:
    """The names of kernels whose instructions a CPU with these words has."""
    own = set(instructions(words))
    return [name for name, needed in kernel_names().items() if own.issuperset(needed.split())]


def check_name(asked: str) -> str:
    """OpenBLAS's own spelling of a name. UserError: it has none of that name, or this CPU lacks their instructions."""
    known, words = {name.lower(): name for name in kernel_names()}, cpu_words()
    if asked.lower() not in known:
        expected = ", ".join((AS_SET, BEST, *known.values()))
        raise UserError(f"--blas-kernels {asked[:40]}: OpenBLAS has no kernels of that name, expected {expected}")
    name = known[asked.lower()]
    if name not in runnable(words):
        own = instructions(words)
        lacking = " and ".join(needed for needed in kernel_names()[name].split() if needed not in own)
        raise UserError(
            f"--blas-kernels {name}: this CPU ({processor()}) lacks {lacking}: use --blas-kernels {BEST}, or leave it "
            "out"
        )
    return name


def loaded_blas() -> dict:
    """{"library", "version", "kernels"} of the BLAS that NumPy has in this process; None for what is not known."""
    import numpy  # noqa: F401 - loads its BLAS
    from threadpoolctl import threadpool_info

    found = [library for library in threadpool_info() if library["user_api"] == "blas"]
    # Others, of SciPy or PyTorch, may be there as well.
    own = next((library for library in found if "numpy" in library["filepath"]), (found or [{}])[0])
    names = {"library": "internal_api", "version": "version", "kernels": "architecture"}
    return {name: own.get(key) for name, key in names.items()}


def blas_facts(environment, asked: str = AS_SET) -> dict:
    """What config.json says of a rank's BLAS and CPU. asked: --blas-kernels."""
    own = instructions(cpu_words())
    return loaded_blas() | {
        "asked": asked,
        "variables": {name: environment[name] for name in VARIABLES if name in environment},
        "processor": processor(),
        "instructions": [name for name in TOLD if name in own],
    }


def wider(facts: dict) -> str | None:
    """The widest instructions of the CPU, where those of the kernels are narrower; None where they are not."""
    names = {name.lower(): needed.split() for name, needed in kernel_names().items()}
    used = names.get((facts["kernels"] or "").lower())
    own = [width for width in WIDTHS if width in facts["instructions"]]
    if used is None or not own:
        return None
    return None if own[-1] in used else own[-1]


def blas_text(facts: dict) -> str:
    """As in "OpenBLAS 0.3.31, Nehalem kernels (forced by OPENBLAS_CORETYPE), this CPU has AVX2"."""
    library, asked = LIBRARIES.get(facts["library"], facts["library"] or "BLAS unknown"), facts["asked"]
    text = " ".join(filter(None, (library, facts["version"])))
    if facts["kernels"]:
        forced = f"forced by {CORE_TYPE}" if CORE_TYPE in facts["variables"] else None
        why = f"--blas-kernels {asked}" if asked != AS_SET else forced
        text += f", {facts['kernels']} kernels" + (f" ({why})" if why and library == "OpenBLAS" else "")
    if asked != AS_SET and library != "OpenBLAS":
        text += f": --blas-kernels {asked} has nothing to choose, as this is not OpenBLAS"
    if asked == AS_SET and L2_SIZE in facts["variables"]:
        text += f", {L2_SIZE}={facts['variables'][L2_SIZE]}"
    return text + (f", this CPU has {more}" if (more := wider(facts)) else "")


def remark(facts: dict) -> str | None:
    """blas_text where it is worth a line of its own: kernels were chosen, or narrow ones are in use."""
    return f"BLAS: {blas_text(facts)}" if facts["asked"] != AS_SET or wider(facts) else None
