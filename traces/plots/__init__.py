"""One picture a file, and what all of them share."""
