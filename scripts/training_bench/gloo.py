"""Start gloo, PyTorch's exchange between CPUs. torch is not a dependency of the project."""

import fcntl
import importlib.util
import os
import socket
import struct
import sys
from datetime import timedelta

from gpt2.errors import UserError

ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR, netdevice(7)
TIME_LIMIT = timedelta(seconds=120)


def start_gloo(world):
    """Initialize torch.distributed with gloo on all ranks. Collective; a UserError ends the job."""
    with world.together(UserError):
        address = address_toward_others(world)
        # gloo has no other setting for this. Looking up the host's name, it might choose the loopback interface.
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(address)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # otherwise each rank warns about addresses without names
    from torch import distributed

    # Rank 0 serves the store through which the ranks find each other.
    address = world.comm.bcast(address)
    place = {"world_size": world.size, "timeout": TIME_LIMIT}
    if world.rank == 0:
        store = distributed.TCPStore(address, 0, is_master=True, wait_for_workers=False, **place)
    port = world.comm.bcast(store.port if world.rank == 0 else None)
    if world.rank > 0:
        store = distributed.TCPStore(address, port, is_master=False, **place)
    hook = sys.excepthook
    distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=TIME_LIMIT)
    sys.excepthook = hook  # torch's own would hold back what ours prints until ours returns, and ours ends the job


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def address_toward_others(world) -> str:
    """Return this host's IPv4 address on the route to another node (on one node: loopback). Raise UserError."""
    host = next((place["host"] for place in world.places if place["node"] != world.node), "127.0.0.1")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # looks up the route and sends nothing
            return probe.getsockname()[0]
    except OSError as error:
        raise UserError(f"gloo needs an IPv4 route to {host!r}, and there is none ({error})") from None


def interface_of(address: str) -> str:
    """Return the name of the network interface that has this IPv4 address. Raise UserError if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(any_socket, ADDRESS_OF_INTERFACE, request)
            except OSError:
                continue  # this interface has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    raise UserError(f"gloo: no network interface has this host's address {address} as its first one")
