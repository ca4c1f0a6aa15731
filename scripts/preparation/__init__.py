"""The parts of prepare.py: from documents to token shards, in several processes, with resume."""
