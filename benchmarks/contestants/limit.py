"""The matrix products of one update of an actor and its critics in float32, and nothing else.

No loop can be faster than this with the same kernels: every product of the forward and backward
passes, with its own shape and with batched critics. With an `environment` in the task, it also
includes work that every loop needs: an environment step, and one fused pass of PyTorch each for
Adam and the target update. Activations, losses, sampling, replay and the action of the policy are
still left out.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from pace import Pace


def main() -> None:
    task = json.loads(sys.argv[1])
    torch.set_num_threads(task["threads"])
    obs, action, hidden, batch = (task[k] for k in ("obs_dim", "action_dim", "hidden", "batch"))
    critics, quantiles, delay = task["critics"], task.get("quantiles", 1), task["policy_delay"]

    def network(members: int, sizes: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            (torch.randn(members, batch, fan_in), torch.randn(members, fan_in, fan_out))
            for fan_in, fan_out in itertools.pairwise(sizes)
        ]

    actor = network(1, [obs, hidden, hidden, task["actor_outputs"]])
    # A last layer with one column is a sum, not a matrix product. The policy loss needs only the
    # mean of the quantiles, so its last layer always has one column.
    sizes = [obs + action, hidden, hidden]
    critic = network(critics, [*sizes, *([quantiles] if quantiles > 1 else [])])
    judge = network(task["policy_critics"], sizes)

    def forward(layers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for inputs, weights in layers:
            torch.bmm(inputs, weights)

    def backward(
        layers: list[tuple[torch.Tensor, torch.Tensor]], weights_too: bool, inputs_too: bool
    ) -> None:
        for index, (inputs, weights) in enumerate(layers):
            outputs = outputs_of[id(weights)]
            if weights_too:
                torch.bmm(inputs.mT, outputs)
            if index > 0 or inputs_too:
                torch.bmm(outputs, weights.mT)

    chores = make_chores(task) if "environment" in task else None
    layers = actor + critic + judge
    outputs_of = {id(w): torch.randn(x.shape[0], batch, w.shape[-1]) for x, w in layers}
    pace = Pace(task["steps"])
    with torch.no_grad():
        for step in itertools.count(1):
            forward(actor)  # the next action
            forward(critic)  # its target value
            forward(critic)  # the value of the action taken
            backward(critic, weights_too=True, inputs_too=False)
            on = step % delay == 0
            if on:
                forward(actor)  # the policy's action
                forward(judge)  # its value
                backward(judge, weights_too=False, inputs_too=True)
                backward(actor, weights_too=True, inputs_too=False)
            if chores is not None:
                chores(on)
            pace.step()


def make_chores(task: dict[str, Any]) -> Callable[[bool], None]:
    """A function for one environment step, one optimizer step and one target update.

    Its argument says whether the policy is updated. Targets are updated together with the policy.
    """
    import gymnasium

    obs, action, hidden, critics = (task[k] for k in ("obs_dim", "action_dim", "hidden", "critics"))
    sizes = {
        "actor": (obs + 1) * hidden + (hidden + 1) * (hidden + task["actor_outputs"]),
        "critic": critics
        * ((obs + action + 1) * hidden + (hidden + 1) * (hidden + task.get("quantiles", 1))),
    }
    vectors = {name: [torch.rand(size) for _ in range(4)] for name, size in sizes.items()}
    counts = {name: torch.ones(()) for name in sizes}
    target = torch.rand(sizes["critic"])
    environment = gymnasium.make(task["environment"])
    environment.reset(seed=0)
    chosen = environment.action_space.sample()

    def chores(policy_too: bool) -> None:
        for name, (vector, gradient, mean, square) in vectors.items():
            if name == "actor" and not policy_too:
                continue
            torch._fused_adam_(
                [vector],
                [gradient],
                [mean],
                [square],
                [],
                [counts[name]],
                lr=3e-4,
                beta1=0.9,
                beta2=0.999,
                weight_decay=0.0,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )
        if policy_too:
            target.lerp_(vectors["critic"][0], 0.005)
        _, _, terminated, truncated, _ = environment.step(chosen)
        if terminated or truncated:
            environment.reset()

    return chores


if __name__ == "__main__":
    main()
