"""Where every rank is while a job runs, and who holds the others up."""
