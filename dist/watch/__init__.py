"""Track where every rank is while a job runs, and name the ranks that hold up the others."""
