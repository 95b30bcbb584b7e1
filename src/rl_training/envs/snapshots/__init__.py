"""How is the complete state of an environment saved and restored?"""
