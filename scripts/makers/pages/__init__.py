"""The parts of make_docs.py. A part runs what a page shows and returns the Markdown that goes between its marks."""
