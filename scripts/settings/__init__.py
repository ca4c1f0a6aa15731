"""The flags of train.py and the settings derived from them, presets of known runs, the tokenizer of a model."""
