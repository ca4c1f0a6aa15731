"""Stand-ins for CUDA, CuPy, cuBLASLt, cuDNN and NCCL on a CPU."""
