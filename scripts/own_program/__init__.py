"""Tracing for a program of your own: docs/your-own-program.md."""
