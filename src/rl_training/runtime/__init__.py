"""How a run proceeds: the engine, its parts, checkpoints, and the workflows over them."""
