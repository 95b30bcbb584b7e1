"""How are data sets opened, recorded, described and converted?"""
