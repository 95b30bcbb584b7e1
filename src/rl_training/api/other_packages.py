"""Arguments as users of other packages write them: accepted, or explained with our own names.

Most names are those of Stable-Baselines3 and d3rlpy, some those of CleanRL and of papers' code.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from numbers import Real
from typing import Any

import numpy as np

from rl_training.errors import ConfigError
from rl_training.validation import suggestion

OUR_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "action_noise": ("exploration_noise",),
    "action_scaler": (),
    "activation_fn": ("activation",),
    "actor_encoder_factory": ("actor_hidden_sizes", "hidden_sizes"),
    "actor_learning_rate": ("learning_rate",),
    "actor_lr": ("actor_learning_rate", "learning_rate"),
    "alpha": ("bc_alpha",),
    "alpha_threshold": ("cql_target_gap",),
    "anneal_lr": ("learning_rate_schedule",),
    "autotune": ("alpha",),
    "buffer_size": ("buffer_capacity",),
    "clip_coef": ("clip_range",),
    "clip_range_vf": ("value_clip_range",),
    "clip_vloss": ("value_clip_range",),
    "compile_graph": ("compile",),
    "conservative_weight": ("cql_alpha",),
    "critic_encoder_factory": ("critic_hidden_sizes", "hidden_sizes"),
    "critic_learning_rate": ("learning_rate",),
    "critic_lr": ("critic_learning_rate", "learning_rate"),
    "cuda": ("device",),
    "discount": ("gamma",),
    "encoder_factory": ("hidden_sizes",),
    "end_e": ("epsilon_end",),
    "ent_coef": ("alpha", "entropy_coefficient"),
    "eval_freq": ("eval_interval",),
    "experiment_name": ("run_name",),
    "exploration_final_eps": ("epsilon_end",),
    "exploration_fraction": ("epsilon_fraction",),
    "exploration_initial_eps": ("epsilon_start",),
    "gradient_steps": ("gradient_updates_per_step",),
    "hidden_dim": ("hidden_sizes",),
    "hidden_dims": ("hidden_sizes",),
    "initial_temperature": ("initial_alpha",),
    "lam": ("awac_lambda",),
    "lr": ("learning_rate",),
    "lstm_hidden_size": ("recurrent_size",),
    "lr_schedule": ("learning_rate_schedule",),
    "max_weight": ("max_advantage_weight",),
    "n_action_samples": ("num_cql_samples",),
    "n_critics": ("num_critics",),
    "n_envs": ("num_envs",),
    "n_epochs": ("num_epochs",),
    "n_eval_episodes": ("eval_episodes",),
    "n_quantiles": ("num_quantiles",),
    "n_steps": ("n_step", "rollout_steps"),
    "n_updates": ("gradient_updates_per_step",),
    "net_arch": ("hidden_sizes",),
    "norm_adv": ("normalize_advantages",),
    "normalize_advantage": ("normalize_advantages",),
    "num_minibatches": ("batch_size",),
    "num_steps": ("rollout_steps", "total_timesteps"),
    "observation_scaler": ("normalize_observations",),
    "optimize_memory_usage": (),
    "policy_frequency": ("policy_delay",),
    "policy_kwargs": ("hidden_sizes", "activation"),
    "policy_lr": ("actor_learning_rate", "learning_rate"),
    "q_func_factory": (),
    "q_lr": ("critic_learning_rate", "learning_rate"),
    "random_steps": ("learning_starts",),
    "replay_buffer_class": ("replay",),
    "replay_size": ("buffer_capacity",),
    "reward_scaler": ("dataset",),
    "start_e": ("epsilon_start",),
    "target_network_frequency": ("target_update_interval", "tau"),
    "target_noise_clip": ("noise_clip",),
    "target_policy_noise": ("policy_noise",),
    "target_smoothing_clip": ("noise_clip",),
    "target_smoothing_sigma": ("policy_noise",),
    "target_update_interval": ("tau",),
    "temp_learning_rate": ("alpha_learning_rate",),
    "tensorboard_log": ("output_dir",),
    "top_quantiles_to_drop_per_net": ("top_quantiles_to_drop_per_critic",),
    "track": ("trackers",),
    "train_freq": ("train_frequency",),
    "update_epochs": ("num_epochs",),
    "update_actor_interval": ("policy_delay",),
    "update_interval": ("train_frequency",),
    "update_start_step": ("learning_starts",),
    "use_gpu": ("device",),
    "use_sde": (),
    "value_encoder_factory": ("hidden_sizes",),
    "vf_coef": ("value_coefficient",),
    "weight_temp": ("beta",),
}
"""Settings of other packages, and ours that replace them: the first one that the algorithm has.

Those without a counterpart have none.
"""

NOTES: Mapping[str, str] = {
    "action_noise": "a standard deviation relative to half the action range",
    "anneal_lr": "'linear'",
    "autotune": "'auto' tunes it, a number fixes it",
    "clip_vloss": "a number",
    "cuda": "'auto', 'cpu' or 'cuda'",
    "ent_coef": "'auto' tunes it, a number fixes it",
    "gradient_steps": "the default is one update per step, also with several environments; "
    "-1 is not needed",
    "num_minibatches": "the number of transitions in each",
    "observation_scaler": "True or False",
    "policy_kwargs": "for example hidden_sizes=[256, 256], activation='relu'",
    "replay_buffer_class": "{'hindsight': {}} for HerReplayBuffer",
    "reward_scaler": "its keys reward_scale, reward_shift and reward_normalization",
    "target_update_interval": "target networks move a little at every update",
    "tensorboard_log": "each run folder in it has a tensorboard folder",
    "track": "for example ['wandb']",
    "train_freq": "a number of steps",
    "use_gpu": "'auto', 'cpu' or 'cuda'",
}
"""How to use our setting, where its values differ"""

UNUSED_IF_NONE = (
    "observation_scaler",
    "policy_kwargs",
    "replay_buffer_class",
    "reward_scaler",
    "tensorboard_log",
)
"""Settings for which None means the default, here too"""

OUR_LEARN_OPTIONS: Mapping[str, str] = {
    "eval_env": "evaluations create their own instances of the environment; "
    "set eval_interval and eval_episodes where you create the agent",
    "eval_freq": "set eval_interval where you create the agent",
    "eval_log_path": "set output_dir where you create the agent",
    "evaluators": "set eval_interval where you create the agent; "
    "evaluate_offline judges a policy by recorded data",
    "experiment_name": "set run_name where you create the agent",
    "log_interval": "set log_interval, a number of steps, where you create the agent",
    "n_epochs": "use learn(n) with a number of steps",
    "n_eval_episodes": "set eval_episodes where you create the agent",
    "n_steps": "use learn(n) with a number of steps",
    "n_steps_per_epoch": "set eval_interval and log_interval where you create the agent",
    "reset_num_timesteps": "learn(n) always trains n more steps of the same run; "
    "create a new agent for a new run",
    "save_interval": "set checkpoint_interval where you create the agent",
    "show_progress": "use progress=True or progress=False",
    "tb_log_name": "set run_name where you create the agent",
}
"""Options of other packages' `learn` or `fit`, and what to use instead"""

POLICY_NAMES = ("MlpPolicy", "CnnPolicy", "MultiInputPolicy")


def check_no_policy_class(
    agent: str, env: Any, positional: tuple[Any, ...], settings: Mapping[str, Any]
) -> None:
    """Raise `ConfigError` for calls such as `SAC("MlpPolicy", env)`, which show our form."""
    names_policy = env in POLICY_NAMES if isinstance(env, str) else _is_policy_class(env)
    if names_policy:
        theirs = positional[0] if positional else "Pendulum-v1"
        raise ConfigError(
            f"{agent}({_shown(env)}, ...): agents here take no policy class, and the environment "
            f"comes first: {agent}({_shown(theirs)}, ...); set the networks with hidden_sizes"
        )
    if "policy" in settings:
        theirs = "Pendulum-v1" if env is None else env
        raise ConfigError(
            f"policy = {_shown(settings['policy'])}: agents here take no policy class; use "
            f"{agent}({_shown(theirs)}, ...) and set the networks with hidden_sizes"
        )
    if positional:
        raise ConfigError(
            f"{agent} takes only the environment by position; pass settings by name, such as "
            f"{agent}({_shown(env)}, learning_rate=3e-4)"
        )


def has_no_effect(name: str, value: Any, known: Collection[str]) -> bool:
    """Whether another package's setting is given as None or False and changes nothing here."""
    is_off = value is None or value is False
    if not is_off or name in known or name not in OUR_SETTINGS:
        return False
    has_counterpart = any(each in known for each in OUR_SETTINGS[name])
    return not has_counterpart or (value is None and name in UNUSED_IF_NONE)


def check_setting(agent: str, name: str, value: Any, known: Collection[str]) -> None:
    """Raise `ConfigError` for another package's setting or value if we know ours."""
    if name == "learning_rate" and callable(value):
        raise ConfigError(
            "learning_rate: must be a number; for a schedule set learning_rate_schedule to "
            "'linear' or 'cosine', and learning_rate_end_factor"
        )
    if name in known or name not in OUR_SETTINGS:
        return
    ours = next((each for each in OUR_SETTINGS[name] if each in known), None)
    if ours is None:
        raise ConfigError(f"{name}: {agent} has no such setting")
    # The notes are about the first counterpart; others are numbers like their settings.
    is_first = ours == OUR_SETTINGS[name][0]
    note = f" ({NOTES[name]})" if name in NOTES and is_first else ""
    raise ConfigError(f"{name}: unknown setting; here it is called {ours}{note}")


def check_learn_options(others: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an argument that `learn` does not have."""
    for name in others:
        known = ("total_timesteps", "callbacks", "schedule", "progress")
        hint = suggestion(name, known) or f"; learn takes {', '.join(known)}"
        if name in OUR_LEARN_OPTIONS:
            raise ConfigError(f"{name}: not an option of learn; {OUR_LEARN_OPTIONS[name]}")
        raise ConfigError(f"{name}: not an option of learn{hint}")


def as_steps(given: Any) -> int | None:
    """Return a number of steps; whole numbers such as 1e5 and NumPy's are accepted."""
    if given is None:
        return None
    is_number = isinstance(given, Real | np.number) and not isinstance(given, bool)
    if not is_number or given != given // 1:
        raise ConfigError(f"total_timesteps = {given!r}: must be a whole number of steps")
    if given < 1:
        raise ConfigError(f"total_timesteps = {given!r}: must be at least 1")
    return int(given)


def as_verbose(given: Any) -> bool | None:
    """Return whether `verbose` asks for progress; None if it is not given."""
    if given is None:
        return None
    is_number = isinstance(given, Real | np.number | np.bool_)
    if not is_number:
        raise ConfigError(f"verbose = {given!r}: must be 0 or 1")
    return bool(given > 0)


def progress_choice(
    progress: bool | None, verbose: int | None, progress_bar: bool | None
) -> bool | None:
    """Return whether to show progress; None if no argument says so."""
    given = {
        "progress": progress,
        "verbose": as_verbose(verbose),
        "progress_bar": progress_bar,
    }
    chosen = {name: bool(value) for name, value in given.items() if value is not None}
    if len(set(chosen.values())) > 1:
        raise ConfigError(f"{' and '.join(chosen)}: contradict each other; use only progress")
    return next(iter(chosen.values()), None)


def either(name: str, value: Any, alias: str, aliased: Any) -> Any:
    """Return the argument that was given under one of two names."""
    if value is not None and aliased is not None:
        raise ConfigError(f"{name} and {alias}: use only {name}")
    return aliased if value is None else value


def _is_policy_class(value: Any) -> bool:
    return inspect.isclass(value) and value.__name__.endswith("Policy")


def _shown(value: Any) -> str:
    """Return a value as a user would write it."""
    if isinstance(value, str):
        return f'"{value}"'
    return value.__name__ if inspect.isclass(value) else "env"
