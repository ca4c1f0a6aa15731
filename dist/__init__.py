"""Processes and wires: who the ranks are and where they sit. Knows no GPT-2.

world.py          ranks, nodes, local ranks; one line for a user's mistake on any rank
abort.py          an exception on one rank ends the job on all
cores.py          how many threads a rank may run
ranges.py         cutting a flat buffer into the parts ranks own
clock.py          every node's clock against rank 0's
launcher.py       the mpirun command of this machine
buffers.py        a rank's flat buffers: its own memory, or memory that its node's ranks share
sharded.py        vectors that no rank holds whole (ZeRO)
live.py           which phase every rank is in, readable while MPI hangs
watchdog.py       a rank that others wait for is named while the job hangs; stalls.py: how it is found
device_buffers.py a rank's flat buffers on a GPU, and what exchanges them there under mpi4py's names (device_comm.py):
  nccl.py         NCCL        gpu_aware.py  an MPI library that takes them        alone.py  one rank, nobody to ask
waiting.py        waiting that leaves the core to those who work; early_sum.py: a sum that travels meanwhile
progress.py       exchanges under way, moved on between pieces of compute or to the end
stream_progress.py  the same on a stream of a GPU, where nobody moves them on
exchanges.py      of one range after another: by rings, or between GPUs
  device_calls.py by calls    device_ring.py, device_tree.py  by messages    node_exchange.py  node by node
wire.py           float32 or bfloat16 between ranks; device_wire.py: between GPUs
ring.py           reduce-scatter and all-gather around a ring, close to the network's bound
tree.py           all-reduce over two binary trees; double_tree.py: which
links.py          latency and rates between the nodes, measured; local_rates.py: of copies and sums inside a node
gpu_topology.py   how a node's GPUs are joined, as nvidia-smi says; tool_output.py: what a program says in time
ports.py          bytes through a node's network ports, by its counters
cost_model.py     seconds of an exchange, before anyone tries it, from
  schedules.py      who sends how much to whom under each strategy: bytes through every port
  mpi_choices.py    which algorithm an MPI library takes; mpi_calls, mpi_algorithms, mpi_compositions, rabenseifner
  zero_schedules.py ZeRO's, range by range
  message_stages.py messages that move at the same time
  message_replay.py each rank at its own pace; port_shares.py: whose message a port serves
predictions.py    every strategy's exchange in one call
rank_memory.py    bytes a rank holds under each strategy
"""
