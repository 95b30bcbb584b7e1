"""R6: a fuzzed config is valid, or is refused with a message that names the key."""

from __future__ import annotations

import functools
from typing import Any

from .runner import Campaign, Figures, Trial, require

TRIALS = 5000


@functools.lru_cache(maxsize=1)
def configs(seed: int) -> list[Any]:
    from .configs import fuzzed_configs

    return list(fuzzed_configs(seed, TRIALS))


def run(trial: Trial) -> Figures:
    from .configs import judge

    config = configs(trial.seed)[trial.index]
    problem = judge(config)
    require(problem is None, f"{config}: {problem}")
    return {}


CAMPAIGN = Campaign(name="R6", title="fuzzed configs", trials=TRIALS, run=run, per_process=1250)
