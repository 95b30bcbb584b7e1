"""How are transitions given goals that were reached later?"""
