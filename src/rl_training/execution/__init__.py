"""How does an update run on this hardware?"""
