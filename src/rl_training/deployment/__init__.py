"""Policies outside of this package: exported files and the Hugging Face Hub."""
