"""The command `narrowkv`: probe, validate, bench, inspect, env.

Importing this package imports neither torch nor triton; a command imports what it needs when it is called.
"""
