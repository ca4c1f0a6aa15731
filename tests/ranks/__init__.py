"""Tests under mpirun, and of programs that run under it."""
