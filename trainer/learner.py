"""The learning side: supervised warm-up, and the GRPO update of the policy."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainer import algo
from trainer.agent_loop import Trajectory
from trainer.model import TinyGPT
from trainer.tasks import Problem, demonstration
from trainer.tokenizer import EOS, PAD, encode


@dataclass
class Batch:
    """Prompt and response of each trajectory from position 0 on, padded on the right; T counts predicted positions."""

    tokens: Tensor  # (B, T + 1)
    mask: Tensor  # (B, T), 1 where the predicted token was written by the policy
    advantages: Tensor  # (B, 1)
    old_log_probs: Tensor  # (B, T)
    ref_log_probs: Tensor  # (B, T)

    def __getitem__(self, rows: Tensor) -> "Batch":
        return Batch(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


def pack(sequences: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Pad pairs (tokens, mask) on the right and return tokens (B, T + 1) and the mask of predicted positions (B, T)."""
    length = max(len(tokens) for tokens, _ in sequences)
    tokens = torch.tensor([tokens + [PAD] * (length - len(tokens)) for tokens, _ in sequences])
    mask = torch.tensor([mask + [0] * (length - len(mask)) for _, mask in sequences], dtype=torch.float32)
    return tokens, mask[:, 1:]


class Learner:
    def __init__(self, model: TinyGPT, reference: TinyGPT, learning_rate: float, grad_clip: float) -> None:
        self.model = model
        self.reference = reference.requires_grad_(False)
        self.reference.load_state_dict(model.state_dict())
        self.grad_clip = grad_clip
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)

    def warm_up(self, problems: Iterator[Problem], steps: int, batch_size: int, learning_rate: float, rng: random.Random) -> float:
        """Imitate sloppy demonstrations and return the last loss; afterwards the reference is the warmed-up policy."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, weight_decay=0.01, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
        loss = 0.0
        for _ in range(steps):
            demonstrations = [_demonstration_tokens(next(problems), rng) for _ in range(batch_size)]
            demonstrations.sort(key=lambda pair: len(pair[0]))
            policy_tokens = sum(sum(mask) for _, mask in demonstrations)
            optimizer.zero_grad()
            loss = 0.0
            for part in (demonstrations[: batch_size // 2], demonstrations[batch_size // 2 :]):  # less padding than in one
                tokens, mask = pack(part)
                logits = self.model(tokens[:, :-1])
                losses = functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
                part_loss = (losses * mask).sum() / policy_tokens
                part_loss.backward()
                loss += part_loss.item()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        self.reference.load_state_dict(self.model.state_dict())
        return loss

    def log_probs(self, model: TinyGPT, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            return algo.log_probs_and_entropy(model(tokens[:, :-1]), tokens[:, 1:])[0]

    def update(self, batch: Batch, mini_batch: int, epochs: int, clip: tuple[float, float], kl: tuple[float, str], entropy_coeff: float, generator) -> dict[str, float]:
        sums = []
        for _ in range(epochs):
            for rows in torch.randperm(len(batch.tokens), generator=generator).split(mini_batch):
                sums.append(self._update_once(batch[rows], clip, kl, entropy_coeff))
        return {key: sum(entry[key] for entry in sums) / len(sums) for key in sums[0]}

    def _update_once(self, batch: Batch, clip, kl, entropy_coeff) -> dict[str, float]:
        log_probs, entropy = algo.log_probs_and_entropy(self.model(batch.tokens[:, :-1]), batch.tokens[:, 1:])
        policy = algo.clipped_policy_loss(log_probs, batch.old_log_probs, batch.advantages, batch.mask, *clip)
        kl_loss = algo.masked_mean(algo.kl_penalty(log_probs, batch.ref_log_probs, kl[1]), batch.mask)
        mean_entropy = algo.masked_mean(entropy, batch.mask)
        loss = policy.loss + kl[0] * kl_loss - entropy_coeff * mean_entropy
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)
        self.optimizer.step()
        return {"actor/pg_loss": policy.loss.item(), "actor/pg_clipfrac": policy.clipped_fraction.item(), "actor/ppo_kl": policy.kl.item(), "actor/kl_loss": kl_loss.item(), "actor/entropy": mean_entropy.item(), "actor/grad_norm": norm.item()}


def _demonstration_tokens(problem: Problem, rng: random.Random) -> tuple[list[int], list[int]]:
    prompt = encode(problem.prompt)
    tokens, mask = list(prompt), [0] * len(prompt)
    for text, is_policy in demonstration(problem, rng):
        tokens += encode(text)
        mask += [int(is_policy)] * len(text)
    return [*tokens, EOS], [*mask, 1]
