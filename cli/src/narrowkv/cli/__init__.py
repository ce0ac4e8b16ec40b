"""The command `narrowkv`: probe, validate, bench, inspect, env. Importing it imports neither torch nor triton."""
