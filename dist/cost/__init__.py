"""Predict the seconds and bytes of an exchange from its messages and the rates of the nodes' ports.

model.py             the prediction               messages.py         building blocks of message schedules
stages.py            messages under way at once   replay.py           ranks at their own pace, on shared ports
mpi_choices.py       the algorithm that an MPI library picks for a call
mpi_algorithms.py    its messages                 sparse_rows.py      messages of a sparse embedding gradient
overlap.py           time that --overlap hides    memory.py           bytes that a rank holds
model_parallel.py    models that ranks share      pipeline_replay.py  replays their pipelines
"""
