"""Connect a model on a GPU to a strategy with separate exchange buffers: copies, casts, AdamW."""
