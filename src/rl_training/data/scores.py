"""Normalized scores: the returns that count as 0 and 100 in D4RL, in Minari and in comparisons.

They are different scales for tasks of the same name, so a score is always shown with its scale.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from rl_training.data.formats.minari import local_reference_scores


@dataclass(frozen=True)
class ReferenceScale:
    """The returns that correspond to scores of 0 and 100."""

    owner: Literal["D4RL", "Minari", "TD3", "reference"]
    task: str
    low: float
    high: float

    def score(self, episode_return: float) -> float:
        """Score of a return: 0 at `low`, 100 at `high`, not clipped."""
        return 100.0 * (episode_return - self.low) / (self.high - self.low)

    @property
    def metric(self) -> str:
        """Name of the score as a metric, which includes the scale."""
        return f"eval_{self.owner.lower()}_score"

    def __str__(self) -> str:
        return f"{self.owner}'s scale for {self.task}, 0 at {self.low:g} and 100 at {self.high:g}"


D4RL = {
    "halfcheetah": (-280.178953, 12135.0),
    "hopper": (-20.272305, 3234.3),
    "walker2d": (1.629008, 4592.3),
    "ant": (-325.6, 3879.7),
    "pen": (96.262799, 3076.8331017826877),
    "door": (-56.512833, 2880.5693087298737),
    "hammer": (-274.856578, 12794.134825156867),
    "relocate": (-6.425911, 4233.877797728884),
    "maze2d-umaze": (23.85, 161.86),
    "maze2d-medium": (13.13, 277.39),
    "maze2d-large": (6.7, 273.99),
    "maze2d-umaze-dense": (68.537689, 193.662856),
    "maze2d-medium-dense": (44.264742, 297.455255),
    "maze2d-large-dense": (30.569041, 303.485738),
    "antmaze": (0.0, 1.0),
    "kitchen": (0.0, 4.0),
}
"""Returns for scores 0 and 100 in D4RL, by task"""

TD3 = {
    "HalfCheetah": (-289.415, 10574.0),
    "Hopper": (18.791, 3226.0),
    "Walker2d": (2.791, 3946.0),
    "Ant": (-70.288, 3942.0),
    "Humanoid": (120.423, 5165.0),
}
"""Returns of a random policy and of TD3 after a million steps in Gymnasium's MuJoCo tasks, with
which papers normalize online learning, such as those of SimbaV2 and FlashSAC"""

CLASSIC = {
    "CartPole": (22.1, 500.0),
    "Pendulum": (-1241.0, -150.0),
    "MountainCarContinuous": (-33.3, 90.0),
    "Acrobot": (-497.1, -100.0),
    "InvertedPendulum": (5.1, 950.0),
    "InvertedDoublePendulum": (47.6, 9100.0),
}
"""Returns that count as 0 and 1 in Gymnasium's small tasks. The first is the mean of uniformly
random actions in 100 to 2,000 episodes. The second is the largest return of CartPole, what good
policies reach in Pendulum, and for the others the threshold from which Gymnasium takes a task as
solved."""

MINARI = {"D4RL/door/human-v2": (-45.80706024169922, 2940.578369140625)}
"""Returns for scores 0 and 100 of Minari datasets; others are read from local metadata"""

_D4RL_ENVIRONMENTS = {
    r"HalfCheetah-v[2-5]": "halfcheetah",
    r"Hopper-v[2-5]": "hopper",
    r"Walker2d-v[2-5]": "walker2d",
    r"Ant-v[2-5]": "ant",
    # The dense scales apply to v1 only.
    **{rf"{task}-v1": task for task in D4RL if task.endswith("-dense")},
    **{rf"{task}(?!-dense)(-[a-z-]+)?-v\d+": task for task in D4RL if not task.endswith("-dense")},
}
"""Patterns of environment ids with a D4RL scale: Gymnasium's, and D4RL's such as door-human-v1"""

_MINARI_ENVIRONMENTS = {"AdroitHandDoor-v1": "D4RL/door/human-v2"}
"""Environments of Minari datasets. Their tasks have D4RL names but different returns, so only
Minari's scale applies."""


def reference_scale(
    environment_id: str | None, minari_ids: Iterable[str] = ()
) -> ReferenceScale | None:
    """Find the scale for returns in an environment.

    The scale of the Minari datasets that the policy learned from comes first. Returns None if
    there is no scale, or if the datasets have different ones.
    """
    found = {
        scores: dataset_id
        for dataset_id in minari_ids
        if (scores := MINARI.get(dataset_id) or local_reference_scores(dataset_id))
    }
    if found:
        if len(found) > 1:
            return None
        ((low, high), dataset_id), *_ = found.items()
        return ReferenceScale("Minari", dataset_id, low, high)
    if environment_id in _MINARI_ENVIRONMENTS:
        dataset_id = _MINARI_ENVIRONMENTS[environment_id]
        return ReferenceScale("Minari", dataset_id, *MINARI[dataset_id])
    for pattern, task in _D4RL_ENVIRONMENTS.items():
        if re.fullmatch(pattern, environment_id or ""):
            return ReferenceScale("D4RL", task, *D4RL[task])
    return None


def comparison_scale(environment_id: str | None) -> ReferenceScale | None:
    """Find the scale with which runs in different tasks are aggregated; None if there is none.

    It depends on the environment alone, so that all algorithms of a comparison have the same one.
    """
    named = re.fullmatch(r"(\w+)-v\d+", environment_id or "")
    if named and named[1] in TD3:
        return ReferenceScale("TD3", named[1], *TD3[named[1]])
    if named and named[1] in CLASSIC:
        return ReferenceScale("reference", named[1], *CLASSIC[named[1]])
    if control := re.fullmatch(r"dm_control/([\w-]+)-v\d+", environment_id or ""):
        return ReferenceScale("reference", control[1], 0.0, 1000.0)  # by design of the suite
    return reference_scale(environment_id)


def minari_ids(dataset: Any) -> list[str]:
    """Ids of the Minari datasets in the `dataset` value of a saved config."""
    sections = dataset if isinstance(dataset, list) else [dataset]
    named = (section.get("id") for section in sections if isinstance(section, dict))
    return [name for name in named if isinstance(name, str)]
