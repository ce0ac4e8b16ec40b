"""Device time on a GPU, against ceilings measured in the same run."""
