"""How are transitions given goals and returns that are known later?"""
