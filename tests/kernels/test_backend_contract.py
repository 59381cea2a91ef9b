"""The contract of `backend_contract` for each backend. Kernels of GPUs run in tests/kernels/cuda/simulated."""

import importlib.util

import pytest
from backend_contract import CompilerContract, KernelContract


class TestCpu(CompilerContract, KernelContract):
    name = "cpu"


@pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="needs numba-cuda: the extra 'cuda'")
class TestCuda(CompilerContract):
    name = "sm_86"
    code_every = 9
