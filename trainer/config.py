"""The configuration: verl's keys where verl has one, with a default that trains in about a minute on two CPU cores.

A key that does not exist is refused before anything starts, and so is a value of the wrong type. Keys that public guides
name but that never existed are answered with the real key, or with where the wish is met. Parsed once, at the edge.
"""

import dataclasses
import difflib
import types
import typing
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError


class ConfigError(Exception):
    """The configuration cannot be used; the message is one sentence for the user."""


def _about(meaning: str, *, choices: tuple[Any, ...] = (), at_least: float | None = None) -> dict[str, Any]:
    return {"meaning": meaning, "choices": choices, "at_least": at_least}


def _key(default: Any, meaning: str, *, choices: tuple[Any, ...] = (), at_least: float | None = None) -> Any:
    return field(default=default, metadata=_about(meaning, choices=choices, at_least=at_least))


@dataclass
class Trainer:
    project_name: str = _key("chained_arithmetic", "name of the project")
    experiment_name: str = _key("grpo", "name of the experiment in the project")
    logger: list[str] = field(
        default_factory=lambda: ["console", "spool"], metadata=_about("where metrics go", choices=("console", "spool"))
    )
    total_epochs: int = _key(1, "passes over the training problems", at_least=1)
    total_training_steps: int | None = _key(None, "GRPO steps instead of whole epochs", at_least=1)
    val_before_train: bool = _key(True, "validate before the first step")
    test_freq: int = _key(5, "steps between validations; 0: never", at_least=0)
    log_val_generations: int = _key(10, "validation generations to record each time", at_least=0)
    save_freq: int = _key(5, "steps between checkpoints; 0: only after the warm-up and at the end", at_least=0)
    default_local_dir: str | None = _key(
        None, "folder of checkpoints; null: checkpoints/<project_name>/<experiment_name>"
    )
    resume_mode: str = _key(
        "auto", "auto: go on from the last checkpoint; disable: start anew", choices=("auto", "disable")
    )
    warmup_steps: int = _key(600, "supervised steps on sloppy demonstrations before GRPO (not in verl)", at_least=0)
    warmup_batch_size: int = _key(32, "demonstrations of a warm-up step (not in verl)", at_least=2)
    warmup_lr: float = _key(6e-3, "peak learning rate of the warm-up (not in verl)", at_least=0)


@dataclass
class Data:
    train_files: list[str] = field(
        default_factory=list, metadata=_about("Parquet or JSONL files of problems; none: chained arithmetic, built in")
    )
    val_files: list[str] = field(default_factory=list, metadata=_about("the same for validation"))
    train_max_samples: int = _key(480, "training problems to use; -1: all of train_files", at_least=-1)
    val_max_samples: int = _key(64, "validation problems to use; -1: all of val_files", at_least=-1)
    train_batch_size: int = _key(16, "problems of a GRPO step", at_least=1)
    max_prompt_length: int = _key(512, "tokens of a prompt; of a longer one the end is kept", at_least=1)
    max_response_length: int = _key(64, "tokens of a response, the tool's answers included", at_least=1)
    shuffle: bool = _key(True, "shuffle the training problems in every epoch")
    seed: int = _key(1, "seed of everything random")


@dataclass
class KlCtrl:
    kl_coef: float = _key(0.001, "weight of KL in the reward, if use_kl_in_reward", at_least=0)


@dataclass
class Algorithm:
    adv_estimator: str = _key("grpo", "group baseline: grpo, or rloo (leave one out)", choices=("grpo", "rloo"))
    norm_adv_by_std_in_grpo: bool = _key(True, "divide advantages by the group's standard deviation (grpo)")
    gamma: float = _key(1.0, "discount; as in verl without effect on grpo and rloo, which have no critic", at_least=0)
    lam: float = _key(1.0, "lambda of GAE; as in verl without effect on grpo and rloo", at_least=0)
    use_kl_in_reward: bool = _key(False, "subtract KL to the warmed-up policy from the reward")
    kl_ctrl: KlCtrl = field(default_factory=KlCtrl)


@dataclass
class Model:
    num_hidden_layers: int = _key(2, "blocks of the transformer (the keys of model are not in verl)", at_least=1)
    num_attention_heads: int = _key(4, "heads; hidden_size must be an even multiple of it", at_least=1)
    hidden_size: int = _key(64, "width of the transformer", at_least=2)


@dataclass
class Optim:
    lr: float = _key(5e-4, "learning rate of GRPO", at_least=0)


@dataclass
class Actor:
    optim: Optim = field(default_factory=Optim)
    grad_clip: float = _key(1.0, "largest norm of the gradient", at_least=0)
    clip_ratio: float = _key(0.2, "how far the policy may move from the rollout's in one step", at_least=0)
    clip_ratio_low: float | None = _key(None, "lower bound, if not clip_ratio", at_least=0)
    clip_ratio_high: float | None = _key(None, "upper bound, if not clip_ratio", at_least=0)
    entropy_coeff: float = _key(0.0, "weight of the entropy bonus", at_least=0)
    use_kl_loss: bool = _key(True, "add KL to the warmed-up policy to the loss")
    kl_loss_coef: float = _key(0.001, "weight of that KL", at_least=0)
    kl_loss_type: str = _key("low_var_kl", "its estimator", choices=("kl", "low_var_kl"))
    ppo_epochs: int = _key(1, "passes over the rollouts of a step", at_least=1)
    ppo_mini_batch_size: int = _key(8, "problems (with all their rollouts) of an optimizer step", at_least=1)


@dataclass
class Agent:
    num_workers: int = _key(2, "Ray actors that roll out; 0: in the trainer's process, without Ray", at_least=0)


@dataclass
class MultiTurn:
    max_assistant_turns: int = _key(5, "turns of the policy in a trajectory", at_least=1)
    tool_failure_rate: float = _key(
        0.03, "share of calculator calls that fail as a busy service would (not in verl)", at_least=0
    )


@dataclass
class Trace:
    backend: str | None = _key(
        "spool", "spool, if it is among trainer.logger; null: no traces", choices=("spool", None)
    )
    max_samples_per_step_per_worker: int = _key(
        1, "problems traced, each with all its rollouts, chosen by hash", at_least=0
    )
    token2text: bool = _key(True, "record the policy's turns as text; false: as token ids")


@dataclass
class ValKwargs:
    n: int = _key(1, "rollouts per validation problem", at_least=1)
    do_sample: bool = _key(False, "sample at temperature; false: greedy")
    temperature: float = _key(1.0, "temperature, if do_sample", at_least=0)


@dataclass
class Rollout:
    n: int = _key(8, "rollouts per problem: the group", at_least=2)
    temperature: float = _key(1.0, "temperature of sampling", at_least=0)
    mode: str = _key("async", "as in verl the only value", choices=("async",))
    agent: Agent = field(default_factory=Agent)
    multi_turn: MultiTurn = field(default_factory=MultiTurn)
    trace: Trace = field(default_factory=Trace)
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)


@dataclass
class ActorRolloutRef:
    model: Model = field(default_factory=Model)
    actor: Actor = field(default_factory=Actor)
    rollout: Rollout = field(default_factory=Rollout)


@dataclass
class Config:
    trainer: Trainer = field(default_factory=Trainer)
    data: Data = field(default_factory=Data)
    algorithm: Algorithm = field(default_factory=Algorithm)
    actor_rollout_ref: ActorRolloutRef = field(default_factory=ActorRolloutRef)


_REAL_NAMES = {
    "algorithm.batch_size": "data.train_batch_size",
    "training.batch_size": "data.train_batch_size",
    "training.epochs": "trainer.total_epochs",
    "algorithm.name": "algorithm.adv_estimator",
    "algorithm.lambda": "algorithm.lam",
    "algorithm.lambda_": "algorithm.lam",
    "trainer.mlflow_trace_sampling": "actor_rollout_ref.rollout.trace.max_samples_per_step_per_worker",
}

_EVERY_STEP = "every step is recorded, which costs one system call; leave the key out"
_TO_TRACKER = "trackers are reached by `spool-sync` after or beside the training, their settings belong there"
_WHOLE_TRACES = "traces are recorded whole; trace.max_samples_per_step_per_worker records fewer of them"
_ELSEWHERE = {
    "trainer.log_frequency": _EVERY_STEP,
    "trainer.log_interval": _EVERY_STEP,
    "trainer.wandb_log_media": "trainer.log_val_generations=0 records no generations",
    "trainer.wandb_proxy": _TO_TRACKER,
    "trainer.wandb_watch": _TO_TRACKER,
    "swanlab_config": _TO_TRACKER,
    "trainer.mlflow_compress_traces": "the spool is compressed Parquet in any case",
    "trainer.mlflow_max_trace_length": _WHOLE_TRACES,
    "actor_rollout_ref.rollout.trace.max_length": _WHOLE_TRACES,
    "actor_rollout_ref.rollout.trace.include_prompt": _WHOLE_TRACES,
    "actor_rollout_ref.rollout.trace.include_response": _WHOLE_TRACES,
    "actor_rollout_ref.model.path": "the model is built here, by actor_rollout_ref.model.hidden_size and its neighbours",
}


def keys(cls: type = Config, prefix: str = "") -> dict[str, dataclasses.Field[Any]]:
    """Return every key by its dotted name, in the order of the dataclasses."""
    found: dict[str, dataclasses.Field[Any]] = {}
    for entry in dataclasses.fields(cls):
        if dataclasses.is_dataclass(entry.type):
            found |= keys(typing.cast("type", entry.type), f"{prefix}{entry.name}.")
        else:
            found[prefix + entry.name] = entry
    return found


def default(entry: "dataclasses.Field[Any]") -> Any:
    return entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()


def load(path: str | None, overrides: list[str]) -> Config:
    """Return the defaults, changed by the YAML file at `path`, then by `overrides` (`a.b.c=value`). Raises `ConfigError`."""
    given: dict[str, Any] = {}
    if path is not None:
        given |= _flat(_read_file(path), "")
    for override in overrides:
        name, equals, _ = override.partition("=")
        if not equals or not name:
            raise ConfigError(f"{override!r} is not an override; write key=value")
        try:
            parsed = OmegaConf.to_container(OmegaConf.from_dotlist([override]))
        except (OmegaConfBaseException, YAMLError):
            raise ConfigError(f"{override!r} cannot be read; the value is written as in YAML") from None
        given |= _flat(parsed, "")
    known = keys()
    config = OmegaConf.structured(Config)
    for name, value in given.items():
        if name not in known:
            raise ConfigError(_unknown(name, list(known)))
        OmegaConf.update(config, name, _checked(name, value, known[name]))
    result = typing.cast("Config", OmegaConf.to_object(config))
    _check_together(result)
    return result


def _read_file(path: str) -> Any:
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a YAML file that can be read ({str(error).splitlines()[0]})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: holds no keys")
    return content


def _flat(tree: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix.removesuffix("."): tree} if prefix else {}
    return {name: value for key, part in tree.items() for name, value in _flat(part, f"{prefix}{key}.").items()}


def _unknown(name: str, known: list[str]) -> str:
    if name in _REAL_NAMES:
        return f"unknown key {name!r}; the key is {_REAL_NAMES[name]}"
    for prefix, answer in _ELSEWHERE.items():
        if name == prefix or name.startswith(f"{prefix}."):
            return f"unknown key {name!r}; {answer}"
    sections = {key.rpartition(".")[0] for key in known}
    if any(section == name or section.startswith(f"{name}.") for section in sections):
        return f"{name!r} is a section, not a key; set one of its keys, as in {next(k for k in known if k.startswith(name))}=..."
    last = name.rpartition(".")[2]
    same_last = [key for key in known if key.rpartition(".")[2] == last]
    close = same_last or difflib.get_close_matches(name, known, n=1)
    return f"unknown key {name!r}; " + (
        f"did you mean {close[0]!r}?" if close else "`python -m trainer --help` lists all keys"
    )


def _checked(name: str, value: Any, entry: "dataclasses.Field[Any]") -> Any:
    """Return `value` as the type of the key. Raises `ConfigError`."""
    kind, is_optional = _kind(entry.type)
    choices, at_least = entry.metadata["choices"], entry.metadata["at_least"]
    if value is None:
        if not is_optional:
            raise ConfigError(f"{name} must be {_WORDS[kind]}, not null")
        return None
    if kind is list and isinstance(value, str):
        value = [value]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind or (kind is list and not all(isinstance(element, str) for element in value)):
        raise ConfigError(f"{name} must be {_WORDS[kind]}{' or null' if is_optional else ''}, not {value!r}")
    for element in value if kind is list else [value]:
        if choices and element not in choices:
            shown = ", ".join("null" if choice is None else str(choice) for choice in choices)
            advice = "; record with spool and replay afterwards with `spool-sync`" if element in _TRACKERS else ""
            raise ConfigError(f"{name}: {element!r} is not one of {shown}{advice}")
    if at_least is not None and not value >= at_least:  # also refuses nan
        raise ConfigError(f"{name} must be at least {at_least:g}, not {value!r}")
    return value


_TRACKERS = ("mlflow", "swanlab", "wandb")
_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text", list: "a text or a list of texts"}


def _kind(annotation: Any) -> tuple[type, bool]:
    if isinstance(annotation, types.UnionType):
        kinds = [kind for kind in typing.get_args(annotation) if kind is not types.NoneType]
        return kinds[0], True
    return typing.get_origin(annotation) or annotation, False


def _check_together(config: Config) -> None:
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    if model.hidden_size % (2 * model.num_attention_heads):
        raise ConfigError("actor_rollout_ref.model.hidden_size must be an even multiple of num_attention_heads")
    for name, samples, paths in (
        ("train", config.data.train_max_samples, config.data.train_files),
        ("val", config.data.val_max_samples, config.data.val_files),
    ):
        if samples == 0 or (samples == -1 and not paths):
            raise ConfigError(f"data.{name}_max_samples must be positive, or -1 for all of data.{name}_files")
    if rollout.temperature == 0:
        raise ConfigError("actor_rollout_ref.rollout.temperature must be above 0: equal rollouts teach nothing")
