"""The one training loop and the one evaluation loop."""
