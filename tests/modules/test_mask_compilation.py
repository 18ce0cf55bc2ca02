"""The kernel that reads masks of keys compiles for every target and dtype, and uses little of a GPU."""

from types import SimpleNamespace

import pytest
import torch
from helpers.targets import TARGETS, resources, spilled_bytes

from ropewalk.modules.mask_kernel import _BLOCKS, DTYPES, KeysCall, read_keys

pytestmark = pytest.mark.compile


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_it_compiles_without_spills(dtype, target, tmp_path):
    compiled = []

    def launch(kernel, n_programs, /, **arguments):
        compiled.append(kernel.compile(TARGETS[target], **arguments))

    for is_additive in {False, dtype.is_floating_point}:
        for stores in {True, dtype != torch.bool}:
            for n_keys in _BLOCKS:
                mask = torch.empty(2, n_keys, dtype=dtype)
                read_keys(KeysCall(mask, 2, n_keys, is_additive, stores), SimpleNamespace(launch=launch))
    assert len(compiled) >= len(_BLOCKS)
    for kernel in compiled:
        used = resources(kernel, tmp_path)
        assert spilled_bytes(used, target) == 0
        assert used["registers"] <= 128  # of the 512 that a multiprocessor has for each of 128 threads
        assert used["shared"] <= 1024
