"""How good is a policy, in an environment or on recorded data?"""
