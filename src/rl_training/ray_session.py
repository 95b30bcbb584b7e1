"""Join a Ray cluster, or start an embedded one, without giving up signals or the terminal.

Only runs that use Ray import this module, and importing it does not import Ray.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rl_training.errors import STOP_SIGNALS, UserError, last_line, warn_user

ADDRESS_VARIABLE = "RAY_ADDRESS"
ADDRESS_KEY = "ray_address"
"""The key of configs, for messages"""
CONNECT_SECONDS = 10.0
"""How long the head of a cluster may take to accept a connection. Ray itself would wait for two
minutes, and no signal could end that."""
_EMBEDDED = "local"
_QUIET = {
    # Ray prints reports about workers that died to the standard output, even with
    # log_to_driver=False. Our own messages say what happened, and to which environments.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Variables that apply while Ray is imported and started, unless the user has set them"""


@dataclass(frozen=True)
class RaySession:
    """The Ray that this process uses."""

    where: str
    """For messages: an embedded Ray, or which cluster and how it was chosen"""
    embedded: bool
    """Whether Ray runs on this machine only, started by this process"""

    def resources(self) -> dict[str, float]:
        """All resources of the nodes that are alive, such as `{"CPU": 8.0}`."""
        import ray

        return dict(ray.cluster_resources())


@dataclass
class _Shared:
    """The session of this process, and how many users it has."""

    session: RaySession | None = None
    address: str | None = None
    """As it was given; Ray itself may name the same place differently"""
    users: int = 0
    started_here: bool = False


_SHARED = _Shared()
_LOCK = threading.RLock()


def require_ray(needed_by: str) -> None:
    """Raise `UserError` if Ray is not installed; `needed_by` is a setting or command."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(
            f"{needed_by}: needs the package ray; install it with `pip install 'rl-training[ray]'`"
        )


@contextlib.contextmanager
def ray_session(
    address: str | None = None,
    *,
    needed_by: str = ADDRESS_KEY,
    key: str = ADDRESS_KEY,
    num_cpus: int | None = None,
    runtime_env: Mapping[str, Any] | None = None,
) -> Iterator[RaySession]:
    """Use Ray within this context; sessions of one process share one connection.

    `address` is that of a cluster (`host:port`, or `auto` for one that runs on this machine). None:
    that of the environment variable RAY_ADDRESS, or else an embedded Ray without a dashboard, which
    has `num_cpus` cores (None: those of this machine). Messages call the address `key`. A Ray that
    already runs in this process is used as it is, and left running. Raises `UserError` if Ray is
    not installed or cannot be reached.
    """
    require_ray(needed_by)
    session = _enter(address, key, num_cpus, runtime_env)
    try:
        yield session
    finally:
        _leave()


def chosen_address(address: str | None) -> str | None:
    """The cluster to join: the given one, or that of RAY_ADDRESS. None: an embedded Ray."""
    chosen = address or os.environ.get(ADDRESS_VARIABLE, "").strip() or _EMBEDDED
    return None if chosen == _EMBEDDED else chosen


def check_address(address: str | None, key: str = ADDRESS_KEY) -> None:
    """Raise `UserError` if nothing can listen at the address of the cluster to join."""
    if (chosen := chosen_address(address)) is not None:
        _check_reachable(key if address else ADDRESS_VARIABLE, chosen)


def _enter(
    address: str | None, key: str, num_cpus: int | None, runtime_env: Mapping[str, Any] | None
) -> RaySession:
    with _LOCK, _variables(_QUIET):
        import ray

        if not ray.is_initialized():
            _SHARED.session, _SHARED.users = _start(address, key, num_cpus, runtime_env), 0
            _SHARED.address, _SHARED.started_here = address, True
        elif _SHARED.session is None:
            _SHARED.session = RaySession("the Ray that already runs in this process", False)
            _SHARED.address, _SHARED.users, _SHARED.started_here = None, 0, False
        _warn_of_another(address)
        _SHARED.users += 1
        return _SHARED.session


def _warn_of_another(address: str | None) -> None:
    """Warn if this process is connected to another cluster than the one that is wanted."""
    import ray

    present = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", _EMBEDDED, present, _SHARED.address):
        warn_user(
            f"{ADDRESS_KEY} = {address!r}: not used, because this process is already connected to "
            f"the Ray at {present}"
        )


def _leave() -> None:
    with _LOCK:
        _SHARED.users -= 1
        if _SHARED.users > 0:
            return
        _SHARED.session = None
        if _SHARED.started_here:
            import ray

            _SHARED.started_here = False
            ray.shutdown()


def _start(
    address: str | None, key: str, num_cpus: int | None, runtime_env: Mapping[str, Any] | None
) -> RaySession:
    import ray

    name = key if address is not None else ADDRESS_VARIABLE
    chosen = chosen_address(address) or _EMBEDDED
    embedded = chosen == _EMBEDDED
    check_address(address, key)
    options = {"num_cpus": num_cpus, "include_dashboard": False} if embedded else {}
    try:
        with _signals_kept():
            ray.init(
                address=chosen,
                log_to_driver=False,
                logging_level=logging.CRITICAL,
                runtime_env=None if runtime_env is None else dict(runtime_env),
                **options,
            )
    except (OSError, RuntimeError, ValueError) as error:
        what = "an embedded Ray could not be started" if embedded else _told(name, chosen)
        raise UserError(f"{what}: {last_line(error)}") from error
    if embedded:
        return RaySession("an embedded Ray on this machine", True)
    return RaySession(f"the Ray cluster at {chosen} ({name})", False)


def _told(name: str, address: str) -> str:
    return f"{name} = {address!r}: the cluster cannot be joined"


def _check_reachable(name: str, address: str) -> None:
    """Raise `UserError` unless something listens at the address of a cluster."""
    if address == "auto":
        return
    if "://" in address:
        raise UserError(
            f"{name} = {address!r}: Ray Client is not supported; run this command on a machine of "
            "the cluster, with auto or host:port"
        )
    found = re.fullmatch(r"\[?([^\[\]\s]+?)\]?:(\d{1,5})", address)
    if found is None or not 0 < int(found[2]) < 65536:
        raise UserError(
            f"{name} = {address!r}: must be host:port, such as 10.0.0.1:6379, or auto for a "
            "cluster that runs on this machine"
        )
    try:
        socket.create_connection((found[1], int(found[2])), CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"{_told(name, address)}: {last_line(error)}; start one with `ray start --head`, or "
            f"leave {name} out to use an embedded Ray"
        ) from error


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep the reactions to signals that `ray.init` replaces.

    `STOP_SIGNALS` are blocked meanwhile, which the processes of an embedded Ray inherit. A SIGTERM
    or SIGUSR1 to all processes of a run, as Slurm sends it, then leaves the environments alive
    until the run is saved. They already ignore the SIGINT of a terminal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python allows only the main thread to handle signals, and Ray leaves them alone
        return
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS} - {signal.SIGINT})
    handlers = {each: signal.getsignal(each) for each in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that are not set yet, and remove them afterwards."""
    added = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
