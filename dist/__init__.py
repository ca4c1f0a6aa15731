"""Processes and wires: the ranks, their nodes, and how vectors travel between them. Knows no GPT-2.

world.py            ranks, nodes, local ranks; how a job starts, and ends on all ranks with one line or a traceback
mesh.py             tensor-parallel groups, data-parallel replicas and pipeline stages
shared_memory.py    free room in /dev/shm, and what killed jobs have left there
console.py          output that survives a full disk or a closed pipe
repeating.py        work that a thread repeats beside the training
waiting.py          waiting that leaves the core to others
progress_engine.py  exchanges under way, moved on between kernels or to their end
ranges.py           cutting a flat buffer into the parts that ranks own
buffers.py          a rank's flat buffers: its own memory, or memory shared in its node (node_memory.py)
sharded.py          vectors that no rank holds whole (ZeRO)
sparse_gradient.py  the rows of an embedding that a step uses, and their gradients
shard_sums.py       sums over tensor-parallel ranks
stage_links.py      messages between pipeline stages
wire.py             float32 or bfloat16 between ranks
mpi.py              mpi4py's MPI, if there is one
host/               exchanges between arrays in host memory: rings, trees, MPI's collectives with a wire format
gpu/                buffers on GPUs and exchanges between them, over NCCL or GPU-aware MPI; host staging
probe/              measurements of links, clocks and ports; mpirun and other programs of the machine
cost/               seconds and bytes of an exchange, predicted from its messages
watch/              the phase of every rank, readable while MPI hangs; names the ranks that hold up others
"""
