"""From text to the windows of tokens that training reads: tokenizers, texts, shards, windows."""
