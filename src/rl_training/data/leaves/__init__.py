"""How are the leaves of recorded observations described, chosen and stored?"""
