"""dist/probe/ports.py against fake /sys trees."""

from pathlib import Path

from dist.probe.ports import Ports


def write_tree(folder: Path, files: dict) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return folder


def interface(name, kind, bytes_in, bytes_out, **more):
    counters = {"statistics/rx_bytes": bytes_in, "statistics/tx_bytes": bytes_out, "type": kind, **more}
    return {f"class/net/{name}/{file}": text for file, text in counters.items()}


def infiniband(device, port, received, sent):
    folder = f"class/infiniband/{device}/ports/{port}/counters"
    counters = {"port_rcv_data": received, "port_xmit_data": sent, "port_xmit_wait": received // 2}
    return {f"{folder}/{name}": value for name, value in counters.items()}


def test_a_hosts_ports(tmp_path):
    """Each byte once: two devices under a bond, IP over InfiniBand, containers, and a port without counters."""
    system = write_tree(
        tmp_path,
        interface("lo", 772, 10**9, 10**9)
        | interface("eth0", 1, 1000, 2000, device="")
        | interface("eth1", 1, 100, 200, device="")
        | interface("bond0", 1, 1100, 2200, lower_eth0="", lower_eth1="")
        | interface("ib0", 32, 10**8, 10**8, device="")
        | interface("veth1", 1, 10**7, 10**7)
        | interface("docker0", 1, 10**7, 10**7, lower_veth1="")
        | infiniband("mlx5_0", 1, 10, 20)
        | {f"class/infiniband/mlx5_0/ports/2/counters/port_{way}_data": "N/A (no PMA)" for way in ("rcv", "xmit")},
    )
    (system / "class/net/bonding_masters").write_text("bond0\n")  # a file among the folders
    ports = Ports(system)
    assert ports.names == ["eth0", "eth1", "mlx5_0:1"]
    assert ports.read() == (1100 + 4 * 10, 2200 + 4 * 20)
    assert ports.sent() == {"eth0": 2000, "eth1": 200, "mlx5_0:1": 4 * 20}
    assert ports.stalls() == 5
    write_tree(system, infiniband("mlx5_0", 1, 11, 20) | interface("eth1", 1, 150, 207, device=""))
    assert ports.read() == (1150 + 4 * 11, 2207 + 4 * 20)


def test_a_containers_ports(tmp_path):
    """Without devices of its own, what it reaches the others by is virtual."""
    ports = Ports(write_tree(tmp_path, interface("lo", 772, 5, 5) | interface("eth0", 1, 30, 40)))
    assert (ports.names, ports.read()) == (["eth0"], (30, 40))
    nothing = Ports(tmp_path / "none")
    assert (nothing.names, nothing.read(), nothing.stalls()) == ([], (0, 0), 0)


def test_a_link_that_is_lost(tmp_path):
    """Only what was connected at first can be lost; one of two is enough."""
    carriers = {"eth0": 1, "eth1": 1, "eth2": 0}
    for name, carrier in carriers.items():
        write_tree(tmp_path, interface(name, 1, 0, 0, carrier=carrier))
    ports = Ports(tmp_path)
    assert not ports.has_lost_link()
    write_tree(tmp_path, interface("eth1", 1, 0, 0, carrier=0))
    assert ports.has_lost_link()


def test_what_others_carry_counts_once_without_devices_too(tmp_path):
    """A bridge and its port in a container."""
    system = write_tree(tmp_path, interface("eth0", 1, 30, 40) | interface("br0", 1, 30, 40, lower_eth0=""))
    assert Ports(system).names == ["eth0"]
