"""DQN's example script runs from another folder, as a user would run it."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_runs import check_example


@pytest.mark.docs
def test_the_example_trains_evaluates_and_prints_the_path_of_the_curve(tmp_path: Path) -> None:
    check_example("dqn_cartpole_reference.py", tmp_path, total_timesteps=1300)
