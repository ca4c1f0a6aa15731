"""Seconds and bytes of an exchange, from its messages and the rates of the nodes' ports.

model.py             the prediction               messages.py   what strategies declare their messages with
stages.py            messages under way at once   replay.py     each rank at its own pace, and the ports they share
mpi_choices.py       which algorithm an MPI library picks for a call (mpi_calls.py)
mpi_algorithms.py    those algorithms; rabenseifner.py, mpi_compositions.py: the larger ones
overlap.py           what --overlap hides         memory.py     bytes that a rank holds
model_parallel.py    models that ranks share
"""
