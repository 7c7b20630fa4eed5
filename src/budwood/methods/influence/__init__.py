"""Influence: which training examples made a prediction. Score matrices, baselines, the index, what people see."""
