"""Inference with a trained model.

cached_model.py         a GPT-2 with a key-value cache
generated_text.py       sampling text after a prompt
evaluation.py           losses of rows of tokens, and of long texts
evaluation_choices.py   multiple-choice evaluations such as HellaSwag
"""
