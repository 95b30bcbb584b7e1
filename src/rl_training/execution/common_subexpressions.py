"""A compiler pass that computes common subexpressions of several losses once."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from torch.fx import Graph, Node

from rl_training import internals


def merge_equal_nodes(graph: Graph) -> None:
    """Replace nodes that apply the same pure operator to the same arguments by the first of them.

    Losses are differentiated one by one. A program of several losses therefore repeats what two of
    them share, such as a forward pass. The compiler merges such nodes in the graphs that it
    differentiates itself, but not in a graph that contains its own differentiation.
    """
    known: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if not _is_pure(node):
            continue
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        first = known.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def pass_version() -> str:
    """Return a hash of the pass's source, by which the compile cache recognizes it."""
    sources = [Path(__file__), Path(internals.__file__)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def _is_pure(node: Node) -> bool:
    return (
        node.op == "call_function"
        and internals.is_pure_operator(node.target)
        and not node.is_impure()
    )


def _frozen(value: Any) -> Any:
    """Return node arguments as a hashable value; nodes are returned as they are."""
    if isinstance(value, list | tuple):
        return tuple(_frozen(part) for part in value)
    if isinstance(value, dict):
        return tuple((name, _frozen(part)) for name, part in sorted(value.items()))
    # Equal numbers of different types are different arguments.
    return (type(value), value) if isinstance(value, bool | int | float) else value
