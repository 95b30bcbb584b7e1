"""Information about the system: versions, devices, and missing optional packages."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import torch

from rl_training.algorithms.spec import list_algorithm_specs
from rl_training.checkpoints.run_folder import describe_machine
from rl_training.execution.execution import missing_for_compilation
from rl_training.internals import multiplies_bfloat16

OPTIONAL = {
    "mujoco": ("mujoco", "MuJoCo environments"),
    "pygame": ("classic-control", "pictures of classic tasks"),
    "ale_py": ("atari", "Atari games"),
    "minigrid": ("minigrid", "MiniGrid"),
    "cv2": ("pixels", "resized images"),
    "panda_gym": ("goals", "panda-gym"),
    "gymnasium_robotics": ("goals", "Gymnasium-Robotics"),
    "minari": ("offline", "Minari datasets"),
    "h5py": ("offline", "HDF5 datasets"),
    "pyarrow": ("lerobot", "LeRobot datasets"),
    "starlette": ("dashboard", "the live page of runs"),
    "imageio_ffmpeg": ("video", "videos"),
    "onnx": ("export", "ONNX files"),
    "huggingface_hub": ("hub", "the Hugging Face Hub"),
    "optuna": ("sweep", "searches for settings"),
    "submitit": ("slurm", "searches on Slurm"),
    "mujoco_warp": ("warp", "MuJoCo worlds on a GPU"),
    "ray": ("ray", "environments on other machines"),
    "wandb": ("wandb", "Weights & Biases"),
    "mlflow": ("mlflow", "MLflow"),
    "trackio": ("trackio", "Trackio"),
}
"""A module of each optional part, the extra that installs it, and what it is for"""


def diagnose() -> Iterator[str]:
    """Yield the lines that `rl-training doctor` prints."""
    machine = describe_machine()
    for name, version in machine["versions"].items():
        yield f"{name:<12} {version or 'not installed'}"
    hardware = machine["hardware"]
    yield f"{'processor':<12} {hardware['processor']}, {hardware['cpu_count']} cores"
    yield f"{'threads':<12} {torch.get_num_threads()}"
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        yield f"{f'cuda:{index}':<12} {torch.cuda.get_device_name(index)}"
    if not torch.cuda.is_available():
        yield f"{'cuda':<12} not available; training runs on the CPU"
    for device in ("cpu", "cuda:0") if torch.cuda.is_available() else ("cpu",):
        missing = missing_for_compilation(device)
        state = f"not available: needs {missing}" if missing else "available"
        yield f"{'compile':<12} on {device}: {state}"
    if multiplies_bfloat16():
        yield f"{'bfloat16':<12} on cpu: used for matrix products with float32_precision=medium"
    yield f"{'algorithms':<12} {', '.join(spec.name for spec in list_algorithm_specs())}"
    for module, (extra, purpose) in OPTIONAL.items():
        if importlib.util.find_spec(module) is None:
            yield f'{"missing":<12} {module} ({purpose}: pip install "rl-training[{extra}]")'
