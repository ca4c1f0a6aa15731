"""Inference with a trained model: sampled text, losses of given texts, multiple-choice evaluations."""
