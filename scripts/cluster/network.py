"""The network of a virtual cluster: one switch, one port per node, one rate per direction of a port."""

from dataclasses import dataclass, replace

from scripts.cluster.hosts import HEAD, ClusterError, Host
from scripts.settings.units import bits_per_s

SWITCH = "switch"
NETWORK = "10.77.0"  # inside namespaces: it cannot collide with the machine's addresses or another cluster's
MOST_NODES = 250  # the last byte of an address numbers the node; the head has 254
DIRECTIONS = {"in": "incoming", "out": "outgoing"}
TCP = "/proc/sys/net/ipv4/tcp_"  # followed by a setting's name; a new network namespace starts with the machine's
# A packet of TCP segmentation offload has up to 64 KiB; with a smaller bucket the shaper would split each one. The
# shaper charges for the headers of all its frames; the port's counters see one. Ports that count frames (`ip link set
# eth0 gso_max_segs 1`) carry only 1 Gbit/s at a rate of 10 Gbit/s on two cores, instead of 8.
LEAST_BURST_BYTES = 1 << 17
BURST_S = 0.002
QUEUE_S = 0.05


@dataclass(frozen=True)
class Port:
    """A node's port: its rates ("400mbit") out of and into the node, and the bytes that it sends at once after a pause;
    None derives the burst from the rate."""

    outgoing: str
    incoming: str
    burst: float | None = None


def node_name(node: int) -> str:
    return f"node{node}"


def host_addresses(nodes: int) -> dict[str, str]:
    """Return {host name: IP address} of the head and the nodes. Raise ClusterError if there are too many."""
    if not 1 <= nodes <= MOST_NODES:
        raise ClusterError(f"--nodes {nodes}: expected 1 to {MOST_NODES}")
    return {HEAD: f"{NETWORK}.254"} | {node_name(node): f"{NETWORK}.{node + 1}" for node in range(nodes)}


def node_ports(nodes: int, rate: str, slow: list[str], burst: float | None = None) -> list[Port]:
    """Return a Port for each node. rate: both directions. slow: exceptions, e.g. ["node2:100mbit", "node0:in:50mbit"].

    Raise ClusterError or UnitError for a wrong text.
    """
    bits_per_s(rate)
    ports = {node_name(node): Port(rate, rate, burst) for node in range(nodes)}
    for text in slow:
        name, *words = text.split(":")
        if not 1 <= len(words) <= 2 or not set(words[:-1]) <= DIRECTIONS.keys():
            raise ClusterError(f"--slow {text}: expected node2:100mbit, node2:in:100mbit or node2:out:100mbit")
        if name not in ports:
            raise ClusterError(f"--slow {text}: no host {name!r}, they are node0 to node{nodes - 1}")
        *direction, slow_rate = words
        bits_per_s(slow_rate)
        ports[name] = replace(ports[name], **{DIRECTIONS[way]: slow_rate for way in direction or DIRECTIONS})
    return list(ports.values())


def connect(head: Host, nodes: list[Host], ports: list[Port], delay: str | None, congestion: str) -> None:
    """Join the nodes by a switch on the head's network, with rates, delay and TCP congestion control.

    Raise ClusterError with the reason if the kernel refuses.
    """
    addresses = host_addresses(len(nodes))
    lines = [f"link add {SWITCH} type bridge", f"link set {SWITCH} up", "link set lo up"]
    lines += [f"address add {addresses[HEAD]}/24 dev {SWITCH}"]
    for node in nodes:
        lines += [f"link add {node.name} type veth peer name eth0 netns {node.pid}"]
        lines += [f"link set {node.name} master {SWITCH} up"]
    head.on_network("ip", "-batch", "-", text="\n".join(lines))
    for node, port in zip(nodes, ports, strict=True):
        lines = ["link set lo up", f"address add {addresses[node.name]}/24 dev eth0", "link set eth0 up"]
        node.on_network("ip", "-batch", "-", text="\n".join(lines))
        # Both directions are shaped where packets leave a queue; a limit on arrival could only drop packets.
        limit_rate(node, "eth0", port.outgoing, delay, port.burst)
        limit_rate(head, node.name, port.incoming, None, port.burst)
    for host in (head, *nodes):
        set_tcp(host, congestion)


def limit_rate(host: Host, device: str, rate: str, delay: str | None, burst: float | None) -> None:
    """Limit the rate at which packets leave `device`: a token bucket, behind a delay line if there is a delay."""
    add = ("tc", "qdisc", "add", "dev", device)
    place = ("root",)
    if delay:
        try:
            host.on_network(*add, "root", "handle", "1:", "netem", "delay", delay)
        except ClusterError as error:
            no_netem = "this kernel has no netem (CONFIG_NET_SCH_NETEM), which makes delays: leave it out"
            raise ClusterError(f"--delay {delay}: {no_netem if 'unknown' in str(error) else error}") from None
        place = ("parent", "1:1")
    try:
        host.on_network(*add, *place, *token_bucket(bits_per_s(rate), burst))
    except ClusterError as error:
        raise ClusterError(f"the kernel refuses the rate {rate}: {error}") from None


def token_bucket(rate: float, burst: float | None = None) -> list[str]:
    """Return tc's arguments for a queue that sends `rate` bits/s, and `burst` bytes at once after a pause.

    tbf, not htb: one class needs no tree. After a pause the bucket's content passes at full speed, so a large bucket
    flatters short exchanges: at 400 Mbit/s, a bucket of 512 KiB lets 8 MB pass faster than TCP's headers allow. But the
    bucket also compensates for a timer that fires late on a busy machine. A bucket of 2 ms is enough: 32 MB still reach
    0.955 of the rate, all that TCP's headers leave. The queue holds 50 ms, like a switch with ample buffers: eight
    senders into one port lose some packets until they have found their shares, then use 0.95 of its rate.
    """
    burst = burst or max(LEAST_BURST_BYTES, rate / 8 * BURST_S)
    limit = burst + rate / 8 * QUEUE_S
    return ["tbf", "rate", f"{rate:.0f}bit", "burst", f"{burst:.0f}b", "limit", f"{limit:.0f}b"]


def set_tcp(host: Host, congestion: str) -> None:
    """Set the host's TCP congestion control, and switch off slow start after idle.

    By default the congestion window falls to ten packets after a pause of one retransmission timeout, 0.2 s. Then each
    exchange after a forward pass would start slowly, and a ring would wait for the slowest of its connections. Clusters
    set up for MPI over TCP switch slow start after idle off.
    """
    try:
        host.on_network("sh", "-c", f'echo "$1" > {TCP}congestion_control', "sh", congestion)
    except ClusterError:
        allowed = ", ".join(host.on_network("cat", f"{TCP}allowed_congestion_control").split())
        raise ClusterError(f"--congestion {congestion}: in a namespace this kernel allows {allowed}") from None
    host.on_network("sh", "-c", f"echo 0 > {TCP}slow_start_after_idle")
