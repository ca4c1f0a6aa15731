"""Processes and wires: who the ranks are, where they sit, and how vectors travel between them. Knows no GPT-2.

world.py        ranks, nodes, local ranks; how a job starts, and ends on all ranks with one line or a traceback
shared_memory.py  what is free in /dev/shm, and what killed jobs have left there
console.py      what is printed, whatever lies behind stdout and stderr
repeating.py    work that a thread repeats beside the training
waiting.py      waiting that leaves the core to those who work
progress.py     exchanges under way, moved on between pieces of compute or to the end
ranges.py       cutting a flat buffer into the parts that ranks own
buffers.py      a rank's flat buffers: its own memory, or memory that its node's ranks share
sharded.py      vectors that no rank holds whole (ZeRO)
wire.py         float32 or bfloat16 between ranks
mpi.py          mpi4py's MPI, where there is one
host/           exchanges between arrays in host memory: a ring, two trees
gpu/            buffers on GPUs and exchanges between them, over NCCL or an MPI library that takes GPU memory
probe/          what the machine is, measured or asked: links, clocks, ports' counters, mpirun and other programs
cost/           seconds and bytes of an exchange, before anyone tries it
watch/          which phase every rank is in, readable while MPI hangs; who holds the others up
"""
