"""The mathematics of one rank: a GPT-2 whose forward and backward are written by hand. Knows no MPI.

config.py          the five numbers that make a GPT-2, and the presets
model.py           forward and backward; embedding.py: the tied embedding; activations.py: the arrays kept for backward
parameters.py      one flat buffer, named views, initialization
optimizer.py       AdamW on any flat range, gradient clipping, the learning rate
rounding.py        bfloat16 parameters from float32 ones
parallel_model.py  a model that several ranks share; model_shards.py says which tensors each holds, pipeline.py in which
                   order stages compute, boxes.py reads a model that was stored in other shards
kernels/           the computation of each layer: numpy/ on CPU cores, cupy/ on a GPU; __init__.py is the contract
data/              tokenizers, texts, token shards, and the windows that a step reads
formats/           files of parameters and state: weights.py reads any of them, checkpoints.py writes and resumes
inference/         text generation, losses of given texts, HellaSwag
errors.py          UserError: a mistake of the user, in one line
files.py           files that appear whole or not at all
"""
