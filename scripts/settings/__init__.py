"""The flags of train.py and what follows from them: known runs' presets, a model's tokenizer."""
