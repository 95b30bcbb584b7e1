"""Version of the package, with a fallback for a source tree that is not installed."""

import importlib.metadata

try:
    __version__ = importlib.metadata.version("rl-training")
except importlib.metadata.PackageNotFoundError:
    __version__ = "0.0.0+source"
