"""Output about a run for people: figures, report.html, TensorBoard's event files."""
