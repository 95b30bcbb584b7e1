"""What do people see of a run?"""
