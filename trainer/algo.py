"""The mathematics of GRPO as pure functions on tensors. B = sequences, T = response positions, N = rollouts per prompt.

GRPO: Shao et al. 2024, arXiv:2402.03300. Clipping: Schulman et al. 2017, arXiv:1707.06347, with separate bounds as in DAPO
(Yu et al. 2025, arXiv:2503.14476). The loss averages over all policy tokens of the batch (verl's `token-mean`), not per
sequence as in the GRPO paper.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class PolicyLoss(NamedTuple):
    loss: Tensor  # scalar
    clipped_fraction: Tensor  # scalar, share of tokens whose ratio was clipped
    kl: Tensor  # scalar, estimate of KL(old || new)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of `values` (B, T) where `mask` (B, T) is 1."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def group_advantages(scores: Tensor, divide_by_std: bool) -> Tensor:
    """Return how much better each rollout is than its group: `scores` (prompts, N) minus the group mean.

    With `divide_by_std` in units of the group's standard deviation (GRPO); without, as in Dr. GRPO (arXiv:2503.20783).
    A group whose rollouts all score the same has advantage 0 everywhere.
    """
    centred = scores - scores.mean(dim=1, keepdim=True)
    return centred / (scores.std(dim=1, keepdim=True) + 1e-6) if divide_by_std else centred


def leave_one_out_advantages(scores: Tensor) -> Tensor:
    """Return each of `scores` (prompts, N) minus the mean of the other rollouts of its group (RLOO, arXiv:2402.14740)."""
    rollouts = scores.shape[1]
    return (scores - scores.mean(dim=1, keepdim=True)) * rollouts / (rollouts - 1)


def log_probs_and_entropy(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probability of `tokens` (B, T) and entropy (B, T) under `logits` (B, T, vocabulary)."""
    log_p = torch.log_softmax(logits, dim=-1)
    return log_p.gather(-1, tokens[..., None])[..., 0], -(log_p.exp() * log_p).sum(dim=-1)


def clipped_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """Return PPO's clipped surrogate; `log_probs`, `old_log_probs`, `mask` are (B, T), `advantages` (B, 1) or (B, T)."""
    log_ratio = log_probs - old_log_probs
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(
        loss=masked_mean(torch.maximum(unclipped, clipped), mask),
        clipped_fraction=masked_mean((clipped > unclipped).float(), mask).detach(),
        kl=masked_mean(-log_ratio, mask).detach(),
    )


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Return the per-token estimate (B, T) of KL(policy || reference) from samples of the policy.

    `kl` is the plain difference (k1); `low_var_kl` is k3, never negative, http://joschu.net/blog/kl-approx.html.
    """
    if kind == "kl":
        return log_probs - ref_log_probs
    log_ratio = ref_log_probs - log_probs
    return log_ratio.exp() - log_ratio - 1
