"""The contract of kernels that run, for those of GPUs in the simulator."""

from dataclasses import replace

from backend_contract import KernelContract


class TestCuda(KernelContract):
    name = "sm_86"
    shapes = ("attend h7/1 d80 q2", "qk h1/1 d8 q1", "sv h4/2 d128 q3", "attend h2/2 d256 q1")

    @staticmethod
    def small(candidate):
        plan = candidate.plan
        return replace(candidate, plan=replace(plan, splits=min(plan.splits, 2), warps=min(plan.warps, 2)))
