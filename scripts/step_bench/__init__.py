"""Contenders, floors and tables of bench_step.py."""
