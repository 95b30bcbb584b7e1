"""Gymnasium's Pendulum and CartPole as tensors: the same equations, in float32."""

from __future__ import annotations

import math

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from rl_training.envs.tensors.random_numbers import uniform
from rl_training.envs.tensors.simulated import Outcome, SimulatedWorlds


class Pendulum(SimulatedWorlds):
    """`Pendulum-v1`: swing up a rod by a torque, and hold it upright."""

    max_steps, is_capturable = 200, True
    max_speed, max_torque, time_step = 8.0, 2.0, 0.05
    mass, length = 1.0, 1.0

    def __init__(self, num_envs: int, device: torch.device | str, *, g: float = 10.0) -> None:
        super().__init__(num_envs, device)
        high = np.array([1.0, 1.0, self.max_speed], dtype=np.float32)
        self.observation_space = gym.spaces.Box(-high, high)
        self.action_space = gym.spaces.Box(-self.max_torque, self.max_torque, (1,))
        self.gravity = g
        self.angle = torch.zeros(num_envs, device=self.device)
        self.speed = torch.zeros(num_envs, device=self.device)
        self.torque = torch.zeros(num_envs, device=self.device)

    def simulate(self, actions: Tensor) -> None:
        self.torque.copy_(actions[:, 0])

    def outcome(self) -> Outcome:
        torque = self.torque.clamp(-self.max_torque, self.max_torque)
        upright = torch.remainder(self.angle + math.pi, 2 * math.pi) - math.pi
        cost = upright**2 + 0.1 * self.speed**2 + 0.001 * torque**2
        pull = 3 * self.gravity / (2 * self.length) * torch.sin(self.angle)
        push = 3.0 / (self.mass * self.length**2) * torque
        speed = self.speed + (pull + push) * self.time_step
        self.speed.copy_(speed.clamp(-self.max_speed, self.max_speed))
        self.angle += self.speed * self.time_step
        return Outcome(self._observe(), -cost, torch.zeros_like(cost, dtype=torch.bool))

    def begin_episodes(self, chosen: Tensor) -> None:
        numbers = 2 * uniform(self.keys, self.episodes, 2) - 1
        self.angle.copy_(torch.where(chosen, math.pi * numbers[:, 0], self.angle))
        self.speed.copy_(torch.where(chosen, numbers[:, 1], self.speed))

    def first_observations(self, chosen: Tensor) -> Tensor:
        return self._observe()

    def state(self) -> dict[str, Tensor]:
        return {"angle": self.angle, "speed": self.speed}

    def _observe(self) -> Tensor:
        return torch.stack([torch.cos(self.angle), torch.sin(self.angle), self.speed], dim=-1)


class CartPole(SimulatedWorlds):
    """`CartPole-v1`: push a cart to the left or right so that the pole on it does not fall."""

    max_steps, is_capturable = 500, True
    gravity, cart_mass, pole_mass, half_length = 9.8, 1.0, 0.1, 0.5
    force, time_step = 10.0, 0.02
    max_position, max_angle = 2.4, 12 * 2 * math.pi / 360

    def __init__(self, num_envs: int, device: torch.device | str) -> None:
        super().__init__(num_envs, device)
        high = np.array(
            [2 * self.max_position, np.inf, 2 * self.max_angle, np.inf], dtype=np.float32
        )
        self.observation_space = gym.spaces.Box(-high, high)
        self.action_space = gym.spaces.Discrete(2)
        self.numbers = torch.zeros(num_envs, 4, device=self.device)
        """Position, speed, angle and angular speed"""
        self.push = torch.zeros(num_envs, device=self.device)

    def simulate(self, actions: Tensor) -> None:
        self.push.copy_(actions)

    def outcome(self) -> Outcome:
        position, speed, angle, turning = self.numbers.unbind(-1)
        force = self.force * (2.0 * self.push - 1.0)
        mass, pole = self.cart_mass + self.pole_mass, self.pole_mass * self.half_length
        sine, cosine = torch.sin(angle), torch.cos(angle)
        pushed = (force + pole * turning**2 * sine) / mass
        resistance = self.half_length * (4.0 / 3.0 - self.pole_mass * cosine**2 / mass)
        turning_change = (self.gravity * sine - cosine * pushed) / resistance
        speed_change = pushed - pole * turning_change * cosine / mass
        following = [
            position + self.time_step * speed,
            speed + self.time_step * speed_change,
            angle + self.time_step * turning,
            turning + self.time_step * turning_change,
        ]
        self.numbers.copy_(torch.stack(following, dim=-1))
        fallen = (self.numbers[:, 0].abs() > self.max_position) | (
            self.numbers[:, 2].abs() > self.max_angle
        )
        return Outcome(self.numbers.clone(), torch.ones_like(position), fallen)

    def begin_episodes(self, chosen: Tensor) -> None:
        first = 0.1 * uniform(self.keys, self.episodes, 4) - 0.05
        self.numbers.copy_(torch.where(chosen[:, None], first, self.numbers))

    def first_observations(self, chosen: Tensor) -> Tensor:
        return self.numbers.clone()

    def state(self) -> dict[str, Tensor]:
        return {"numbers": self.numbers}
