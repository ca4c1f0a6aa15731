"""Tools for maintainers: the generated parts of the documentation, and the wheel."""
