"""Exchanges between arrays that lie on GPUs: communicators, rings and trees of queued calls, buffers, topology."""
