"""What doctor.py is made of: facts of each rank, checks over all of them, findings, the report."""
