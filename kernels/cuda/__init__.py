"""NVIDIA GPUs: numba-cuda kernels whose steps are written once, for the compiler and for the simulator."""
