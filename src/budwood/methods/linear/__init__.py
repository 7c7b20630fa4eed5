"""Linear classification on frozen features: what a language model says next, and how much of a task is in it."""
