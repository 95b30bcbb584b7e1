"""How is recorded data read from and written to files?"""
