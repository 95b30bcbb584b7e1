"""Gymnasium's MuJoCo tasks (v5) as functions of the simulator's fields.

A field has a leading axis of worlds, followed by the axes of MuJoCo's array of the same name. The
functions know nothing of the simulator, and compute in the precision of the fields. The settings of
a task have the names, the defaults and the meaning of Gymnasium's.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from rl_training.envs.tensors.random_numbers import mixed, normal, uniform

Fields = Mapping[str, Tensor]


class Facts(NamedTuple):
    """What a task needs to know of its model."""

    dt: float
    """Seconds of one environment step"""
    bodies: Mapping[str, int]
    """Index of each body by name"""
    body_mass: Tensor
    first_qpos: Tensor
    first_qvel: Tensor


class Draws(NamedTuple):
    """From which the initial state of each world's episode is computed."""

    keys: Tensor
    episodes: Tensor

    def uniform(self, size: int, *, use: int = 0) -> Tensor:
        """Numbers in [-1, 1), `(worlds, size)`; another `use` gives independent ones."""
        return 2 * uniform(mixed(self.keys + use), self.episodes, size) - 1

    def normal(self, size: int, *, use: int = 0) -> Tensor:
        return normal(mixed(self.keys + use), self.episodes, size)


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A task in terms of fields before and after a step."""

    xml: ClassVar[str]
    """The file of the model among Gymnasium's"""
    frame_skip: ClassVar[int]
    max_steps: ClassVar[int] = 1_000
    fields: ClassVar[tuple[str, ...]] = ("qpos", "qvel")
    """The fields that the functions read"""
    needs_contact_forces: ClassVar[bool] = False
    """Whether MuJoCo must compute `cfrc_ext`"""
    newton: ClassVar[bool] = False
    """Whether the model is solved by Newton's method, instead of that of its file"""
    contacts: ClassVar[int] = 32
    """Contacts per world that memory is reserved for"""
    constraints: ClassVar[int] = 128

    @abstractmethod
    def observation(self, fields: Fields, facts: Facts) -> Tensor: ...

    @abstractmethod
    def reward(self, before: Fields, after: Fields, action: Tensor, facts: Facts) -> Tensor: ...

    def terminated(self, fields: Fields) -> Tensor:
        """Whether each world reached a final state; never, unless a task says otherwise."""
        return torch.zeros_like(fields["qpos"][:, 0], dtype=torch.bool)

    @abstractmethod
    def initial(self, facts: Facts, draws: Draws) -> tuple[Tensor, Tensor]:
        """Positions and velocities at the start of an episode."""


def control_cost(action: Tensor) -> Tensor:
    return action.square().sum(-1)


def flat(field: Tensor) -> Tensor:
    """All numbers of each world in one axis."""
    return field.flatten(1)


def length(vectors: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return found


def is_between(values: Tensor, bounds: tuple[float, float]) -> Tensor:
    return (bounds[0] < values) & (values < bounds[1])


@dataclass(frozen=True, kw_only=True)
class NoisyStart(Task):
    """Tasks whose episodes start from the model's state with uniform noise."""

    reset_noise_scale: float = 0.1
    gaussian_velocities: ClassVar[bool] = False

    def initial(self, facts: Facts, draws: Draws) -> tuple[Tensor, Tensor]:
        nq, nv = len(facts.first_qpos), len(facts.first_qvel)
        velocities = draws.normal if self.gaussian_velocities else draws.uniform
        qpos = facts.first_qpos + self.reset_noise_scale * draws.uniform(nq)
        return qpos, facts.first_qvel + self.reset_noise_scale * velocities(nv, use=1)


@dataclass(frozen=True, kw_only=True)
class Locomotion(NoisyStart):
    """Tasks that reward movement along the x-axis, less the cost of controls."""

    forward_reward_weight: float = 1.0
    ctrl_cost_weight: float = 0.1
    exclude_current_positions_from_observation: bool = True
    planar_positions: ClassVar[int] = 1
    """How many positions an observation leaves out: x, or x and y"""

    def observation(self, fields: Fields, facts: Facts) -> Tensor:
        return torch.cat([self.positions(fields), fields["qvel"]], dim=-1)

    def positions(self, fields: Fields) -> Tensor:
        excluded = self.planar_positions * self.exclude_current_positions_from_observation
        return fields["qpos"][:, excluded:]

    def forward_position(self, fields: Fields, facts: Facts) -> Tensor:
        return fields["qpos"][:, 0]

    def reward(self, before: Fields, after: Fields, action: Tensor, facts: Facts) -> Tensor:
        moved = self.forward_position(after, facts) - self.forward_position(before, facts)
        forward = self.forward_reward_weight * moved / facts.dt
        return forward - self.ctrl_cost_weight * control_cost(action)


@dataclass(frozen=True, kw_only=True)
class HealthyLocomotion(Locomotion):
    """Locomotion that also rewards being healthy, and ends otherwise."""

    healthy_reward: float = 1.0
    terminate_when_unhealthy: bool = True

    @abstractmethod
    def is_healthy(self, fields: Fields) -> Tensor: ...

    def reward(self, before: Fields, after: Fields, action: Tensor, facts: Facts) -> Tensor:
        survived = self.healthy_reward * self.is_healthy(after)
        return super().reward(before, after, action, facts) + survived

    def terminated(self, fields: Fields) -> Tensor:
        return ~self.is_healthy(fields) & self.terminate_when_unhealthy


@dataclass(frozen=True, kw_only=True)
class HalfCheetah(Locomotion):
    xml, frame_skip = "half_cheetah.xml", 5
    gaussian_velocities = True


@dataclass(frozen=True, kw_only=True)
class Swimmer(Locomotion):
    xml, frame_skip, planar_positions = "swimmer.xml", 4, 2
    ctrl_cost_weight: float = 1e-4


@dataclass(frozen=True, kw_only=True)
class Walker2d(HealthyLocomotion):
    xml, frame_skip = "walker2d_v5.xml", 4
    ctrl_cost_weight: float = 1e-3
    reset_noise_scale: float = 5e-3
    healthy_z_range: tuple[float, float] = (0.8, 2.0)
    healthy_angle_range: tuple[float, float] = (-1.0, 1.0)

    def observation(self, fields: Fields, facts: Facts) -> Tensor:
        return torch.cat([self.positions(fields), fields["qvel"].clamp(-10, 10)], dim=-1)

    def is_healthy(self, fields: Fields) -> Tensor:
        height, angle = fields["qpos"][:, 1], fields["qpos"][:, 2]
        upright = is_between(angle, self.healthy_angle_range)
        return is_between(height, self.healthy_z_range) & upright


@dataclass(frozen=True, kw_only=True)
class Hopper(Walker2d):
    xml = "hopper.xml"
    healthy_state_range: tuple[float, float] = (-100.0, 100.0)
    healthy_z_range: tuple[float, float] = (0.7, math.inf)
    healthy_angle_range: tuple[float, float] = (-0.2, 0.2)

    def is_healthy(self, fields: Fields) -> Tensor:
        state = torch.cat([fields["qpos"], fields["qvel"]], dim=-1)[:, 2:]
        return super().is_healthy(fields) & is_between(state, self.healthy_state_range).all(-1)


@dataclass(frozen=True, kw_only=True)
class Ant(HealthyLocomotion):
    xml, frame_skip, planar_positions = "ant.xml", 5, 2
    fields = ("qpos", "qvel", "xpos", "cfrc_ext")
    gaussian_velocities = True
    needs_contact_forces = True
    ctrl_cost_weight: float = 0.5
    contact_cost_weight: float = 5e-4
    main_body: int | str = 1
    healthy_z_range: tuple[float, float] = (0.2, 1.0)
    contact_force_range: tuple[float, float] = (-1.0, 1.0)
    include_cfrc_ext_in_observation: bool = True

    def contact_forces(self, fields: Fields) -> Tensor:
        return fields["cfrc_ext"].clamp(*self.contact_force_range)

    def observation(self, fields: Fields, facts: Facts) -> Tensor:
        parts = [super().observation(fields, facts)]
        if self.include_cfrc_ext_in_observation:
            parts.append(flat(self.contact_forces(fields)[:, 1:]))
        return torch.cat(parts, dim=-1)

    def forward_position(self, fields: Fields, facts: Facts) -> Tensor:
        body = self.main_body
        return fields["xpos"][:, facts.bodies[body] if isinstance(body, str) else body, 0]

    def reward(self, before: Fields, after: Fields, action: Tensor, facts: Facts) -> Tensor:
        touched = flat(self.contact_forces(after)).square().sum(-1)
        return super().reward(before, after, action, facts) - self.contact_cost_weight * touched

    def is_healthy(self, fields: Fields) -> Tensor:
        low, high = self.healthy_z_range
        height = fields["qpos"][:, 2]
        state = torch.cat([fields["qpos"], fields["qvel"]], dim=-1)
        return torch.isfinite(state).all(-1) & (low <= height) & (height <= high)


@dataclass(frozen=True, kw_only=True)
class HumanoidNewton(HealthyLocomotion):
    """Gymnasium's Humanoid with the Newton solver: its file asks for PGS, which a GPU has not."""

    xml, frame_skip, planar_positions = "humanoid.xml", 5, 2
    fields = ("qpos", "qvel", "ctrl", "xipos", "cinert", "cvel", "qfrc_actuator", "cfrc_ext")
    needs_contact_forces = True
    newton = True
    contacts, constraints = 64, 256
    forward_reward_weight: float = 1.25
    reset_noise_scale: float = 1e-2
    contact_cost_weight: float = 5e-7
    contact_cost_range: tuple[float, float] = (-math.inf, 10.0)
    healthy_reward: float = 5.0
    healthy_z_range: tuple[float, float] = (1.0, 2.0)

    def observation(self, fields: Fields, facts: Facts) -> Tensor:
        of_bodies = [flat(fields[name][:, 1:]) for name in ("cinert", "cvel")]
        forces = [fields["qfrc_actuator"][:, 6:], flat(fields["cfrc_ext"][:, 1:])]
        return torch.cat([super().observation(fields, facts), *of_bodies, *forces], dim=-1)

    def forward_position(self, fields: Fields, facts: Facts) -> Tensor:
        mass = facts.body_mass
        return (fields["xipos"][:, :, 0] * mass).sum(-1) / mass.sum()

    def reward(self, before: Fields, after: Fields, action: Tensor, facts: Facts) -> Tensor:
        touched = self.contact_cost_weight * flat(after["cfrc_ext"]).square().sum(-1)
        cost = touched.clamp(*self.contact_cost_range)
        return super().reward(before, after, after["ctrl"], facts) - cost

    def is_healthy(self, fields: Fields) -> Tensor:
        return is_between(fields["qpos"][:, 2], self.healthy_z_range)


@dataclass(frozen=True, kw_only=True)
class InvertedPendulum(NoisyStart):
    xml, frame_skip = "inverted_pendulum.xml", 2
    reset_noise_scale: float = 0.01

    def observation(self, fields: Fields, facts: Facts) -> Tensor:
        return torch.cat([fields["qpos"], fields["qvel"]], dim=-1)

    def reward(self, before: Fields, after: Fields, action: Tensor, facts: Facts) -> Tensor:
        return (~self.terminated(after)).to(after["qpos"].dtype)

    def terminated(self, fields: Fields) -> Tensor:
        return fields["qpos"][:, 1].abs() > 0.2


@dataclass(frozen=True, kw_only=True)
class Reacher(Task):
    xml, frame_skip, max_steps = "reacher.xml", 2, 50
    fields = ("qpos", "qvel", "xpos")
    reward_dist_weight: float = 1.0
    reward_control_weight: float = 1.0
    radius: ClassVar[float] = 0.2
    """Targets are uniform in a disk of this size"""

    def observation(self, fields: Fields, facts: Facts) -> Tensor:
        angles = fields["qpos"][:, :2]
        offset = self.offset(fields, facts)[:, :2]
        parts = [angles.cos(), angles.sin(), fields["qpos"][:, 2:], fields["qvel"][:, :2], offset]
        return torch.cat(parts, dim=-1)

    def offset(self, fields: Fields, facts: Facts) -> Tensor:
        positions, bodies = fields["xpos"], facts.bodies
        return positions[:, bodies["fingertip"]] - positions[:, bodies["target"]]

    def reward(self, before: Fields, after: Fields, action: Tensor, facts: Facts) -> Tensor:
        distance = length(self.offset(after, facts))
        cost = self.reward_control_weight * control_cost(action)
        return -self.reward_dist_weight * distance - cost

    def initial(self, facts: Facts, draws: Draws) -> tuple[Tensor, Tensor]:
        qpos = facts.first_qpos + 0.1 * draws.uniform(len(facts.first_qpos))
        qvel = facts.first_qvel + 0.005 * draws.uniform(len(facts.first_qvel), use=1)
        share, angle = draws.uniform(2, use=2).unbind(-1)
        reach = self.radius * torch.sqrt((share + 1) / 2)
        target = torch.stack([reach * (math.pi * angle).cos(), reach * (math.pi * angle).sin()], -1)
        qpos = torch.cat([qpos[:, :-2], target], dim=-1)
        return qpos, torch.cat([qvel[:, :-2], torch.zeros_like(target)], dim=-1)


@dataclass(frozen=True, kw_only=True)
class Pusher(Task):
    xml, frame_skip, max_steps = "pusher_v5.xml", 5, 100
    fields = ("qpos", "qvel", "xpos")
    reward_near_weight: float = 0.5
    reward_dist_weight: float = 1.0
    reward_control_weight: float = 0.1
    closest: ClassVar[float] = 0.17
    """Distance from the goal from which objects start"""
    tries: ClassVar[int] = 24
    """Places of which the first that is far enough is taken; with 24, one always is"""

    def observation(self, fields: Fields, facts: Facts) -> Tensor:
        places = [fields["xpos"][:, facts.bodies[name]] for name in ("tips_arm", "object", "goal")]
        return torch.cat([fields["qpos"][:, :7], fields["qvel"][:, :7], *places], dim=-1)

    def reward(self, before: Fields, after: Fields, action: Tensor, facts: Facts) -> Tensor:
        arm, thing, goal = (
            after["xpos"][:, facts.bodies[name]] for name in ("tips_arm", "object", "goal")
        )
        near = self.reward_near_weight * length(thing - arm)
        far = self.reward_dist_weight * length(thing - goal)
        return -far - self.reward_control_weight * control_cost(action) - near

    def initial(self, facts: Facts, draws: Draws) -> tuple[Tensor, Tensor]:
        qvel = facts.first_qvel + 0.005 * draws.uniform(len(facts.first_qvel), use=1)
        numbers = draws.uniform(2 * self.tries).view(-1, self.tries, 2)
        places = torch.stack([0.15 * numbers[..., 0] - 0.15, 0.2 * numbers[..., 1]], dim=-1)
        is_far = length(places) > self.closest
        first = is_far.int().argmax(1)[:, None, None].expand(-1, 1, 2)
        thing = places.gather(1, first).squeeze(1)
        arm = facts.first_qpos[:-4].expand(len(thing), -1)
        qpos = torch.cat([arm, thing, torch.zeros_like(thing)], dim=-1)
        return qpos, torch.cat([qvel[:, :-4], torch.zeros_like(qpos[:, :4])], dim=-1)


TASKS: Mapping[str, type[Task]] = {
    task.__name__: task
    for task in (
        *(HalfCheetah, Hopper, Walker2d, Ant, Swimmer),
        *(Reacher, Pusher, InvertedPendulum, HumanoidNewton),
    )
}
"""The tasks by the name in their ids: `warp/HalfCheetah-v5`"""
