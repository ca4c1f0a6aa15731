"""Files of parameters and state.

weights.py           whatever holds parameters, by what is found at a path; the formats:
llmc.py              llm.c's model checkpoints; llmc_header.py is the header of all of llm.c's files
huggingface*.py      folders of Hugging Face's transformers: reading, their config.json, writing
checkpoints.py       what training goes on from, written by all ranks; checkpoint_files.py is each rank's file
safetensors.py       the file format of Hugging Face's tensors, and of checkpoints
stored_numbers.py    float32, float16 and bfloat16 in files, from and to float32 in memory
"""
