"""What needs a GPU: `make test-gpu`. Without one these tests skip, saying so."""
