"""How a node's GPUs are linked with each other and with network cards: the matrix that `nvidia-smi topo -m` prints.

A cell is the path between the devices of its row and column, X on the diagonal (nvidia-smi's legend):

    NV#   a bonded set of # NVLinks
    PIX   at most a single PCIe bridge
    PXB   several PCIe bridges, without the CPU's host bridge
    PHB   a PCIe host bridge
    NODE  PCIe, and the interconnect between the host bridges of a NUMA node
    SYS   PCIe, and the interconnect between NUMA nodes

After the devices' columns come "CPU Affinity" and, by version, "NUMA Affinity" and "GPU NUMA ID", filled for GPUs only.
"""

import re

from dist.probe.programs import OUTPUT_LIMIT_S, tool_output

COMMAND = ("nvidia-smi", "topo", "-m")

_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NETWORK_CARD = re.compile(r"\s*(NIC\d+): (\S+)\s*")
_LINK = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS")
_RANGES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


def gpu_topology(command=COMMAND, limit_s: float = OUTPUT_LIMIT_S) -> dict | None:
    """Return this node's topology as parse_matrix does; None if nvidia-smi is missing, fails or hangs."""
    output = tool_output(*command, limit_s=limit_s)
    return None if output is None else parse_matrix(output)


def parse_matrix(text: str) -> dict | None:
    """Parse the output of `nvidia-smi topo -m` into a dict, ready for JSON; None if it is no such matrix.

    gpus: for each GPU {"name": "GPU0", "cpus": "0-55,112-167", "numa": "0"}, None where the output has no value
    nics: for each network card {"name": "NIC0", "device": "mlx5_0"}
    links: {"GPU0": {"GPU1": "NV18", "NIC0": "PIX", ...}, ...}, of each GPU to every other device
    """
    lines = [line for line in _ESCAPES.sub("", text).splitlines() if line.strip()]
    header = next((line for line in lines if "CPU Affinity" in line), "")
    devices = header.partition("CPU Affinity")[0].split()
    rows = {name: cells for name, *cells in map(_cells, lines) if name in devices}
    links = {name: dict(zip(devices, rows.get(name, []), strict=False)) for name in devices if name.startswith("GPU")}
    paths = [row.get(device, "") for row in links.values() for device in devices]
    if not paths or not all(map(_LINK.fullmatch, paths)):
        return None
    cards = dict(match.groups() for match in map(_NETWORK_CARD.fullmatch, lines) if match)
    return {
        "gpus": [{"name": name, **_affinity(rows[name][len(devices) :])} for name in links],
        "nics": [{"name": name, "device": cards.get(name, name)} for name in devices if name not in links],
        "links": {name: {other: row[other] for other in row if other != name} for name, row in links.items()},
    }


def _cells(line: str) -> list[str]:
    """Split a line into cells: at tabs, or at spaces if a terminal has replaced the tabs."""
    return [cell.strip() for cell in line.split("\t")] if "\t" in line else line.split()


def _affinity(cells: list[str]) -> dict[str, str | None]:
    """Return the first two cells after the links, if they are numbers: on some machines they are N/A or empty."""
    cpus, numa = ([*cells, "", ""])[:2]
    return {key: cell if _RANGES.fullmatch(cell) else None for key, cell in (("cpus", cpus), ("numa", numa))}
