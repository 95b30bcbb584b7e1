"""Measure and draw how the package is divided into rooms.

Prints how many files a training run and one SAC update pass through, how many files each room has,
and which files import each other. `--check` fails if a bound is exceeded or if a drawing is stale.
`--draw` writes the drawings in docs/images and the table of rooms in CONTRIBUTING.md.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from architecture_drawings import draw_rooms, draw_step
from package_imports import PACKAGE, ROOT, import_cycle, mutual_imports, package_files, read_imports
from package_walk import Walk, walk_training, walk_update

MOST_FILES_TO_TRAIN = 61
MOST_FILES_TO_UPDATE = 12
MOST_FILES_IN_A_ROOM = 14

# Rooms from top to bottom: a room imports only rooms below it. Each answers one question.
ROOMS = {
    "cli": "How do people use it from a shell?",
    "api": "How do people use it from Python?",
    "sweeps": "Which settings are best, and where do their trials run?",
    "sweeps/report": "What does the page of a sweep show?",
    "report": "What do pages about runs show?",
    "deployment": "How does a policy leave this package?",
    "experiment": "Which runs belong together?",
    "runtime": "Which functions start, resume and evaluate runs?",
    "training": "How does a run proceed?",
    "training/tensors": "How are transitions collected that never leave the device?",
    "reporting": "What do people see of a run?",
    "callbacks": "How can users act on a run?",
    "evaluation": "How good is a policy?",
    "datasets": "How is recorded data opened, recorded, converted?",
    "checkpoints": "What is on disk, and how is it read safely?",
    "execution": "How does an update run on this hardware?",
    "config": "What may a config contain?",
    "algorithms": "What is learned, and how does an update change it?",
    "models": "What do networks look like?",
    "models/encoders": "How are the parts of an observation turned into features?",
    "data": "Where do batches come from?",
    "data/storage": "How are transitions and frames of images kept in memory?",
    "data/formats": "How are files of recorded data read and written?",
    "data/hindsight": "How are transitions given goals and returns that are known later?",
    "data/rollouts": "How are rollouts stored, and divided into minibatches?",
    "data/leaves": "How are the parts of recorded observations stored?",
    "envs": "How is an environment made and scaled?",
    "envs/vector": "How are several environments stepped together?",
    "envs/tensors": "How does an environment look whose worlds are tensors on one device?",
    "envs/tensors/adapters": "How do simulators of other packages become tensor environments?",
    "envs/warp": "How do Gymnasium's MuJoCo tasks run as thousands of worlds on a GPU?",
    "envs/snapshots": "How is an environment's state saved and restored?",
    "ray": "How is a Ray cluster joined or started?",
    "types": "What are a batch, a result and an error?",
    "internals": "Which private functions of other libraries are used?",
}
# Files that are not in a folder belong to the room that their name begins with, or to one of these.
ROOMS_OF_FILES = {
    "__main__": "cli",
    "errors": "types",
    "lazy": "types",
    "observations": "types",
    "validation": "types",
    "version": "types",
}
TABLE_START = "<!-- Written by `make architecture`: from here -->\n"
TABLE_END = "<!-- Written by `make architecture`: to here -->\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="fail if a bound is exceeded")
    parser.add_argument("--draw", action="store_true", help="write the drawings and the table")
    options = parser.parse_args(arguments)
    update, training = walk_update(), walk_training()
    print(report(training, update))
    texts = generated_files(training, update)
    if options.draw:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if not options.check:
        return 0
    problems = [*static_problems(), *traced_problems(training, update), *stale_files(texts)]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def report(training: Walk, update: Walk) -> str:
    imports, shared, repeated = read_imports(), files_per_room(), repeated_files()
    rooms = [
        f"  {room:15} {shared[room]:3}"
        + (f"  (+ {repeated[room]}, one per algorithm or family)" if repeated[room] else "")
        for room in ROOMS
    ]
    return "\n".join(
        [
            f"train --config sac/pendulum: {_size(training)}; at most {MOST_FILES_TO_TRAIN} files",
            f"one SAC update: {_size(update)}; at most {MOST_FILES_TO_UPDATE} files",
            f"files per room, at most {MOST_FILES_IN_A_ROOM}:",
            *rooms,
            f"pairs of files that import each other: {mutual_imports(imports) or 'none'}",
            f"import cycles: {import_cycle(imports) or 'none'}",
        ]
    )


def _size(walk: Walk) -> str:
    return f"{len(walk.files)} files, {walk.lines:,} lines, {len(walk.codes)} functions"


def static_problems() -> list[str]:
    """Bounds on rooms and imports that are exceeded."""
    imports = read_imports()
    full = {room: count for room, count in files_per_room().items() if count > MOST_FILES_IN_A_ROOM}
    return [
        *(f"{room}: {count} files, at most {MOST_FILES_IN_A_ROOM}" for room, count in full.items()),
        *(f"{one} and {other} import each other" for one, other in mutual_imports(imports)),
        *([f"import cycle: {cycle}"] if (cycle := import_cycle(imports)) else []),
    ]


def traced_problems(training: Walk, update: Walk) -> list[str]:
    """Bounds on what runs that are exceeded."""
    bounds = [
        ("train --config sac/pendulum", training, MOST_FILES_TO_TRAIN),
        ("one SAC update", update, MOST_FILES_TO_UPDATE),
    ]
    return [
        f"{name}: {len(walk.files)} files, at most {most}"
        for name, walk, most in bounds
        if len(walk.files) > most
    ]


def generated_files(training: Walk, update: Walk) -> dict[Path, str]:
    images = ROOT / "docs/images"
    contributing = ROOT / "CONTRIBUTING.md"
    return {
        images / "rooms.svg": rooms_drawing(),
        images / "step.svg": draw_step(training.step),
        contributing: _with_table(contributing.read_text(encoding="utf-8"), training, update),
    }


def stale_files(texts: dict[Path, str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}: stale; run `make architecture`"
        for path, text in texts.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def rooms_drawing() -> str:
    """The drawing of all rooms. A folder inside a room is drawn as part of that room."""
    graph: dict[str, set[str]] = {room: set() for room in ROOMS if "/" not in room}
    for file, imported in read_imports().items():
        if file != "__init__.py":
            graph[main_room(file)] |= {main_room(each) for each in imported}
    for room, targets in graph.items():
        targets.discard(room)
    counts = files_per_room() + repeated_files()
    return draw_rooms(graph, {room: _labels(room, counts) for room in graph})


def _labels(room: str, counts: Counter[str]) -> list[str]:
    """A room's name and size, its question, and the folders inside it."""
    inner = [f"{each}: {counts[each]}" for each in ROOMS if each.startswith(f"{room}/")]
    files = "1 file" if counts[room] == 1 else f"{counts[room]} files"
    return [f"{room}: {files}", ROOMS[room], *([f"and in {', '.join(inner)}"] if inner else [])]


def main_room(file: str) -> str:
    """The room of a file; for a folder inside a room, the outer room."""
    return room_of(file).split("/")[0]


def files_per_room() -> Counter[str]:
    return Counter(room_of(file) for file in _counted_files() if not _is_repeated(file))


def repeated_files() -> Counter[str]:
    """Files per room that exist once per algorithm or per family of models."""
    return Counter(room_of(file) for file in _counted_files() if _is_repeated(file))


def _counted_files() -> list[str]:
    return [file for file in package_files() if not file.endswith("__init__.py")]


def _is_repeated(file: str) -> bool:
    name = Path(file).stem
    return file.startswith("models/mlp_") or name.removesuffix("_trainer") in _algorithms()


def _algorithms() -> set[str]:
    return {path.name for path in (PACKAGE / "assets/configs").iterdir() if path.is_dir()}


def room_of(file: str) -> str:
    folder, name = str(Path(file).parent), Path(file).stem
    room = ROOMS_OF_FILES.get(name, name.split("_")[0]) if folder == "." else folder
    if room not in ROOMS:
        raise ValueError(f"{file} is in no room; name its room and question in {__file__}")
    return room


def _with_table(text: str, training: Walk, update: Walk) -> str:
    """`text` with the table of rooms between its two marks."""
    head, rest = text.split(TABLE_START)
    _, tail = rest.split(TABLE_END)
    shared, repeated = files_per_room(), repeated_files()
    rows = [
        f"| {_title(room)} | {question} | {shared[room]}"
        + (f" + {repeated[room]} |" if repeated[room] else " |")
        for room, question in ROOMS.items()
    ]
    lines = [
        "| room | its one question | files |",
        "|---|---|---|",
        *rows,
        "",
        "| figure | now | at most |",
        "|---|---|---|",
        f"| files that `train --config sac/pendulum` runs through | {len(training.files)} "
        f"| {MOST_FILES_TO_TRAIN} |",
        f"| files that one SAC update on a given batch runs through | {len(update.files)} "
        f"| {MOST_FILES_TO_UPDATE} |",
        f"| files in the largest room | {max(shared.values())} | {MOST_FILES_IN_A_ROOM} |",
        f"| pairs of files that import each other | {len(mutual_imports(read_imports()))} | 0 |",
    ]
    return head + TABLE_START + "\n".join(lines) + "\n" + TABLE_END + tail


def _title(room: str) -> str:
    if (PACKAGE / room).is_dir():
        return f"`{room}/`"
    files = [file for file in _counted_files() if "/" not in file and room_of(file) == room]
    return ", ".join(f"`{file}`" for file in files)


if __name__ == "__main__":
    sys.exit(main())
