"""The parts of prepare.py: turn documents into token shards in several processes; resume an interrupted run."""
