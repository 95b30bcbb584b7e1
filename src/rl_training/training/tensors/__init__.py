"""How are transitions collected that never leave the device?"""
