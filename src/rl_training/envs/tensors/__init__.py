"""How does an environment look whose worlds are tensors on one device?"""
