"""Shared by all attention operations: the online softmax step and the merge of partial results."""
