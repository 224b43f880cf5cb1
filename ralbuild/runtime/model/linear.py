"""Matrix products of bfloat16 weights on processors without bfloat16 instructions.

Such a processor converts every element inside the product: from about 8 rows on it is faster to
convert the weight once and multiply in float32, five times so for a prompt of 128 tokens (measured
on AVX2, SmolLM2-135M). Memory stays at two bytes a weight; one layer's copy lives for one product.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import linear

MANY_ROWS = 8


class WideLinear(nn.Linear):  # type: ignore[misc] # torch is untyped to us
    """`nn.Linear` that multiplies in float32 when there are `MANY_ROWS` or more."""

    def forward(self, rows: Tensor) -> Tensor:
        """Return [..., out] for [..., in], in the dtype of ``rows``."""
        if rows.numel() < MANY_ROWS * self.in_features:
            return linear(rows, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.float()
        return linear(rows.float(), self.weight.float(), bias).to(rows.dtype)


def widen_linears(model: nn.Module) -> None:
    """Make every plain `nn.Linear` of ``model`` a `WideLinear`; their weights stay what they are."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = WideLinear
