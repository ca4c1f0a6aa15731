"""The flags of train.py, and what follows from them: presets of known runs, the tokenizer of a model."""
