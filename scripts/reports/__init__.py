"""Reports on a run: figures and report.html."""
