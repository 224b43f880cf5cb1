"""The model folder: read as data, checked, hashed in one pass. Nothing in it is imported or executed."""
