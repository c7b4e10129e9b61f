"""View tensors as the bytes of a safetensors file."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
}
"""Types of torch → their names in safetensors."""

DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}
"""Names in safetensors → types of torch."""


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy; writing to them changes the tensor."""
    if not tensor.numel():
        return memoryview(bytearray())
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
