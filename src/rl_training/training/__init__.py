"""How does a run proceed?"""
