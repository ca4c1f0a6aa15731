"""The parts of make_docs.py. A part runs programs and returns the Markdown that goes between its marks."""
