"""Linear layers in float32 on a CPU, computed by oneDNN.

For float32 torch calls MKL, which leaves half of the vector units of AMD's CPUs idle: oneDNN is more than twice as fast
there. In the shorter formats, and on GPUs, torch chooses well by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor


class OneDnnLinear(torch.nn.Linear):
    """A linear layer; differs from its base class in rounding only."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (its name in the base class)
        """The operation with which torch's own compiler (Inductor) replaces linear layers."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise(input, self.weight, self.bias, "none", [], "")
        return output


def use_onednn(model: torch.nn.Module) -> None:
    """Changes those layers of a model that compute in float32 on a CPU, where torch was built with oneDNN."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return
    for layer in model.modules():
        # Not subclasses: they compute something of their own.
        if type(layer) is torch.nn.Linear and (layer.weight.dtype, layer.weight.device.type) == (torch.float32, "cpu"):
            layer.__class__ = OneDnnLinear
