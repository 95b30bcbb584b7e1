"""The package's version, also where it is used from a source tree without being installed."""

import importlib.metadata

try:
    __version__ = importlib.metadata.version("rl-training")
except importlib.metadata.PackageNotFoundError:
    __version__ = "0.0.0+source"
