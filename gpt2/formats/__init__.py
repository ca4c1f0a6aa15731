"""Files of parameters and state: llm.c's, Hugging Face's, safetensors, checkpoints."""
