"""Starting from a policy that was trained before."""

from __future__ import annotations

from rl_training.algorithms.base import Algorithm
from rl_training.runtime.checkpointing import LEARNER, CheckpointReader
from rl_training.runtime.locating import MODEL_FILES, find_checkpoint, load_policy
from rl_training.runtime.policy import Policy


def initialize_from(policy: Policy, path: str) -> None:
    """Start from another policy's networks and normalisation, with a fresh optimiser.

    From a checkpoint, rather than an exported policy, targets and temperature come along.
    """
    reader = find_checkpoint(path, names=MODEL_FILES)
    policy.load_tensors(load_policy(reader).tensors())
    restore_learned(policy.algorithm, reader)


def restore_learned(algorithm: Algorithm, reader: CheckpointReader) -> bool:
    """Beside the networks, which it has, give an algorithm the targets, temperature and the like.

    An exported policy lacks them: targets then equal the networks, and the answer is False.
    """
    algorithm.load_state({**algorithm.state, **algorithm.initial_state()})
    if LEARNER not in reader.files:
        return False
    saved = reader.verify([LEARNER]).tensors(LEARNER)
    learned = {k: v for k, v in saved.items() if _is_learned(k, algorithm)}
    algorithm.load_state({**algorithm.state, **learned})
    return True


def _is_learned(name: str, algorithm: Algorithm) -> bool:
    return name in algorithm.state and ".adam_" not in name and name != "updates"
