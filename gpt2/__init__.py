"""One rank's mathematics: a GPT-2 with forward and backward written by hand. Knows no MPI.

config.py          the five numbers that make a GPT-2, presets
parameters.py      one flat buffer, named views, initialization
model.py           forward and backward over the layers
kernels.py         the list of kernels, and which set serves a backend
numpy_kernels/     the kernels on CPU cores
cupy_kernels/      CUDA sources of the kernels, not yet bound to the model
optimizer.py       AdamW on any flat range, gradient clipping
schedule.py        learning rate over the steps
shards.py          llm.c token files        windows.py   which tokens a step sees
texts.py           text to shards           tokenizers.py  gpt2 or bytes
llmc.py            parameters from and to llm.c's checkpoint file
errors.py          UserError: the user's mistake, in one line
"""
