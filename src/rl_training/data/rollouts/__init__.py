"""How are rollouts stored, and divided into minibatches?"""
