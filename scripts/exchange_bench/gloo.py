"""PyTorch's all-reduce over gloo, on CPUs, as a contender. torch is not a dependency of the project."""

import fcntl
import importlib.util
import os
import socket
import struct
from datetime import timedelta

from gpt2.errors import UserError
from scripts.exchange_bench.contenders import Contender
from scripts.exchange_bench.values import fill

ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR, netdevice(7)
TIME_LIMIT = timedelta(seconds=120)


class Gloo(Contender):
    """torch.distributed.all_reduce, in place, over the interface that leads to the other nodes."""

    family = "torch"

    def __init__(self, world, own_buffers, wire_format=None):
        super().__init__(world, own_buffers)
        self.distributed = start_gloo(world)
        import torch

        torch.set_num_threads(1)
        self.tensor = torch.from_numpy(own_buffers.parameters)

    def prepare(self):
        fill(self.buffers.parameters, self.values)

    def exchange(self):
        self.distributed.all_reduce(self.tensor)

    def close(self):
        self.distributed.destroy_process_group()


def start_gloo(world):
    """Return torch.distributed, initialized with gloo on all ranks. Collective; a UserError ends the job."""
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
    distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=TIME_LIMIT)
    return distributed


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def check_torch() -> None:
    if not has_torch():
        raise UserError("--vs torch needs PyTorch: pip install torch (the project itself does not)")


def address_toward_others(world) -> str:
    """Return this host's IPv4 address on the route to another node (on one node: loopback). Raise UserError."""
    host = next((place["host"] for place in world.places if place["node"] != world.node), "127.0.0.1")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # looks up the route and sends nothing
            return probe.getsockname()[0]
    except OSError as error:
        raise UserError(f"--vs torch: gloo needs an IPv4 route to {host!r}, and there is none ({error})") from None


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
    raise UserError(f"--vs torch: no network interface has this host's address {address} as its first one")
