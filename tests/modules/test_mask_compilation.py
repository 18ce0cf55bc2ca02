"""The kernel that reads masks of keys compiles for every target and dtype, and uses little of a GPU."""

import pytest
import torch
from helpers.targets import TARGETS, resources, spilled_bytes

from ropewalk.modules import mask_kernel

pytestmark = pytest.mark.compile


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", mask_kernel.POINTERS, ids=str)
def test_it_compiles_without_spills(dtype, target, tmp_path):
    sources = [
        mask_kernel.kernel_source(dtype, additive, store, block)
        for additive in {False, dtype.is_floating_point}
        for store in {True, dtype != torch.bool}
        for block in mask_kernel._BLOCKS
    ]
    for source in sources:
        used = resources(mask_kernel.compile_kernel(source, TARGETS[target]), tmp_path)
        assert spilled_bytes(used, target) == 0
        assert used["registers"] <= 128  # of the 512 that a multiprocessor has for each of 128 threads
        assert used["shared"] <= 1024
