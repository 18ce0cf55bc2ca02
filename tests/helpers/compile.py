"""Compile kernels without a GPU: record the launches of a launcher, and compile what they would launch."""

import functools
from dataclasses import dataclass

import torch
import triton
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from helpers.reductions import scattered_reductions
from helpers.targets import GPUS
from ropewalk import apply_rope
from ropewalk import device as gpu
from ropewalk.ops.attention.triton import weigh
from ropewalk.ops.rope import launch as rope_launch

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
}
# Bounds on spills hold from Triton 3.7 on: tiles were chosen by its reports, and 3.6 spills up to 1 KB on gfx942.
OLDER_TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7)


@dataclass
class Recorder:
    """Stand in for a kernel, and append each launch: the kernel, its arguments and its keywords."""

    kernel: object
    launches: list

    def __getitem__(self, grid):
        return lambda *arguments, **keywords: self.launches.append((self.kernel, arguments, keywords))


def rotate_anywhere(monkeypatch):
    """Let launchers rotate and weigh tensors on the CPU, where the kernels that they ask for do not run."""
    rotate = functools.partial(apply_rope, layout="bhtd")
    monkeypatch.setattr(rope_launch, "rotate_features", lambda *tensors, on, **keywords: rotate(*tensors, **keywords))
    monkeypatch.setattr(weigh, "weigh_features", lambda k, weights, on: k.mul_(weights))


def pretend_target(monkeypatch, target):
    """Let launchers find the target in this machine, and no interpreter."""
    backend, arch = GPUS[target].backend, GPUS[target].arch
    monkeypatch.setattr(gpu, "is_interpreted", lambda: False)
    monkeypatch.setattr(gpu, "is_rocm", lambda: backend == "hip")
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    rotate_anywhere(monkeypatch)
    if backend == "cuda":
        monkeypatch.setattr(gpu, "current_capability", lambda: divmod(arch, 10))


def describe(value, path, specialised, constants, attributes):
    """Return a value's type as Triton's compiler writes it; note constants, and values divisible by 16."""
    if isinstance(value, tuple):
        # Triton specialises numbers in a tuple, whatever `do_not_specialize` says.
        parts = [describe(part, (*path, index), True, constants, attributes) for index, part in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, TensorDescriptor):
        block = ",".join(map(str, value.block_shape))
        return f"tensordesc<{POINTERS[value.base.dtype][1:]}[{block}]>"
    if isinstance(value, torch.Tensor):
        if value.data_ptr() % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, int) and not isinstance(value, bool) and not (specialised and value == 1):
        if specialised and value % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return "i32"
    constants[path] = value
    return "constexpr"


def describe_launch(kernel, arguments, keywords, describe=describe):
    """Return the signature, constants and attributes of a kernel for these arguments."""
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | keywords
    signature, constants, attributes = {}, {}, {}
    for index, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        if parameter.is_constexpr:
            signature[name], constants[index,] = "constexpr", values[name]
        else:
            specialised = not parameter.do_not_specialize
            signature[name] = describe(values[name], (index,), specialised, constants, attributes)
    return signature, constants, attributes


def compile_launch(kernel, arguments, keywords, target):
    """Compile as Triton's launcher would for these arguments."""
    options = {name: keywords[name] for name in ("num_warps", "num_stages", "maxnreg") if name in keywords}
    signature, constants, attributes = describe_launch(kernel, arguments, keywords)
    return compile_source(ASTSource(kernel, signature, constexprs=constants, attrs=attributes), target, options)


def compile_source(source, target, options):
    """Compile a program, which must have no reduction that some Tritons compile wrong."""
    compiled = triton.compile(source, target=target, options=options)
    scattered = scattered_reductions(compiled.asm["ttgir"])
    assert not scattered, scattered
    return compiled
