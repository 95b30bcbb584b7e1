"""How do Gymnasium's MuJoCo tasks run as thousands of worlds on a GPU?"""
