"""What is made of a run for people to look at: figures, report.html, TensorBoard's event files."""
