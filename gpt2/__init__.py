"""One rank's mathematics: a GPT-2 with forward and backward written by hand. Knows no MPI.

config.py       the five numbers that make a GPT-2, and the presets
parameters.py   one flat buffer, named views, initialization
boxes.py        from the numbering of one piece of a model to another's
model.py        forward and backward over the layers
optimizer.py    what an update needs: AdamW on any flat range, clipping, the learning rate
rounding.py     bfloat16 parameters from float32
kernels/        what each layer computes: numpy/ on CPU cores, cupy/ on a GPU; __init__.py is their contract
data/           tokenizers, texts, token shards, and the windows that a step reads
formats/        files of parameters and state; weights.py reads them all, checkpoints.py is what training goes on from
inference/      a trained model at work: text, losses, HellaSwag
errors.py       UserError: the user's mistake, in one line
files.py        files that are there whole or not at all
"""
