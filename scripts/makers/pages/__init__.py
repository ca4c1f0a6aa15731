"""The parts of make_docs.py: each runs what a page shows, and writes its numbers and figures there."""
