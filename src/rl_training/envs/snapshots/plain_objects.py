"""Classes of other packages whose objects are plain data, so that a snapshot may contain them.

A file may only name a class of this table, and its package must already be imported.
"""

from __future__ import annotations

import sys

_WORLD_OBJECT = ("color", "contains", "cur_pos", "init_pos", "type")
_MINIGRID_OBJECTS = ("Ball", "Box", "Floor", "Goal", "Key", "Lava", "Wall")

PLAIN_CLASSES: dict[str, tuple[str, ...]] = {
    "minigrid.core.grid:Grid": ("grid", "height", "width"),
    **{f"minigrid.core.world_object:{name}": _WORLD_OBJECT for name in _MINIGRID_OBJECTS},
    "minigrid.core.world_object:Door": (*_WORLD_OBJECT, "is_locked", "is_open"),
    "minigrid.core.roomgrid:Room": (
        *("door_pos", "doors", "locked", "neighbors", "objs", "size", "top"),
    ),
    "minigrid.envs.lockedroom:LockedRoom": ("color", "doorPos", "locked", "size", "top"),
    "minigrid.envs.multiroom:MultiRoom": ("entryDoorPos", "exitDoorPos", "size", "top"),
}
"""By `module:Class`: the attributes of its objects"""


def plain_class_name(value: object) -> str | None:
    """Return the name of a plain object's class; None if the object is not plain."""
    name = f"{type(value).__module__}:{type(value).__qualname__}"
    attributes = PLAIN_CLASSES.get(name)
    # Another version of the package may have more attributes.
    return name if attributes is not None and vars(value).keys() == set(attributes) else None


def new_plain_object(name: str) -> object:
    """Return an object of the class without attributes; raises ValueError for other classes."""
    if name not in PLAIN_CLASSES:
        raise ValueError(f"an object of the class {name!r}")
    module, _, class_name = name.partition(":")
    if module not in sys.modules:
        raise ValueError(f"an object of {module}, which is not imported")
    return object.__new__(getattr(sys.modules[module], class_name))
