"""What a program of your own takes from here to be traced: docs/your-own-program.md."""
