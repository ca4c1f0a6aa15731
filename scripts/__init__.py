"""What people run: programs on top, and what they are made of in packages by subject. `makers` is for who works on the
project itself."""
