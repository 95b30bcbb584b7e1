"""A compiler pass: what several losses compute alike is computed once."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node


class MergeEqualNodes(CustomGraphPass):  # type: ignore[misc, unused-ignore]
    """Keeps one of all nodes that do the same to the same.

    Objectives are differentiated one by one, so a program of several holds, say, a forward pass
    that two of them need twice. The compiler finds such repetition in a graph with gradients, not
    in one that computes its own.
    """

    def __call__(self, graph: Graph) -> None:
        known: dict[Any, Node] = {}
        for node in list(graph.nodes):
            if not _is_pure(node):
                continue
            key = (node.target, _frozen(node.args), _frozen(node.kwargs))
            first = known.setdefault(key, node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)

    def uuid(self) -> str:
        """Tells compiled programs apart from those of another version of this pass."""
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _is_pure(node: Node) -> bool:
    """Whether a node gives the same whenever it is asked, and changes nothing."""
    target = node.target
    return (
        node.op == "call_function"
        and isinstance(target, torch._ops.OpOverload)
        and not target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not node.is_impure()
    )


def _frozen(value: Any) -> Any:
    """Arguments as something that can be looked up; nodes are themselves."""
    if isinstance(value, list | tuple):
        return tuple(_frozen(part) for part in value)
    if isinstance(value, dict):
        return tuple((name, _frozen(part)) for name, part in sorted(value.items()))
    # Of different types, equal numbers are not the same argument.
    return (type(value), value) if isinstance(value, bool | int | float) else value
