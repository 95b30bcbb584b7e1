"""What does the page of a sweep show?"""
