"""Named tensors: canonical names, algebra, selection, and putting values into a model for a while."""
