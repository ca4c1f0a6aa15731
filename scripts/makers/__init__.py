"""Tools for who works on the project: the generated parts of the documentation, checks of GPU and cost model."""
