"""The training: warm-up, then for each step roll out, compare within groups, update, validate, record, save.

Everything random follows from `data.seed` and the step, so a resumed training needs no generator's state: it takes the steps
after the checkpoint exactly as it would have.
"""

import dataclasses
import functools
import random
from typing import Any

import torch
from torch import Tensor

import spool
from trainer import algo
from trainer.agent_loop import Prompt, Trajectory
from trainer.checkpoint import CheckpointError, Checkpoints
from trainer.config import Config
from trainer.data import Problems, load_data
from trainer.learner import Batch, Learner, Objective, pack
from trainer.ledger import Recorder
from trainer.metrics import Metrics, Timings, data_metrics, throughput_metrics, validation_metrics
from trainer.model import TinyGPT
from trainer.tokenizer import VOCABULARY_SIZE
from trainer.workers import LocalWorker, RayWorkers, Workers, check_loopback, join_run, record_nothing


def fit(config: Config) -> None:
    """Train as configured.

    Raises `DataError`, `WorkersError`, `CheckpointError` or `spool.SpoolError` before anything has started.
    """
    torch.set_num_threads(1)  # the actors need the other cores
    if config.actor_rollout_ref.rollout.agent.num_workers:
        check_loopback()
    problems = load_data(
        config.data.train_files,
        config.data.val_files,
        config.data.train_max_samples,
        config.data.val_max_samples,
        config.data.train_batch_size,
        config.data.seed,
    )
    names = config.trainer.project_name, config.trainer.experiment_name
    checkpoints = Checkpoints(config.trainer.default_local_dir or "checkpoints/{}/{}".format(*names))
    checkpoints.prepare()
    if config.trainer.resume_mode == "disable":
        checkpoints.forget()
    last_step = config.trainer.total_training_steps or config.trainer.total_epochs * problems.steps_per_epoch
    step = checkpoints.latest_step()
    if step is not None and step >= last_step:
        print(
            f"already at step {step} of {last_step}; train longer, or start anew: trainer.resume_mode=disable",
            flush=True,
        )
        return
    state = None if step is None else load_state(checkpoints, step, config)
    recorder = open_recorder(config, checkpoints, step or 0)
    status = "failed"
    try:
        workers = start_workers(config, recorder)
        training = Training(config, problems, workers, recorder, checkpoints)
        training.begin(state)
        for training_step in range((step or 0) + 1, last_step + 1):
            training.take(training_step, is_last=training_step == last_step)
        workers.finish()
        status = "finished"
    finally:
        recorder.finish(status)


def load_state(checkpoints: Checkpoints, step: int, config: Config) -> dict[str, Any]:
    state = checkpoints.load(step)
    if state["architecture"] != dataclasses.asdict(config.actor_rollout_ref.model):
        raise CheckpointError(
            f"{checkpoints.folder}: the checkpoints are of another actor_rollout_ref.model; start anew: trainer.resume_mode=disable"
        )
    return state


def open_recorder(config: Config, checkpoints: Checkpoints, step: int) -> Recorder:
    """Begin a spool run, or the next attempt of the run that the checkpoints belong to, from `step` on."""
    if "spool" not in config.trainer.logger:
        return Recorder(None)
    run_id = checkpoints.run_id()
    resumption: dict[str, Any] = {"run_id": run_id, "resume": True, "resumed_from_step": step} if run_id else {}
    run = spool.init(
        project=config.trainer.project_name,
        experiment=config.trainer.experiment_name,
        config=dataclasses.asdict(config),
        **resumption,
    )
    checkpoints.begin_run(run.id)
    for path in config.data.train_files + config.data.val_files:
        run.log_input(path)
    return Recorder(run)


def start_workers(config: Config, recorder: Recorder) -> Workers:
    rollout = config.actor_rollout_ref.rollout
    is_recorded = "spool" in config.trainer.logger
    arguments = {
        "new_model": new_model(config),
        "seed": config.data.seed,
        "max_prompt_length": config.data.max_prompt_length,
        "max_response_length": config.data.max_response_length,
        "max_turns": rollout.multi_turn.max_assistant_turns,
        "tool_failure_rate": rollout.multi_turn.tool_failure_rate,
        "traced_samples": rollout.trace.max_samples_per_step_per_worker if is_recorded and rollout.trace.backend else 0,
        "trace_text": rollout.trace.token2text,
    }
    if rollout.agent.num_workers == 0:
        return LocalWorker(recorder, arguments)
    return RayWorkers(rollout.agent.num_workers, join_run if is_recorded else record_nothing, arguments)


def new_model(config: Config) -> functools.partial[TinyGPT]:
    model = config.actor_rollout_ref.model
    return functools.partial(
        TinyGPT, VOCABULARY_SIZE, model.num_hidden_layers, model.num_attention_heads, model.hidden_size
    )


class Training:
    """The state of a training between its steps."""

    def __init__(
        self, config: Config, problems: Problems, workers: Workers, recorder: Recorder, checkpoints: Checkpoints
    ) -> None:
        self._config = config
        self._problems = problems
        self._workers = workers
        self._recorder = recorder
        self._checkpoints = checkpoints
        torch.manual_seed(config.data.seed)  # the initial weights
        model, actor = new_model(config), config.actor_rollout_ref.actor
        self.learner = Learner(model(), model(), actor.optim.lr, actor.grad_clip)

    def begin(self, state: dict[str, Any] | None) -> None:
        """Warm up, or go on from the state of a checkpoint; then validate."""
        metrics: Metrics = {}
        timings = Timings()
        if state is None:
            step, config = 0, self._config.trainer
            self._say(f"warm-up: {config.warmup_steps} steps on sloppy demonstrations")
            rng = random.Random(f"{self._config.data.seed}/warm-up")
            with timings.measure("warmup"):
                loss = self.learner.warm_up(
                    self._problems.more, config.warmup_steps, config.warmup_batch_size, config.warmup_lr, rng
                )
            metrics["warmup/loss"] = loss
            self._say(f"warm-up: loss {loss:.3f} after {timings.seconds['warmup']:.1f} s")
            self._save(step)
        else:
            step = state["step"]
            self.learner.load_state(state)
            self._say(f"resumed from step {step}")
        if self._config.trainer.val_before_train:
            metrics |= self._validate(step, timings)
        if metrics:
            seconds = {f"timing_s/{name}": value for name, value in timings.seconds.items()}
            self._recorder.log({**metrics, **seconds, "training/global_step": step}, step)

    def take(self, step: int, *, is_last: bool) -> None:
        """Take GRPO step `step` (from 1 on), record it, and save it where due."""
        config, timings = self._config, Timings()
        with timings.measure("step"):
            shares, metrics = self._learn(step, timings)
            if config.trainer.test_freq and (is_last or step % config.trainer.test_freq == 0):
                metrics |= self._validate(step, timings)
        metrics |= throughput_metrics(shares, timings.seconds)
        metrics |= {
            "actor/lr": config.actor_rollout_ref.actor.optim.lr,
            "training/global_step": step,
            "training/epoch": (step - 1) // self._problems.steps_per_epoch,
        }
        self._recorder.log(metrics, step)
        self._say(
            f"step {step}: score {metrics['critic/score/mean']:.3f}  acc {metrics['training/acc']:.3f}  "
            f"turns {metrics['num_turns/mean']:.2f}  entropy {metrics['actor/entropy']:.3f}  "
            f"kl {metrics['actor/kl_loss']:.4f}  {metrics['timing_s/step']:.2f} s"
        )
        if is_last or (config.trainer.save_freq and step % config.trainer.save_freq == 0):
            self._save(step)  # after its record: killed between the two, the step is recorded twice rather than never

    def _learn(self, step: int, timings: Timings) -> tuple[list[list[Trajectory]], Metrics]:
        """Roll out and update; return the trajectories of each worker and what there is to say of them."""
        actor, rollout = self._config.actor_rollout_ref.actor, self._config.actor_rollout_ref.rollout
        with timings.measure("update_weights"):
            self._workers.set_weights(self.learner.model.state_dict())
        with timings.measure("gen"):
            shares = self._workers.generate(self._train_prompts(step), rollout.temperature, step, validate=False)
        trajectories = [trajectory for share in shares for trajectory in share]
        tokens, mask = pack([with_mask(trajectory) for trajectory in trajectories])
        with timings.measure("old_log_prob"):
            old_log_probs = self.learner.log_probs(self.learner.model, tokens)
        with timings.measure("ref"):
            ref_log_probs = self.learner.log_probs(self.learner.reference, tokens)
        with timings.measure("adv"):
            rewards = self._rewards(trajectories, old_log_probs, ref_log_probs, mask)  # (B)
            advantages = self._advantages(rewards.view(-1, rollout.n)).view(-1, 1)  # (B, 1)
        with timings.measure("update_actor"):
            metrics: Metrics = dict(
                self.learner.update(
                    Batch(tokens, mask, advantages, old_log_probs, ref_log_probs),
                    self._objective(),
                    actor.ppo_epochs,
                    actor.ppo_mini_batch_size * rollout.n,
                    torch.Generator().manual_seed(self._config.data.seed * 1_000_003 + step),
                )
            )
        return shares, metrics | data_metrics(trajectories, rewards, advantages, mask)

    def _rewards(self, trajectories: list[Trajectory], old: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
        algorithm = self._config.algorithm
        rewards = torch.tensor([trajectory.score for trajectory in trajectories])
        if algorithm.use_kl_in_reward:
            rewards -= algorithm.kl_ctrl.kl_coef * (algo.kl_penalty(old, ref, "kl") * mask).sum(dim=1)
        return rewards

    def _advantages(self, rewards: Tensor) -> Tensor:
        algorithm = self._config.algorithm
        if algorithm.adv_estimator == "rloo":
            return algo.leave_one_out_advantages(rewards)
        return algo.group_advantages(rewards, algorithm.norm_adv_by_std_in_grpo)

    def _objective(self) -> Objective:
        actor = self._config.actor_rollout_ref.actor
        return Objective(
            clip_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
            clip_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
            kl_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
            kl_kind=actor.kl_loss_type,
            entropy_coeff=actor.entropy_coeff,
        )

    def _train_prompts(self, step: int) -> list[Prompt]:
        size = self._config.data.train_batch_size
        epoch, place = divmod(step - 1, self._problems.steps_per_epoch)
        order = list(range(len(self._problems.train)))
        if self._config.data.shuffle:
            random.Random(f"{self._config.data.seed}/{epoch}").shuffle(order)
        chosen = order[place * size : (place + 1) * size]
        return [
            Prompt(self._problems.train[index], index, rollout)
            for index in chosen
            for rollout in range(self._config.actor_rollout_ref.rollout.n)
        ]

    def _validate(self, step: int, timings: Timings) -> Metrics:
        """Roll out the validation problems, record some of the generations, and return the averages."""
        values = self._config.actor_rollout_ref.rollout.val_kwargs
        prompts = [
            Prompt(problem, index, rollout)
            for index, problem in enumerate(self._problems.validation)
            for rollout in range(values.n)
        ]
        with timings.measure("testing"):
            self._workers.set_weights(self.learner.model.state_dict())
            temperature = values.temperature if values.do_sample else 0.0
            shares = self._workers.generate(prompts, temperature, step, validate=True)
        trajectories = [trajectory for share in shares for trajectory in share]
        rows = [generation_row(one) for one in trajectories[: self._config.trainer.log_val_generations]]
        self._recorder.log_generations(rows, step, split="val")
        metrics = validation_metrics(trajectories, values.n)
        accuracies = (f"{name} {value:.3f}" for name, value in metrics.items() if name.startswith("val-core/"))
        self._say(f"step {step}: {'  '.join(accuracies)}")
        return metrics

    def _save(self, step: int) -> None:
        self._recorder.flush()  # a power cut must not leave a checkpoint of a step whose record is lost
        architecture = dataclasses.asdict(self._config.actor_rollout_ref.model)
        self._checkpoints.save(step, {"step": step, "architecture": architecture, **self.learner.state()})

    def _say(self, line: str) -> None:
        if "console" in self._config.trainer.logger:
            print(line, flush=True)


def with_mask(trajectory: Trajectory) -> tuple[list[int], list[int]]:
    """Return all tokens of `trajectory` and the mask of those the policy wrote."""
    prompt, response = trajectory.prompt_tokens, trajectory.response_tokens
    return prompt + response, [0] * len(prompt) + trajectory.response_mask


def generation_row(trajectory: Trajectory) -> dict[str, Any]:
    """Return what is recorded of a validation rollout; the input is the problem's own text, whatever the tokens hold."""
    problem = trajectory.prompt.problem
    return {
        "input": problem.prompt,
        "output": trajectory.text,
        "label": problem.answer,
        "score": trajectory.score,
        "acc": trajectory.accuracy,
        "data_source": problem.data_source,
        "sample_index": trajectory.prompt.sample_index,
        "rollout_n": trajectory.prompt.rollout_n,
        "num_turns": trajectory.turns + 1,
        "tool_calls": trajectory.tool_calls,
        "tool_errors": trajectory.tool_errors,
    }
