"""A load replayed in virtual time: the real core with a simulated worker, and what came before it.

Knows the core, and neither network nor clock nor model.
"""
