"""The parts of doctor.py. Each subject's module gathers facts on every rank and checks them."""
