"""The programs that people run, and the packages they are built from, by subject. `makers` is for people who work on
the project itself."""
