"""Tools for maintainers: they generate parts of the documentation, and the wheel."""
