"""Files of parameters and state.

weights.py           reads parameters of any format, which it detects; the formats:
llmc.py              llm.c's model checkpoints; llmc_header.py is the header that all files of llm.c share
huggingface*.py      folders of Hugging Face's transformers: reading, their config.json, writing
checkpoints.py       checkpoints to resume training, written by all ranks; checkpoint_files.py is each rank's file
safetensors.py       the file format of Hugging Face's tensors, and of checkpoints
stored_numbers.py    conversion between float32 in memory and float32, float16 or bfloat16 in files
"""
