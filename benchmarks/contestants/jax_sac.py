"""A yardstick: a SAC update written by hand in JAX, made as fast as reasonably possible.

    python jax_sac.py [--seeds 1 8 32] [--precision highest high] [--calls 10] [--updates 100]

One call is one program: a scan over many updates, each of which draws its noise and its minibatch
from a replay buffer on the device and then steps critics, actor, temperature, their Adam moments
and the target critics. All losses share one backward pass, and the twin critics share one batched
product. Populations are the same program under `vmap`, with a separate replay buffer for each seed.
Shapes are those of HalfCheetah. Prints one JSON line for each number of seeds and precision. Needs
only jax. `highest` is float32, and `high` is TF32 if the device supports it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random

OBS, ACTION, HIDDEN, CRITICS, BATCH = 17, 6, 256, 2, 256
LEARNING_RATE, GAMMA, TAU = 3e-4, 0.99, 0.005
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0
ROW = 2 * OBS + ACTION + 2  # obs, action, reward, discount, next_obs side by side

Layers = list[tuple[Array, Array]]


class Learned(NamedTuple):
    """Parameters that follow a gradient."""

    actor: Layers
    critic: Layers
    log_alpha: Array


class State(NamedTuple):
    """Everything that an update changes."""

    learned: Learned
    target_critic: Layers
    mean: Learned
    square: Learned
    count: Array


class Batch(NamedTuple):
    """A minibatch, with the noise of its two draws of actions."""

    obs: Array
    action: Array
    reward: Array
    discount: Array
    next_obs: Array
    noise: Array
    next_noise: Array


def perceptron(layers: Layers, inputs: Array) -> Array:
    """`(..., batch, in)` to `(..., batch, out)`, with or without leading ensemble axes."""
    *hidden, (weight, bias) = layers
    for inner_weight, inner_bias in hidden:
        inputs = jax.nn.relu(inputs @ inner_weight + inner_bias[..., None, :])
    return inputs @ weight + bias[..., None, :]


def q_values(critic: Layers, obs: Array, action: Array) -> Array:
    """`(critics, batch)`."""
    inputs = jnp.concatenate([obs, action], axis=-1)
    hidden = jnp.broadcast_to(inputs, (CRITICS, *inputs.shape))
    return perceptron(critic, hidden)[..., 0]


def sample_action(actor: Layers, obs: Array, noise: Array) -> tuple[Array, Array]:
    """Squashed-Gaussian actions and their log-probabilities."""
    mean, log_std = jnp.split(perceptron(actor, obs), 2, axis=-1)
    log_std = jnp.clip(log_std, LOG_STD_MIN, LOG_STD_MAX)
    unsquashed = mean + jnp.exp(log_std) * noise
    gaussian = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
    squash = 2.0 * (math.log(2.0) - unsquashed - jax.nn.softplus(-2.0 * unsquashed))
    return jnp.tanh(unsquashed), (gaussian - squash).sum(-1)


def loss(learned: Learned, target_critic: Layers, batch: Batch) -> tuple[Array, Array]:
    """The sum of SAC's losses; each one changes only its own parameters."""
    actor, critic, log_alpha = learned
    fixed = lax.stop_gradient(learned)
    alpha = jnp.exp(fixed.log_alpha)

    next_action, next_log_prob = sample_action(fixed.actor, batch.next_obs, batch.next_noise)
    next_value = q_values(target_critic, batch.next_obs, next_action).min(0)
    target = batch.reward + batch.discount * (next_value - alpha * next_log_prob)
    q = q_values(critic, batch.obs, batch.action)
    critic_loss = 0.5 * ((q - target) ** 2).mean(-1).sum()

    action, log_prob = sample_action(actor, batch.obs, batch.noise)
    value = q_values(fixed.critic, batch.obs, action).min(0)
    actor_loss = (alpha * log_prob - value).mean()

    entropy = -lax.stop_gradient(log_prob).mean()
    alpha_loss = log_alpha * (entropy + ACTION)
    return critic_loss + actor_loss + alpha_loss, critic_loss


def adam(state: State, gradient: Learned) -> State:
    """One step of Adam (1412.6980) on all learned parameters, then the target update."""
    count = state.count + 1
    mean = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, state.mean, gradient)
    square = jax.tree.map(lambda s, g: BETA2 * s + (1 - BETA2) * g * g, state.square, gradient)
    rate = LEARNING_RATE / (1 - BETA1**count)
    scale = lax.rsqrt(1 - BETA2**count)
    learned = jax.tree.map(
        lambda p, m, s: p - rate * m / (jnp.sqrt(s) * scale + EPSILON), state.learned, mean, square
    )
    target = jax.tree.map(lambda t, p: t + TAU * (p - t), state.target_critic, learned.critic)
    return State(learned, target, mean, square, count)


def draw(key: Array, replay: Array) -> Batch:
    """A minibatch from the packed rows of a replay buffer: one gather."""
    index_key, noise_key = random.split(key)
    rows = replay[random.randint(index_key, (BATCH,), 0, replay.shape[0])]
    noise = random.normal(noise_key, (2, BATCH, ACTION))
    ends = [OBS, OBS + ACTION, OBS + ACTION + 1, OBS + ACTION + 2]
    obs, action, reward, discount, next_obs = jnp.split(rows, ends, axis=-1)
    return Batch(obs, action, reward[:, 0], discount[:, 0], next_obs, noise[0], noise[1])


def update(state: State, batch: Batch) -> tuple[State, Array]:
    """One update, and the critics' loss before it."""
    gradient, critic_loss = jax.grad(loss, has_aux=True)(state.learned, state.target_critic, batch)
    return adam(state, gradient), critic_loss


def many_updates(
    state: State, key: Array, replay: Array, updates: int, unroll: int
) -> tuple[State, Array, Array]:
    """Make several updates of one seed; return the state, the next key and the last loss."""
    keys = random.split(key, updates + 1)

    def body(state: State, own_key: Array) -> tuple[State, Array]:
        return update(state, draw(own_key, replay))

    state, losses = lax.scan(body, state, keys[1:], unroll=unroll)
    return state, keys[0], losses[-1]


def initial_state(key: Array) -> State:
    """Uniform in +-1/sqrt(fan_in); the target critics equal the critics."""
    actor_key, critic_key = random.split(key)
    actor = initial_layers(actor_key, (), [OBS, HIDDEN, HIDDEN, 2 * ACTION])
    critic = initial_layers(critic_key, (CRITICS,), [OBS + ACTION, HIDDEN, HIDDEN, 1])
    learned = Learned(actor, critic, jnp.zeros(()))
    zeros = jax.tree.map(jnp.zeros_like, learned)
    # Copies, because a donated buffer must not be passed twice.
    target, square = jax.tree.map(jnp.copy, (critic, zeros))
    return State(learned, target, zeros, square, jnp.zeros(()))


def initial_layers(key: Array, ensemble: tuple[int, ...], sizes: list[int]) -> Layers:
    layers = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        key, weight_key, bias_key = random.split(key, 3)
        bound = fan_in**-0.5
        weight = random.uniform(
            weight_key, (*ensemble, fan_in, fan_out), minval=-bound, maxval=bound
        )
        bias = random.uniform(bias_key, (*ensemble, fan_out), minval=-bound, maxval=bound)
        layers.append((weight, bias))
    return layers


def filled_replay(key: Array, rows: int) -> Array:
    """Random transitions of the right size; no row ends an episode."""
    replay = random.normal(key, (rows, ROW))
    action = slice(OBS, OBS + ACTION)
    return replay.at[:, action].set(jnp.tanh(replay[:, action])).at[:, OBS + ACTION + 1].set(GAMMA)


def measure(seeds: int, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds per update of the entire population, without compilation and warm-up."""
    jax.config.update("jax_default_matmul_precision", precision)
    jax.clear_caches()

    def program(state: State, key: Array, replay: Array) -> tuple[State, Array, Array]:
        return many_updates(state, key, replay, options.updates, options.unroll)

    state_keys, keys, replay_keys = random.split(random.key(0), (3, seeds))
    state = jax.jit(jax.vmap(initial_state))(state_keys)
    replay = jax.jit(jax.vmap(lambda key: filled_replay(key, options.rows)))(replay_keys)
    call = jax.jit(jax.vmap(program), donate_argnums=(0, 1))
    times = []
    for number in range(options.calls + 2):
        start = time.perf_counter()
        state, keys, critic_loss = jax.block_until_ready(call(state, keys, replay))
        if number >= 2:
            times.append(1e3 * (time.perf_counter() - start) / options.updates)
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "seeds": seeds,
        "precision": precision,
        "best_ms": min(times),
        "median_ms": statistics.median(times),
        "updates_per_call": options.updates,
        "calls": options.calls,
        "critic_loss": float(critic_loss.mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--precision", nargs="+", choices=["highest", "high"], default=["highest", "high"]
    )
    parser.add_argument("--updates", type=int, default=100, help="updates in one call")
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--unroll", type=int, default=1, help="updates per iteration of the scan")
    parser.add_argument("--rows", type=int, default=100_000, help="rows of each replay buffer")
    options = parser.parse_args()
    for precision in options.precision:
        for seeds in options.seeds:
            print(json.dumps(measure(seeds, precision, options)), flush=True)


if __name__ == "__main__":
    main()
