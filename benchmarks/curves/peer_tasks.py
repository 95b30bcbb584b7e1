"""What another package is asked to learn, in the words of its scripts in `contestants/`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from curves.data import described, return_scale
from curves.mathematics import Mathematics
from rl_training.config import TrainConfig
from rl_training.errors import UserError

SCRIPTS = {"sb3": "sb3_curve.py", "d3rlpy": "d3rlpy_curve.py"}
KEYS = ("package", "algo", "networks", "options")


def check_peer(arguments: argparse.Namespace) -> None:
    """Raise `UserError` for a peer that cannot be measured."""
    peer, offline = arguments.peer, arguments.data is not None
    if not isinstance(peer, Mapping) or not {"package", "algo"} <= peer.keys() <= set(KEYS):
        raise UserError(f"peer = {peer!r}: must have package and algo, and may have {KEYS[2:]}")
    if peer["package"] not in SCRIPTS:
        raise UserError(f"peer.package = {peer['package']!r}: must be one of {', '.join(SCRIPTS)}")
    if offline != (peer["package"] == "d3rlpy"):
        raise UserError("peer: d3rlpy learns from data, and sb3 without")
    if arguments.init_from is not None:
        raise UserError("peer: cannot start from another run; remove init_from")


def code_of(
    config: TrainConfig, arguments: argparse.Namespace, rehearsed: Mathematics
) -> Mapping[str, Any]:
    """What a curve is computed with: for a peer, which learns by its own code, only the task."""
    if arguments.peer is None:
        return rehearsed(config)
    return {"settings": peer_task(config, arguments), "numbers": {}}


def peer_task(config: TrainConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    """What all seeds have in common: sizes and rates of our config, and the peer's own options."""
    peer, chosen, env = arguments.peer, config.to_mapping()["algo_kwargs"], str(config.env_id)
    shared = ("batch_size", "hidden_sizes", "learning_rate", "gamma", "tau", "learning_starts")
    task = {
        "algo": peer["algo"],
        "environment": env,
        "steps": config.total_timesteps,
        "eval_interval": config.eval_interval,
        "eval_episodes": config.eval_episodes,
        "options": dict(peer.get("options") or {}),
        **{key: chosen[key] for key in shared if key in chosen},
    }
    if "buffer_capacity" in chosen:
        task["buffer_size"] = chosen["buffer_capacity"]
    if peer["package"] == "d3rlpy":
        networks = list(peer.get("networks") or [""])
        rate = chosen["learning_rate"]
        rates = {"learning_rate": rate}
        if "actor" in networks:
            actor = chosen.get("actor_learning_rate") or rate
            rates = {"actor_learning_rate": actor, "critic_learning_rate": rate}
        data = described(arguments.data_about, env, arguments.data) if arguments.data else None
        scale = 1.0 if data is None else return_scale(config, data)
        task.update(networks=networks, options={**rates, **task["options"]}, reward_scale=scale)
    return task
