"""dist/gpu/topology.py: what machines of several kinds print, with tabs as nvidia-smi has them or with spaces."""

import json
import os
import stat
import sys
import time

import pytest

from dist.gpu.topology import gpu_topology, parse_matrix

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def matrix(devices, link, affinities, columns="CPU Affinity\tNUMA Affinity\tGPU NUMA ID", cards=""):
    """Printed as nvidia-smi does: tabs, spaces around X, an underlined header; link(row, column) of device numbers."""
    lines = ["\x1b[4m\t" + "\t".join([*devices, columns]) + "\x1b[0m"]
    for row, name in enumerate(devices):
        cells = [" X " if row == column else link(row, column) for column in range(len(devices))]
        lines.append("\t".join([name, *cells, affinities[row] if row < len(affinities) else "\t\t"]))
    return "\n".join(lines) + "\n" + LEGEND + cards


def named(prefix, count):
    return [f"{prefix}{number}" for number in range(count)]


def hgx_h200():
    """Eight GPUs with a card each on two sockets; newer columns, and a legend of the cards."""

    def link(row, column):
        low, high = sorted((row, column))
        if high < 8:
            return "NV18"
        if low % 8 == high % 8:
            return "PIX"
        return "NODE" if low % 8 // 4 == high % 8 // 4 else "SYS"

    affinities = [f"{56 * (n // 4)}-{56 * (n // 4) + 55},{112 + 56 * (n // 4)}-{167 + 56 * (n // 4)}\t{n // 4}\t\tN/A"
                  for n in range(8)]  # fmt: skip
    cards = "\nNIC Legend:\n\n" + "".join(f"  NIC{n}: mlx5_{n + 2}\n" for n in range(8))
    return matrix(named("GPU", 8) + named("NIC", 8), link, affinities, cards=cards)


def workstation():
    return matrix(named("GPU", 2), lambda row, column: "PHB", ["0-63\t0\t\tN/A"] * 2)


def single():
    return matrix(["GPU0"], None, ["N/A\tN/A\t\tN/A"])


MACHINES = [hgx_h200, workstation, single]


def test_an_hgx_h200_with_its_cards():
    topology = parse_matrix(hgx_h200())
    assert topology["nics"][3] == {"name": "NIC3", "device": "mlx5_5"}
    assert topology["gpus"][7] == {"name": "GPU7", "cpus": "56-111,168-223", "numa": "1"}
    assert topology["links"]["GPU7"] == {
        **{f"GPU{n}": "NV18" for n in range(7)},
        **{f"NIC{n}": "SYS" for n in range(4)}, **{f"NIC{n}": "NODE" for n in range(4, 7)}, "NIC7": "PIX",
    }  # fmt: skip


def test_a_workstation_and_a_single_gpu():
    assert parse_matrix(workstation()) == {
        "gpus": [{"name": f"GPU{n}", "cpus": "0-63", "numa": "0"} for n in range(2)],
        "nics": [],
        "links": {"GPU0": {"GPU1": "PHB"}, "GPU1": {"GPU0": "PHB"}},
    }
    alone = {"gpus": [{"name": "GPU0", "cpus": None, "numa": None}], "nics": [], "links": {"GPU0": {}}}
    assert parse_matrix(single()) == alone


@pytest.mark.parametrize("machine", MACHINES)
def test_tabs_or_spaces_colours_or_none(machine):
    """As copied from a terminal; and it goes to JSON and back."""
    text, topology = machine(), parse_matrix(machine())
    assert parse_matrix(text.expandtabs(8)) == topology
    assert parse_matrix(text.replace("\x1b[4m", "").replace("\x1b[0m", "")) == topology
    assert parse_matrix(text.replace("\n", "\r\n")) == topology
    assert json.loads(json.dumps(topology)) == topology


def test_a_gpu_without_cpus_of_its_own():
    """An empty cell is no number of the next one."""
    text = matrix(["GPU0", "GPU1"], lambda row, column: "SYS", ["\t0-1\t\tN/A", "8-15\t\t\tN/A"])
    assert [(gpu["cpus"], gpu["numa"]) for gpu in parse_matrix(text)["gpus"]] == [(None, "0-1"), ("8-15", None)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "No devices were found\n",
        "Failed to initialize NVML: Driver/library version mismatch\n",
        LEGEND,
        "\tCPU Affinity\tNUMA Affinity\n",
        "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPHB\t0-63\n",
        "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPHB\t0-63\nGPU1\tPHB\n",
        "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \t???\t0-63\nGPU1\tPHB\t X \t0-63\n",
    ],
)
def test_what_is_no_matrix(text):
    assert parse_matrix(text) is None


def command(tmp_path, body):
    """A program in place of nvidia-smi."""
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!{sys.executable}\n{body}")
    os.chmod(path, stat.S_IRWXU)
    return (str(path), "topo", "-m")


def test_the_program_is_asked(tmp_path):
    says = command(tmp_path, f"import sys; assert sys.argv[1:] == ['topo', '-m']; print({workstation()!r})")
    assert gpu_topology(says) == parse_matrix(workstation())


def test_without_an_answer(tmp_path):
    """Not installed; failing after a whole matrix; talking nonsense in no encoding; hanging."""
    assert gpu_topology(("no-such-program-here",)) is None
    assert gpu_topology(command(tmp_path, f"print({workstation()!r}); raise SystemExit(9)")) is None
    assert gpu_topology(command(tmp_path, r"import os; os.write(1, b'\xff\xfe GPU0')")) is None
    begin = time.monotonic()
    assert gpu_topology(command(tmp_path, "import time; time.sleep(60)"), limit_s=0.2) is None
    assert time.monotonic() - begin < 30, "it was not waited for"
