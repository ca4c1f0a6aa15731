"""Count the bytes through a node's network ports, with the counters that the kernel keeps of every interface.

/sys/class/net/NAME/statistics/{rx,tx}_bytes count bytes, link headers included. An Ethernet card sees frames: 1514
bytes for 1448 bytes of TCP data, 1.045 times the data. A virtual host's port (veth) sees packets of up to 64 KiB with
one header each, 1.001 times the data, unless its shaper cuts them (virtual_cluster.py's --burst below 64 KiB).

They miss MPI's messages over InfiniBand, which bypass the kernel. /sys/class/infiniband/DEVICE/ports/PORT/counters has
port_{rcv,xmit}_data, which count those in units of 4 bytes (IBTA specification 1, 16.1.3.5, PortCounters). With RoCE
these hold the RDMA traffic, the interfaces' counters the rest. port_xmit_wait counts the ticks in which a port had data
but could not send.
"""

from collections.abc import Callable
from pathlib import Path

from dist.control_groups import text_of

LOOPBACK = "772"  # interface types, include/uapi/linux/if_arp.h
IP_OVER_INFINIBAND = "32"
INFINIBAND_UNIT = 4


class Ports:
    """The counted ports of a node, with their `names`. Any rank of the node may read them.

    Each byte counts once: loopback is left out, and so are interfaces whose bytes another port carries: bonds, bridges,
    VLANs, IP over InfiniBand. On a node with devices, interfaces without one are left out too: containers', tunnels.
    """

    def __init__(self, system: Path = Path("/sys")):
        ethernet = _ethernet(system / "class/net")
        infiniband = _infiniband(system / "class/infiniband")
        self.names = [name for name, *_ in ethernet + infiniband]
        self._counters = [(unit, _open(into), _open(out)) for _, unit, into, out in ethernet + infiniband]
        self._stalls = [_open(into.parent / "port_xmit_wait") for _, _, into, _ in infiniband]
        links = [_open(into.parent.parent / "carrier") for _, _, into, _ in ethernet]
        self._links = [link for link in links if link()]

    def read(self) -> tuple[int, int]:
        """Return (bytes in, bytes out) of all ports together, since they came up: take differences of two calls."""
        totals = [0, 0]
        for unit, *counters in self._counters:
            for way, counter in enumerate(counters):
                totals[way] += unit * counter()
        return totals[0], totals[1]

    def sent(self) -> dict[str, int]:
        """Return {name: bytes out} of each port since it came up."""
        return {name: unit * out() for name, (unit, _, out) in zip(self.names, self._counters, strict=True)}

    def stalls(self) -> int:
        """Return the ticks in which InfiniBand ports waited to send, summed; 0 without such ports."""
        return sum(counter() for counter in self._stalls)

    def has_lost_link(self) -> bool:
        """Return whether an interface has lost the link that it had when this object was made (a cable, a switch)."""
        return not all(link() for link in self._links)


def _ethernet(folder: Path) -> list[tuple]:
    """Return (name, bytes per count, file of counts in, file of counts out) of each interface that counts."""
    found = [path for path in sorted(folder.glob("*")) if (path / "statistics/rx_bytes").exists()]
    found = [path for path in found if (path / "type").read_text().strip() not in (LOOPBACK, IP_OVER_INFINIBAND)]
    found = [path for path in found if not any(path.glob("lower_*"))]
    devices = [path for path in found if (path / "device").exists()]
    counters = [(path.name, path / "statistics") for path in devices or found]
    return [(name, 1, statistics / "rx_bytes", statistics / "tx_bytes") for name, statistics in counters]


def _infiniband(folder: Path) -> list[tuple]:
    """Return the same for each port of each InfiniBand device that has counters."""
    found = []
    for counters in sorted(folder.glob("*/ports/*/counters")):
        files = counters / "port_rcv_data", counters / "port_xmit_data"
        if all(text_of(file).isdecimal() for file in files):  # "N/A (no PMA)" otherwise
            device, _, port = counters.parent.relative_to(folder).parts
            found.append((f"{device}:{port}", INFINIBAND_UNIT, *files))
    return found


def _open(path: Path) -> Callable[[], int]:
    """Return a function that reads the counter, 0 if it has no number. The file stays open, because opening is slow."""
    try:
        file = path.open("rb", buffering=0)
    except OSError:
        return lambda: 0

    def read() -> int:
        try:
            file.seek(0)
            return int(file.read(32))
        except (OSError, ValueError):
            return 0

    return read
