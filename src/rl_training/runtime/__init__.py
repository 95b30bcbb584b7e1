"""Which functions start, resume and evaluate runs?"""
