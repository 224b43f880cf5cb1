"""The decode graph on a GPU: torch runs the model, the driver the rules' kernels; nothing is compiled."""
