"""What every attention operation shares: the online softmax step and the merge of partial results."""
