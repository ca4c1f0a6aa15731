"""Processes and networks: the ranks, their nodes, and exchanges of vectors between them. Nothing here knows GPT-2.

world.py            ranks, nodes, local ranks; starts a job, and ends it on all ranks with one line or a traceback
mesh.py             tensor-parallel groups, data-parallel replicas and pipeline stages
shared_memory.py    free space in /dev/shm, and files that killed jobs have left there
console.py          output that survives a full disk or a closed pipe
repeating.py        work that a background thread repeats
waiting.py          waiting without keeping the core busy
progress_engine.py  advances exchanges between kernels, or until they end
ranges.py           cuts a flat buffer into the parts that ranks own
buffers.py          a rank's flat buffers, in its own memory or in memory that its node's ranks share (node_memory.py)
sharded.py          vectors that no rank holds whole (ZeRO)
sparse_gradient.py  the rows of an embedding that a step uses, and their gradients
shard_sums.py       sums over tensor-parallel ranks
stage_links.py      messages between pipeline stages
wire.py             messages in float32, bfloat16 or int8
mpi.py              mpi4py's MPI, or None if no MPI library is found
host/               exchanges between arrays in host memory: rings, trees, MPI's collectives with a wire format
gpu/                buffers on GPUs and exchanges between them, over NCCL or GPU-aware MPI; host staging
probe/              measurements of links, clocks and ports; mpirun and other programs of the machine
cost/               seconds and bytes of an exchange, predicted from its messages
watch/              the phase of every rank, readable while MPI hangs; names the ranks that hold up others
"""
