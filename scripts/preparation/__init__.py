"""What prepare.py is made of: from documents to token shards, in several processes, to be gone on with."""
