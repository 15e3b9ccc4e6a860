"""The decisions: pure code that is called with the time and answers with plans.

Nothing here waits, reads a clock, draws a random number or knows a network.
"""
