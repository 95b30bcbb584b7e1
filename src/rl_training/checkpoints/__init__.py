"""What is on disk, and how is it read safely?"""
