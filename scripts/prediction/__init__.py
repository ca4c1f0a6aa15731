"""Predictions of steps by the cost model, calibrated by measured runs, for advise.py and diagnose.py."""
