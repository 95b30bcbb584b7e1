"""Describe recorded data in lines for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rl_training.data.formats.moments import Ranges
from rl_training.data.summary import LeafSummary, Summary
from rl_training.errors import one_line
from rl_training.types import Json

SHOWN_COMPONENTS = 12
LONGEST_NAME = 200
LEAF_KINDS = {
    "numbers": "numbers",
    "image": "images",
    "discrete": "discrete values",
    "binary": "binary values",
}


def summary_lines(summary: Summary) -> Iterator[str]:
    """Format a summary for the terminal, in lines of at most 80 columns."""
    info, returns, lengths = summary.info, summary.returns, summary.lengths
    yield f"{info.name} ({info.kind})"
    if info.environment is not None:
        yield f"environment   {one_line(str(info.environment['id']), LONGEST_NAME)}"
    if info.provenance is not None:
        yield f"made by       {_made_by(info.provenance)}"
    dropped = f" ({summary.dropped:,} without a next observation not counted)"
    yield f"steps         {summary.steps:,}{dropped if summary.dropped else ''}"
    cut = len(returns) - summary.terminated
    yield f"episodes      {len(returns):,}: {summary.terminated:,} terminated, {cut:,} truncated"
    yield f"return        {_spread(returns)}"
    yield f"length        {_spread(lengths)}"
    if info.reference_scores is not None:
        low, high = info.reference_scores
        score = 100 * (returns.mean() - low) / (high - low)
        yield f"score         mean {score:.1f} (Minari's scale: 0 at {low:g}, 100 at {high:g})"
    yield from _observation_lines(summary)
    if info.action_kind == "discrete":
        choices = f"{info.action_dim} discrete actions" if info.action_dim else "integers"
        yield f"actions       {choices}"
        return
    shape = "" if info.action_shape is None else f" of shape {info.action_shape}"
    if not info.is_continuous:
        yield f"actions       {_numbers(info.action_dim)}{shape}, {info.action_kind}"
        return
    bounds = ""
    if summary.at_bounds is not None:
        bounds = f"; {summary.at_bounds:.1%} of them within 1 % of a bound"
    units = ", scaled to [-1, 1]" if info.actions_scaled else ""
    yield f"actions       {_numbers(info.action_dim)}{shape}{units}{bounds}"
    if summary.beyond_bounds:
        components = f"{summary.beyond_bounds:,} of {summary.steps * info.action_dim:,} components"
        yield f"  {components} are out of bounds (clip_actions)"
    yield from _range_lines(summary.actions)


def _observation_lines(summary: Summary) -> Iterator[str]:
    info = summary.info
    if info.given_observation is None:
        yield f"observations  {_numbers(info.obs_dim)}"
        yield from _range_lines(summary.observations[0].ranges)
        return
    size = sum(leaf.numbers * leaf.dtype.itemsize for leaf in info.observation.leaves)
    number = len(info.observation.leaves)
    arrays = "1 array" if number == 1 else f"{number} arrays"
    yield f"observations  {arrays}, {size:,} bytes for each step"
    if info.lossy_images:
        yield "  images are stored as JPEG: they differ from those that were recorded"
    for each in summary.observations:
        leaf, ranges = each.leaf, each.ranges
        name = f"{one_line(leaf.name, LONGEST_NAME)}: " if leaf.name else ""
        shape = f" of shape {leaf.shape}" if leaf.shape else ""
        stored = "" if leaf.kind != "numbers" or leaf.is_float32 else f", {leaf.dtype}"
        yield f"  {name}{LEAF_KINDS[leaf.kind]}{shape}{stored}{_leaf_range(each)}"
        if leaf.kind == "numbers":
            yield from _range_lines(ranges)


def _leaf_range(summary: LeafSummary) -> str:
    """Describe the values of a leaf that is not made of numbers, in a few words."""
    leaf, ranges = summary.leaf, summary.ranges
    if leaf.kind == "image":
        return (
            f", pixels {ranges.low[0]:.0f} to {ranges.high[0]:.0f}, mean {ranges.mean[0]:.1f} "
            f"± {ranges.std[0]:.1f}"
        )
    if leaf.kind == "binary":
        return f", {ranges.mean.mean():.1%} ones"
    if leaf.kind == "discrete":
        return f", values {ranges.low.min():.0f} to {ranges.high.max():.0f}"
    return ""


def _numbers(count: int) -> str:
    return "1 number" if count == 1 else f"{count} numbers"


def _made_by(provenance: Json) -> str:
    """Describe in one line how data was made from other data; the values are from a file."""
    command, source, fingerprint = (
        str(provenance.get(key, "?")) for key in ("command", "source", "source_sha256")
    )
    return one_line(f"{command} of {source} ({fingerprint:.12})", 60)


def _spread(values: np.ndarray) -> str:
    return (
        f"mean {values.mean():.2f} ± {values.std():.2f}, median {np.median(values):.2f}, "
        f"{values.min():.2f} to {values.max():.2f}"
    )


def _range_lines(ranges: Ranges) -> Iterator[str]:
    yield f"  {'':>4} {'lowest':>12} {'mean':>12} {'deviation':>12} {'highest':>12}"
    columns = zip(ranges.low, ranges.mean, ranges.std, ranges.high, strict=True)
    for index, numbers in enumerate(columns):
        if index == SHOWN_COMPONENTS and len(ranges.low) > SHOWN_COMPONENTS + 1:
            yield f"  {'...':>4} and {len(ranges.low) - index} more"
            return
        yield f"  {index:>4} " + " ".join(f"{number:>12.4g}" for number in numbers)
