"""Train control policies in PyTorch: online, offline, and both.

Everything here is imported when it is first used, so that `import rl_training` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rl_training.version import __version__

if TYPE_CHECKING:
    from rl_training.api import AWAC as AWAC
    from rl_training.api import BC as BC
    from rl_training.api import CQL as CQL
    from rl_training.api import DDPG as DDPG
    from rl_training.api import DQN as DQN
    from rl_training.api import IQL as IQL
    from rl_training.api import REDQ as REDQ
    from rl_training.api import RLPD as RLPD
    from rl_training.api import SAC as SAC
    from rl_training.api import TD3 as TD3
    from rl_training.api import TD3BC as TD3BC
    from rl_training.api import TQC as TQC
    from rl_training.callbacks import Callback as Callback
    from rl_training.config import TrainConfig as TrainConfig
    from rl_training.runtime.workflows import (
        evaluate_checkpoint as evaluate_checkpoint,
    )
    from rl_training.runtime.workflows import predict_checkpoint as predict_checkpoint
    from rl_training.runtime.workflows import resume_training as resume_training
    from rl_training.runtime.workflows import train as train

_HOMES = {
    "Callback": "rl_training.callbacks",
    "TrainConfig": "rl_training.config",
    "evaluate_checkpoint": "rl_training.runtime.workflows",
    "predict_checkpoint": "rl_training.runtime.workflows",
    "resume_training": "rl_training.runtime.workflows",
    "train": "rl_training.runtime.workflows",
    "AWAC": "rl_training.api",
    "BC": "rl_training.api",
    "CQL": "rl_training.api",
    "DDPG": "rl_training.api",
    "DQN": "rl_training.api",
    "IQL": "rl_training.api",
    "REDQ": "rl_training.api",
    "RLPD": "rl_training.api",
    "SAC": "rl_training.api",
    "TD3": "rl_training.api",
    "TD3BC": "rl_training.api",
    "TQC": "rl_training.api",
}

__all__ = [
    "AWAC",
    "BC",
    "CQL",
    "DDPG",
    "DQN",
    "IQL",
    "REDQ",
    "RLPD",
    "SAC",
    "TD3",
    "TD3BC",
    "TQC",
    "Callback",
    "TrainConfig",
    "__version__",
    "evaluate_checkpoint",
    "predict_checkpoint",
    "resume_training",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
