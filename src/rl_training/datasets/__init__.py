"""How are datasets opened, recorded, described and converted?"""
