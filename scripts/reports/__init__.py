"""Reports on a run: figures, report.html, TensorBoard's event files."""
