"""One rank's mathematics: a GPT-2 with forward and backward written by hand. Knows no MPI.

config.py          the five numbers that make a GPT-2, presets
parameters.py      one flat buffer, named views, initialization
model.py           forward and backward over the layers
kernels.py         the list of kernels, and which set serves a backend
numpy_kernels/     the kernels on CPU cores
cupy_kernels/      the kernels on a GPU, never yet run on one (docs/gpu.md)
optimizer.py       AdamW on any flat range       clipping.py  by the global norm; outliers skipped
schedule.py        learning rate over the steps
shards.py          llm.c token files        windows.py   which tokens a step sees
texts.py           text to shards           tokenizers.py  gpt2 or bytes
weights.py         parameters from whatever holds them: llmc.py  llm.c's files    huggingface.py  Hugging Face's folders
safetensors.py     the file format of those folders, and of state_file.py: a rank's part of a checkpoint
checkpoints.py     folders from which training goes on, complete or not there
generate.py        one token after another, with a key/value cache    sampling.py  which    generated_text.py  as text
evaluation.py      losses of rows and of long texts    evaluation_choices.py  HellaSwag in llm.c's files
errors.py          UserError: the user's mistake, in one line
"""
