"""GPT-2's kernels as CUDA C++. So far: all but the matrix products and attention, and no binding to CuPy.

*.cu        the kernels, one subject a file, over common.cuh; each says its formula, shapes, launch geometry and source
compile.py  NVRTC: a .cu file to machine code, without a GPU
launch.py   the launches: arrays to kernel arguments, grids and blocks, written once for GPU and CPU shim

Checked are the compilation for sm_80 and sm_90a and, on a CPU (tests/cuda_shim), the results. No GPU has run them yet.
"""
