"""How are many environments stepped as one, in this process or in worker processes?"""
