"""A trained model at work.

cached_model.py         a GPT-2 to which one more token costs one row
generated_text.py       from a prompt to text, one drawn token after another
evaluation.py           losses of rows of tokens, and of long texts
evaluation_choices.py   multiple-choice evaluations such as HellaSwag
"""
