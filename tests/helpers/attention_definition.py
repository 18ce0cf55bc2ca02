"""Attention by its definition, for q (B, H, Tq, D), k and v (B, K, Tk, D)."""

import torch


def attend(q, k, v, causal=False):
    """The output in the dtype of q; causal attention ends at the last key."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        ahead = torch.arange(k.shape[2]) > torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
        scores = scores.masked_fill(ahead, -torch.inf)
    return scores.softmax(-1) @ v
