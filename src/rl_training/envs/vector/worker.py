"""A process that steps some of the environments, seen from inside it.

The parent writes one byte to say what to do and the worker one byte when it is done; numbers go
through shared memory, and whatever is rare follows the byte as a pickled message. A pipe costs a
microsecond more than a semaphore, but tells each side when the other one is gone.
"""

from __future__ import annotations

import gc
import os
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
from rl_training.envs.vector.signalling import Listener
from rl_training.envs.vector.step_arrays import (
    EnvironmentErrors,
    Field,
    StepArrays,
)

STEP, STEP_MASKED, RESET, CALL = b"s", b"m", b"r", b"c"
"""What the parent asks for"""
DONE, ENDED, MESSAGE = b"d", b"e", b"+"
"""What a worker answers: done, done and an episode ended, or a message follows"""


@dataclass(frozen=True)
class Assignment:
    """All a worker needs to know; `factory` is wrapped so that any start method can send it."""

    factory: Any
    buffer: Any
    layout: Sequence[Field]
    start: int
    stop: int
    patience: float
    """Seconds to stay awake for the next command"""


def work(
    assignment: Assignment, commands: Connection, replies: Connection, foreign: Sequence[Connection]
) -> None:
    """Do what `commands` say until that pipe ends, which it does with the parent."""
    _leave_signals_to_parent()
    for connection in foreign:
        connection.close()  # held open here, it would hide from others that the parent is gone
    gc.freeze()  # what came from the parent is not this process's to look through
    with suppress(EOFError, ConnectionError):  # the parent is gone, or does not wait for an answer
        try:
            vector = _make_vector(assignment)
        except Exception as error:
            _send(replies, _portable(error))
            return
        with closing(vector):
            _send(replies, None)
            _serve(vector, Listener(commands, assignment.patience), commands, replies)


def _make_vector(assignment: Assignment) -> SequentialVector:
    factory: EnvironmentFactory = assignment.factory.fn
    arrays = StepArrays.view(assignment.buffer, assignment.layout)
    start, stop = assignment.start, assignment.stop
    return SequentialVector(make_environments(factory, stop - start), arrays.rows(start, stop))


def _serve(
    vector: SequentialVector, listener: Listener, commands: Connection, replies: Connection
) -> None:
    sink = replies.fileno()
    while command := listener.hear():
        if command == CALL:
            _send(replies, _answer(vector, commands.recv()))
            continue
        if command == RESET:
            any_ended, errors = False, vector.reset()
        else:
            vector.start(masked=command == STEP_MASKED)
            any_ended, errors = vector.finish()
        if errors:
            _send(replies, (any_ended, _portable_errors(errors)))
        else:
            os.write(sink, ENDED if any_ended else DONE)


def _answer(vector: SequentialVector, request: tuple[Any, ...]) -> Any:
    try:
        return vector.call(*request)
    except Exception as error:
        return _portable(error)


def _send(replies: Connection, message: Any) -> None:
    os.write(replies.fileno(), MESSAGE)
    replies.send(message)


def _portable_errors(errors: EnvironmentErrors) -> EnvironmentErrors:
    return {index: _portable(error) for index, error in errors.items()}


def _portable(error: Exception) -> Exception:
    """The error as it can be sent, with its traceback here, which would be lost, as a note."""
    note = "In an environment's worker process:\n" + "".join(traceback.format_exception(error))
    try:
        sent = pickle.loads(pickle.dumps(error))
        portable = sent if isinstance(sent, Exception) else RuntimeError(str(error))
    except Exception:  # an error class may do anything when it is copied
        portable = RuntimeError(f"{type(error).__name__}: {error}")
    portable.add_note(note)
    return portable


def _leave_signals_to_parent() -> None:
    """Ctrl-C reaches the workers too, which must live until the parent has saved their state."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # So does a termination of the whole process group; a worker ends with its parent's pipe.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
