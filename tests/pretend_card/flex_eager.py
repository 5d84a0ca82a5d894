"""FlexAttention on the pretend card: its operator as it is, dense and uncompiled.

Pretends: Triton is there, so that the update takes FlexAttention with its block masks, forward and backward.
Does not: the kernel, its compilations and their limit, its memory (score matrices are full here).
"""

import importlib.util
from typing import Any

LN2 = 0.6931471805599453  # the operator's logsumexp is in base 2


def install() -> None:
    """torch's and transformers' flex_attention are the plain operator from here on."""
    import torch.nn.attention.flex_attention as flex
    import transformers.integrations.flex_attention as used
    from torch._higher_order_ops.flex_attention import flex_attention as operator

    import grpo_kit.engine._update_memory as update_memory

    def flex_attention(
        query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False,
        kernel_options=None, **more,
    ):  # fmt: skip
        mask = (
            block_mask if block_mask is not None else flex._create_empty_block_mask(query, key)
        )
        options = flex._apply_kernel_options(
            query, key, value, True, dict(kernel_options or {})
        )
        scale = query.size(-1) ** -0.5 if scale is None else scale
        out, lse, *_ = operator(
            query, key, value, score_mod or flex._identity, mask.as_tuple(), scale, options
        )
        if more.get("return_aux") is not None:
            return out, flex.AuxOutput(lse=lse * LN2)
        return (out, lse * LN2) if return_lse else out

    class Wrapped:
        def __init__(self, training: Any = None) -> None:
            pass

        def __call__(self) -> Any:
            return flex_attention

    flex.flex_attention = used.flex_attention = flex_attention
    used.WrappedFlexAttention = Wrapped
    found = importlib.util.find_spec
    update_memory.find_spec = lambda name: object() if name == "triton" else found(name)
