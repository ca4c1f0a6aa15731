"""Traces in the formats of other tools."""
