"""How are transitions and frames of images kept in memory?"""
