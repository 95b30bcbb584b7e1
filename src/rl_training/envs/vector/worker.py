"""Step environments in worker processes: the worker's side.

The parent sends one byte per command and the worker replies with one byte when it is done. Numbers
are exchanged through shared memory; rare data, such as errors and snapshots, follow the byte as a
pickled message. A pipe is a microsecond slower than a semaphore, but each side notices when the
other one has ended.
"""

from __future__ import annotations

import gc
import pickle
import signal
import traceback
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from rl_training.envs.make import EnvironmentFactory
from rl_training.envs.vector.sequential import (
    SequentialVector,
    make_environments,
)
from rl_training.envs.vector.signalling import Listener, Speaker
from rl_training.envs.vector.step_arrays import (
    EnvironmentErrors,
    Field,
    StepArrays,
)
from rl_training.envs.wrapping import trust_modules
from rl_training.errors import STOP_SIGNALS, WORKER_TRACEBACK, as_exception

STEP, STEP_MASKED, RESET, CALL = b"s", b"m", b"r", b"c"
"""Commands of the parent"""
DONE, ENDED, MESSAGE = b"d", b"e", b"+"
"""Replies of a worker: done, done and an episode ended, or a message follows"""


@dataclass(frozen=True)
class Assignment:
    """The environments of a worker. `factory` is in a wrapper that pickles any function."""

    factory: Any
    buffer: Any
    layout: Sequence[Field]
    start: int
    stop: int
    patience: float
    """Seconds to poll for the next command before sleeping"""
    modules: Sequence[str]
    """Modules that may register the environment; a spawned process has not imported them"""


def work(
    assignment: Assignment,
    commands: Connection,
    replies: Connection,
    inherited: Sequence[Connection],
) -> None:
    """Run the commands of the parent until it closes the pipe or ends.

    `inherited` are pipe ends that belong to the parent.
    """
    leave_signals_to_parent()
    for connection in inherited:
        connection.close()  # if kept open, other workers would not notice that the parent ended
    gc.freeze()  # garbage collection need not scan what was inherited from the parent
    speaker = Speaker(replies)
    with suppress(EOFError, ConnectionError):  # the parent has ended or closed the pipe
        try:
            vector = _make_vector(assignment)
        except BaseException as error:
            _send(speaker, portable(as_exception(error)))
            return
        with closing(vector):
            _send(speaker, None)
            _serve(vector, Listener(commands, assignment.patience), speaker)


def _make_vector(assignment: Assignment) -> SequentialVector:
    trust_modules(*assignment.modules)
    factory: EnvironmentFactory = assignment.factory.fn
    arrays = StepArrays.view(assignment.buffer, assignment.layout)
    start, stop = assignment.start, assignment.stop
    return SequentialVector(
        make_environments(factory, stop - start), arrays.rows(slice(start, stop))
    )


def _serve(vector: SequentialVector, listener: Listener, speaker: Speaker) -> None:
    while command := listener.hear():
        if command == CALL:
            _send(speaker, answer(vector, listener.receive()))
            continue
        any_ended, errors = run_command(vector, command)
        if errors:
            _send(speaker, (any_ended, portable_errors(errors)))
        else:
            speaker.say(ENDED if any_ended else DONE)


def run_command(vector: SequentialVector, command: bytes) -> tuple[bool, EnvironmentErrors]:
    """Step or reset the environments; return whether an episode ended, and the errors."""
    try:
        if command == RESET:
            return False, vector.reset()
        vector.start(masked=command == STEP_MASKED)
        return vector.finish()
    except KeyboardInterrupt as error:  # raised by an environment: signals are ignored here
        return False, dict.fromkeys(range(len(vector.arrays.reward)), as_exception(error))


def answer(vector: SequentialVector, request: tuple[Any, ...]) -> Any:
    """Call a method of environments; return the values, or the error that one raised."""
    try:
        return vector.call(*request)
    except BaseException as error:  # an environment may raise anything when it is captured
        return portable(as_exception(error))


def _send(speaker: Speaker, message: Any) -> None:
    speaker.say(MESSAGE)
    speaker.send(message)


def portable_errors(errors: EnvironmentErrors) -> EnvironmentErrors:
    """Copies of the errors that can be sent to another process."""
    return {index: portable(error) for index, error in errors.items()}


def portable(error: Exception) -> Exception:
    """A copy of the error that can be pickled, with this process's traceback as a note."""
    note = f"{WORKER_TRACEBACK}\n" + "".join(traceback.format_exception(error))
    try:
        sent = pickle.loads(pickle.dumps(error))  # noqa: S301 (pickled in this line)
        portable = sent if isinstance(sent, Exception) else RuntimeError(str(error))
    except Exception:  # an exception class may raise anything when it is pickled
        portable = RuntimeError(f"{type(error).__name__}: {error}")
    portable.add_note(note)
    return portable


def leave_signals_to_parent() -> None:
    """Ignore signals to the process group: workers live until the parent has saved their state."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # blocked while it was started
