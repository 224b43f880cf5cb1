"""Runs the PTX that ships, on a CPU: every access checked, races detected, compared with the oracle."""
