"""What a step would take elsewhere, by the cost model and a measured run: of advise.py and diagnose.py."""
