"""The workers that roll out: Ray actors on this machine, or one worker in the trainer's process. Both are used alike.

Ray is started by the trainer, for the trainer, and bound to 127.0.0.1: it needs no network but the loopback device.
"""

import logging
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

import spool
from trainer.agent_loop import Prompt, Trajectory
from trainer.ledger import Recorder
from trainer.rollout import RolloutWorker

_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum is 75 MiB; weights and trajectories take about 1


class WorkersError(Exception):
    """The workers cannot be started; the message says what to do."""


class Workers(Protocol):
    """`generate` keeps the rollouts of a group together and returns one list per worker; see `RolloutWorker`."""

    def set_weights(self, weights: dict[str, Tensor]) -> None: ...

    def generate(
        self, prompts: list[Prompt], temperature: float, step: int, validate: bool
    ) -> list[list[Trajectory]]: ...

    def finish(self) -> None: ...


class LocalWorker:
    """One worker in this process; it shares the trainer's writer, so its `finish` leaves the run open."""

    def __init__(self, recorder: Recorder, arguments: dict[str, Any]) -> None:
        self._worker = RolloutWorker(open_recorder=lambda: recorder, **arguments)

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        self._worker.set_weights(weights)

    def generate(self, prompts: list[Prompt], temperature: float, step: int, validate: bool) -> list[list[Trajectory]]:
        return [self._worker.generate(prompts, temperature, step, validate)]

    def finish(self) -> None:
        pass


class RayWorkers:
    """`count` Ray actors. They start in the background: the first call that needs them waits."""

    def __init__(self, count: int, open_recorder: Callable[[], Recorder], arguments: dict[str, Any]) -> None:
        self._ray = _start_ray(count)
        actor = self._ray.remote(num_cpus=1)(RolloutWorker)
        self._actors = [actor.remote(open_recorder=open_recorder, **arguments) for _ in range(count)]

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        shared = self._ray.put(weights)
        self._ray.get([actor.set_weights.remote(shared) for actor in self._actors])

    def generate(self, prompts: list[Prompt], temperature: float, step: int, validate: bool) -> list[list[Trajectory]]:
        shares = split_groups(prompts, len(self._actors))
        calls = zip(self._actors, shares, strict=True)
        return self._ray.get([actor.generate.remote(share, temperature, step, validate) for actor, share in calls])

    def finish(self) -> None:
        self._ray.get([actor.finish.remote() for actor in self._actors])
        self._ray.shutdown()


def check_loopback() -> None:
    """Raise `WorkersError` if 127.0.0.1 cannot be reached, as in a new network namespace: Ray would wait for it in vain."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        raise WorkersError(
            f"Ray needs the loopback device ({error.strerror}); type `ip link set lo up`, "
            "or roll out without Ray: actor_rollout_ref.rollout.agent.num_workers=0"
        ) from None


def join_run() -> Recorder:
    """Join the trainer's run, named by the environment, as one more writer."""
    return Recorder(spool.init())


def record_nothing() -> Recorder:
    return Recorder(None)


def split_groups(prompts: list[Prompt], parts: int) -> list[list[Prompt]]:
    """Split `prompts` into `parts` lists in order, as equal as whole groups (one sample index) allow."""
    indices = list(dict.fromkeys(prompt.sample_index for prompt in prompts))
    part_of = {index: place * parts // len(indices) for place, index in enumerate(indices)}
    return [[prompt for prompt in prompts if part_of[prompt.sample_index] == part] for part in range(parts)]


def _start_ray(cpus: int) -> Any:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # silences a warning about GPUs
    import ray

    # Ray's sockets lie below this folder and their paths may have 107 characters. Users must not share it.
    folder = Path(tempfile.gettempdir()) / f"ray-trainer-{os.getuid()}"
    ray.init(
        address="local",
        num_cpus=cpus,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        logging_level=logging.ERROR,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(folder),
    )
    return ray
