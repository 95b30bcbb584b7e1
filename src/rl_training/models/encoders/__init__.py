"""Networks that turn the parts of an observation into features."""
