"""Exchanges between arrays in host memory: rings and trees of point-to-point messages."""
