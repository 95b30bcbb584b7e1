"""MuJoCo Warp: many worlds of one model on a device, with their fields as tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_training.envs.tensors.captured import is_capturing
from rl_training.envs.warp.tasks import Task

if TYPE_CHECKING:
    import mujoco

RANDOMIZED: Mapping[str, tuple[tuple[str, int], ...]] = {
    "mass": (
        *(("body_mass", 1), ("body_subtreemass", 1), ("body_inertia", 1)),
        *(("body_invweight0", -1), ("dof_invweight0", -1)),
    ),
    "friction": (("geom_friction", 1),),
    "gain": (("actuator_gainprm", 1),),
}
"""The fields of the model that a factor multiplies (1) or divides (-1), by what is randomized"""


class Simulator:
    """Worlds that are stepped together; their fields are views of the simulator's memory.

    On a GPU, the substeps of an environment step are one CUDA graph, or a part of the graph that
    PyTorch is capturing.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        task: Task,
        num_envs: int,
        device: torch.device,
        randomized: tuple[str, ...] = (),
    ) -> None:
        import mujoco_warp as mjw  # optional packages
        import warp as wp

        wp.config.log_level = wp.LOG_WARNING
        wp.init()
        self._mjw, self._wp = mjw, wp
        self._torch_device = torch.empty(0, device=device).device  # "cuda" with its number
        self._device, self._task = wp.device_from_torch(self._torch_device), task
        self._is_cuda = device.type == "cuda"
        batched = [name for what in randomized for name, _ in RANDOMIZED[what]]
        with wp.ScopedDevice(self._device):
            self._model = mjw.put_model(model, dict.fromkeys(batched, num_envs))
            self._data = mjw.make_data(
                model, num_envs, nconmax=task.contacts, njmax=task.constraints
            )
        self.state = {name: self._field(name) for name in ("qpos", "qvel", "qacc_warmstart")}
        """What the next step depends on, besides `ctrl`"""
        self.ctrl = self._field("ctrl")
        self._parameters = {name: wp.to_torch(getattr(self._model, name)) for name in batched}
        self._nominal = {name: tensor.clone() for name, tensor in self._parameters.items()}
        # The first calls compile kernels, which cannot be captured.
        self._step, self._refresh = self._substeps, self._positions
        self._step()
        self._refresh()
        wp.synchronize_device(self._device)
        if self._is_cuda:
            self._step, self._refresh = self._captured(self._step), self._captured(self._refresh)
        self.fields = {name: self._field(name) for name in task.fields}

    def step(self) -> None:
        """Simulate one environment step with the controls in `ctrl`."""
        self._step()

    def refresh(self) -> None:
        """Compute the fields that follow from positions and velocities."""
        self._refresh()

    def scale(self, what: str, factors: Tensor) -> None:
        """Multiply parameters of the model in each world by a factor `(num_envs,)`."""
        for name, power in RANDOMIZED[what]:
            nominal = self._nominal[name]
            by_world = factors.view(-1, *[1] * (nominal.dim() - 1))
            self._parameters[name].copy_(nominal * by_world if power > 0 else nominal / by_world)

    def _field(self, name: str) -> Tensor:
        found: Tensor = self._wp.to_torch(getattr(self._data, name))
        return found

    def _substeps(self) -> None:
        with self._wp.ScopedDevice(self._device):
            for _ in range(self._task.frame_skip):
                self._mjw.step(self._model, self._data)
            if self._task.needs_contact_forces:
                self._mjw.rne_postconstraint(self._model, self._data)

    def _positions(self) -> None:
        with self._wp.ScopedDevice(self._device):
            self._mjw.kinematics(self._model, self._data)
            if {"cinert", "cvel"} & set(self._task.fields):
                self._mjw.com_pos(self._model, self._data)
                self._mjw.com_vel(self._model, self._data)

    def _captured(self, body: Callable[[], Any]) -> Callable[[], Any]:
        with self._wp.ScopedCapture(self._device) as capture:
            body()

        def launch() -> None:
            # On the stream of PyTorch, so that its operations and the simulation are in order.
            stream = self._wp.stream_from_torch(torch.cuda.current_stream(self._torch_device))
            if is_capturing():
                self._join_capture(body, stream)
            else:
                self._wp.capture_launch(capture.graph, stream=stream)

        return launch

    def _join_capture(self, body: Callable[[], Any], stream: Any) -> None:
        """Add the kernels of `body` to the graph that PyTorch is capturing on this stream."""
        self._wp.capture_begin(stream=stream, external=True)
        try:
            with self._wp.ScopedStream(stream, sync_enter=False):
                body()
        finally:
            self._wp.capture_end(stream=stream)
