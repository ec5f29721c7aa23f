"""The learning side: the supervised warm-up and the GRPO update of the policy."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainer import algo
from trainer.model import TinyGPT
from trainer.tasks import Problem, demonstration
from trainer.tokenizer import EOS, PAD, encode


@dataclass(frozen=True)
class Batch:
    """Trajectories, prompt and response, from position 0 on and padded on the right; T counts predicted positions."""

    tokens: Tensor  # (B, T + 1)
    mask: Tensor  # (B, T), 1 where the predicted token was written by the policy
    advantages: Tensor  # (B, 1)
    old_log_probs: Tensor  # (B, T)
    ref_log_probs: Tensor  # (B, T)

    def __getitem__(self, rows: Tensor) -> "Batch":
        return Batch(*(getattr(self, entry.name)[rows] for entry in fields(self)))


@dataclass(frozen=True)
class Objective:
    """What `Learner.update` minimises."""

    clip_low: float
    clip_high: float
    kl_coef: float
    kl_kind: str
    entropy_coeff: float


def pack(sequences: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Pad pairs (tokens, mask) on the right; return tokens (B, T + 1) and the mask of the predicted positions (B, T)."""
    length = max(len(tokens) for tokens, _ in sequences)
    tokens = torch.tensor([tokens + [PAD] * (length - len(tokens)) for tokens, _ in sequences])
    mask = torch.tensor([mask + [0] * (length - len(mask)) for _, mask in sequences], dtype=torch.float32)
    return tokens, mask[:, 1:]


class Learner:
    """The policy, the reference it is kept close to, and the optimizer."""

    def __init__(self, model: TinyGPT, reference: TinyGPT, learning_rate: float, grad_clip: float) -> None:
        self.model = model
        self.reference = reference.requires_grad_(False)
        self._grad_clip = grad_clip
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)

    def state(self) -> dict[str, dict[str, Any]]:
        return {
            "model": self.model.state_dict(),
            "reference": self.reference.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }

    def load_state(self, state: dict[str, dict[str, Any]]) -> None:
        self.model.load_state_dict(state["model"])
        self.reference.load_state_dict(state["reference"])
        self._optimizer.load_state_dict(state["optimizer"])

    def warm_up(
        self, problems: Iterator[Problem], steps: int, batch_size: int, learning_rate: float, rng: random.Random
    ) -> float:
        """Imitate sloppy demonstrations and return the last loss; the result becomes the reference."""
        loss = 0.0
        if steps:
            optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, weight_decay=0.01, fused=True)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
            for _ in range(steps):
                demonstrations = [_tokens_and_mask(next(problems), rng) for _ in range(batch_size)]
                optimizer.zero_grad()
                loss = self._imitate(demonstrations)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
        self.reference.load_state_dict(self.model.state_dict())
        return loss

    def _imitate(self, demonstrations: list[tuple[list[int], list[int]]]) -> float:
        """Accumulate the gradient of the mean cross-entropy over what the demonstrator wrote."""
        demonstrations = sorted(demonstrations, key=lambda pair: len(pair[0]))
        policy_tokens = sum(sum(mask) for _, mask in demonstrations)
        middle = len(demonstrations) // 2
        loss = 0.0
        for part in demonstrations[:middle], demonstrations[middle:]:  # short and long ones: much less padding
            tokens, mask = pack(part)
            logits = self.model(tokens[:, :-1])
            losses = functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")  # (B, T)
            part_loss = (losses * mask).sum() / policy_tokens
            part_loss.backward()
            loss += part_loss.item()
        return loss

    def log_probs(self, model: TinyGPT, tokens: Tensor) -> Tensor:
        """Return log-probabilities (B, T) of `tokens` (B, T + 1), the first of which is not predicted."""
        with torch.no_grad():
            return algo.log_probs_and_entropy(model(tokens[:, :-1]), tokens[:, 1:])[0]

    def update(
        self, batch: Batch, objective: Objective, epochs: int, mini_batch: int, generator: torch.Generator
    ) -> dict[str, float]:
        """Take an optimizer step per `mini_batch` rows, `epochs` times over `batch`; return verl's actor metrics, averaged."""
        steps = [
            self._step(batch[rows], objective)
            for _ in range(epochs)
            for rows in torch.randperm(len(batch.tokens), generator=generator).split(mini_batch)
        ]
        return {name: fmean(step[name] for step in steps) for name in steps[0]}

    def _step(self, batch: Batch, objective: Objective) -> dict[str, float]:
        logits = self.model(batch.tokens[:, :-1])
        log_probs, entropies = algo.log_probs_and_entropy(logits, batch.tokens[:, 1:])
        policy = algo.clipped_policy_loss(
            log_probs, batch.old_log_probs, batch.advantages, batch.mask, objective.clip_low, objective.clip_high
        )
        kl_loss = algo.masked_mean(algo.kl_penalty(log_probs, batch.ref_log_probs, objective.kl_kind), batch.mask)
        entropy = algo.masked_mean(entropies, batch.mask)
        loss = policy.loss + objective.kl_coef * kl_loss - objective.entropy_coeff * entropy
        assert torch.isfinite(loss), "the loss is not finite"
        self._optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._grad_clip)
        self._optimizer.step()
        return {
            "actor/pg_loss": policy.loss.item(),
            "actor/pg_clipfrac": policy.clipped_fraction.item(),
            "actor/ppo_kl": policy.kl.item(),
            "actor/kl_loss": kl_loss.item(),
            "actor/entropy": entropy.item(),
            "actor/grad_norm": grad_norm.item(),
        }


def _tokens_and_mask(problem: Problem, rng: random.Random) -> tuple[list[int], list[int]]:
    prompt = encode(problem.prompt)
    tokens, mask = list(prompt), [0] * len(prompt)
    for text, is_policy in demonstration(problem, rng):
        tokens += encode(text)
        mask += [int(is_policy)] * len(text)
    return [*tokens, EOS], [*mask, 1]
