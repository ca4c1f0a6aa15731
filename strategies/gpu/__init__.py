"""Join a model on a GPU and a strategy whose exchange buffers are elsewhere: copies, casts, AdamW."""
