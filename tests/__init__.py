"""Rooms: unit (one process), ranks (under mpirun), gpu (on stand-ins, and on_device), suites (whole systems)."""
